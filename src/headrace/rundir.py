"""The run directory: made, claimed and described in one place."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from headrace.config import RunConfig
from headrace.errors import ConfigError

_FINISHED = "finished"


def prepare_run_dir(config: RunConfig) -> Path:
    """Make the run's folder and write its resolved configuration.

    A folder that holds an unfinished run is gone on with. A finished one is left alone: the run gets NAME-2, NAME-3 …
    """
    base = config.run.dir / config.run.name
    folder, number = base, 1
    while (folder / _FINISHED).exists():
        number += 1
        folder = base.with_name(f"{base.name}-{number}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(config.model_dump_json(indent=2) + "\n")
    except OSError as error:
        raise ConfigError(
            f"cannot write the run folder {folder}: {error.strerror}; choose another with --run-dir"
        ) from None
    return folder


def mark_finished(run_dir: Path, summary: dict[str, float]) -> None:
    """Record that the run is complete."""
    (run_dir / _FINISHED).write_text(json.dumps(summary, indent=2) + "\n")


class _RunLog(logging.FileHandler):
    """Takes Headrace's logger over until it is closed, and gives it back as it was.

    A closed handler that stayed would open its file again for the next run.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        logger = logging.getLogger("headrace")
        self._before = (logger.level, logger.propagate)
        logger.addHandler(self)
        logger.setLevel(logging.INFO)
        logger.propagate = False

    def close(self) -> None:
        logger = logging.getLogger("headrace")
        if self in logger.handlers:  # the logging module closes every handler once more at exit
            logger.removeHandler(self)
            level, logger.propagate = self._before
            logger.setLevel(level)
        super().close()


def log_to_file(run_dir: Path) -> logging.Handler:
    """Send Headrace's log to log.txt; returns the handler, to be closed at the end."""
    return _RunLog(run_dir / "log.txt")
