"""The options of `headrace serve tinker`, and how a request is refused."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from headrace.errors import ConfigError, HeadraceError
from headrace.utils.loopback import is_loopback


class Refusal(HeadraceError, ValueError):
    """A request that is not carried out; the client gets the status and the sentence."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Model, address and limits of a server."""

    model: str = "bundled"
    name: str | None = None
    """What clients call the model; by default its own name."""
    host: str = "127.0.0.1"
    port: int = 8500
    api_key: str | None = None
    public_host: str | None = None
    """Name under which clients reach the server, beside its address: a proxy's, say."""
    folder: Path = Path("tinker")
    """Where checkpoints are kept."""
    dtype: str = "float32"
    threads: int = 0
    """Threads of the tensor library; 0 for its own choice."""
    rank_limit: int = 256
    max_models: int = 8
    """Training models at once."""
    max_samplers: int = 16
    """Sets of sampler weights in memory at once."""
    max_batch: int = 128
    """Sequences that are decoded together."""
    max_waiting: int = 8192
    """Sequences that may wait. With more, requests are refused with 429, and clients try again."""
    max_model_length: int | None = None
    micro_batch_tokens: int = 1536
    max_sessions: int = 256
    """Clients at once."""
    session_timeout_s: float = 60.0
    """Without a sign of life for this long, a session ends and its memory is freed. The SDK gives one every 10 s."""
    order_wait_s: float = 60.0
    """How long a request waits for one of the same model with a smaller number."""
    results_mb: float = 512.0
    """Memory for results; the oldest are dropped beyond it, those first that were fetched."""
    max_body_mb: float = 256.0

    def __post_init__(self) -> None:
        if self.api_key is not None and not self.api_key.startswith("tml-"):
            raise ConfigError('the API key must start with "tml-", or the SDK does not send it; change --api-key')
        if self.api_key is None and not is_loopback(self.host):
            raise ConfigError(
                f"--host {self.host} can be reached from other machines, and no API key is set; "
                "give --api-key tml-SECRET, or keep to 127.0.0.1"
            )
        counts = ("rank_limit", "max_models", "max_samplers", "max_batch", "max_waiting", "max_sessions")
        for name in (*counts, "micro_batch_tokens", "session_timeout_s", "order_wait_s", "results_mb", "max_body_mb"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"--{name.replace('_', '-')} must be above 0, got {getattr(self, name)}")
        if not 0 <= self.port < 65536:
            raise ConfigError(f"--port must be between 0 (any free one) and 65535, got {self.port}")
