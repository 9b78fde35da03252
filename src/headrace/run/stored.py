"""What a run folder says of the run: its configuration, and what else its results depend on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from headrace.errors import ConfigError

CONFIG, NUMERICS, OBJECTS, TASKS = "config.json", "numerics.json", "objects.json", "tasks.json"


def stored_config(folder: Path) -> dict[str, Any] | None:
    """The configuration that a run was last started with; None if the folder holds no run."""
    path = folder / CONFIG
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"cannot read {path}, with which the run was begun: {error}; put it back from a copy, or start a new run "
            f'with run.resume = "never"'
        ) from None
    if not isinstance(values, dict):
        raise ConfigError(f'{path} holds no configuration; start a new run with run.resume = "never"')
    return values


def stored_numerics(folder: Path) -> dict[str, str]:
    """What the bits of the run depend on beside its configuration; empty if that is not known."""
    return stored_texts(folder, NUMERICS)


def stored_texts(folder: Path, name: str) -> dict[str, str]:
    """A file of names and texts; empty if it is not there."""
    path = folder / name
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            f'cannot read {path}: {error}; put it back from a copy, or start a new run with run.resume = "never"'
        ) from None
