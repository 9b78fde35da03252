"""ViewOptions: what `headrace view` was asked to show, and where."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from headrace.errors import ConfigError
from headrace.utils.loopback import is_loopback


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewOptions:
    """Checked when made."""

    root: Path
    host: str = "127.0.0.1"
    port: int = 0
    token: str | None = None
    public_host: str | None = None

    def __post_init__(self) -> None:
        if not self.root.is_dir():
            raise ConfigError(f"there is no folder {self.root}; give the folder of a run, or one that holds runs")
        if not 0 <= self.port < 65536:
            raise ConfigError(f"--port must be between 0 (any free one) and 65535, got {self.port}")
        if not self.token and not is_loopback(self.host):
            raise ConfigError(
                f"--host {self.host} can be reached from other machines, and there is no token; give one with --token "
                f"or HEADRACE_VIEW_TOKEN"
            )
