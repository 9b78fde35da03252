"""What all schedulers are asked to do: one command, on so many nodes, within a time."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

from headrace.config import RunConfig
from headrace.config.derived import uses_ray
from headrace.errors import ConfigError

SHARE_FOR_THE_STEP = 0.5
"""Of the scheduler's grace period; the rest is for saving, and for children to end."""


@dataclass(frozen=True, slots=True)
class Job:
    """A run as it was given on the command line, and its configuration."""

    config: RunConfig
    files: tuple[Path, ...]
    overrides: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """What the scheduler calls it."""
        return self.config.run.name

    def command(self, files: Sequence[str | PurePath], *settings: str) -> list[str]:
        """`headrace train` with these files, the user's overrides and what the scheduler needs."""
        grace_s = self.config.launch.grace_s * SHARE_FOR_THE_STEP
        own = [f"--run.grace_s={grace_s:g}"] if self.config.run.grace_s is None else []
        joins = ["--cluster.address=auto"] if uses_ray(self.config) else []
        return ["headrace", "train", *map(str, files), *self.overrides, *joins, *own, *settings]


def check_job(config: RunConfig) -> None:
    """Raise ConfigError for what would ask for nodes that nothing runs on, or for more than they have."""
    launch = config.launch
    if launch.nodes > 1 and not uses_ray(config):
        raise ConfigError(
            f"launch.nodes = {launch.nodes}, and no part of the run is placed on a cluster: all nodes but one would be "
            f'idle; set launch.nodes = 1, or cluster.address = "auto" with backend.name = "fsdp" or '
            f'judge.placement = "ray"'
        )
    if config.run.resume == "never":
        raise ConfigError(
            'run.resume = "never" starts a new run whenever the scheduler starts the job again; remove it (each run '
            "name is a run of its own)"
        )


def submit(words: Sequence[str], text: str | None, extra: str) -> str:
    """Run a scheduler's own program, with `text` as its input; what it printed. ConfigError where it is absent."""
    if shutil.which(words[0]) is None:
        raise ConfigError(
            f"{words[0]} is not on this machine's PATH; {extra}, or use --dry-run and submit what it prints elsewhere"
        )
    done = subprocess.run(words, input=text, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip()
        raise ConfigError(f"`{shlex.join(words[:3])} ...` failed with exit code {done.returncode}: {said}")
    return done.stdout.strip()
