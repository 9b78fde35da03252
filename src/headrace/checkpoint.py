"""Checkpoints: written beside and renamed, so that a kill while saving leaves the previous one whole."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path

from headrace.backends.base import Backend
from headrace.errors import BackendError

_PREFIX = "step_"


@dataclass(frozen=True, slots=True)
class TrainerState:
    """Where the loop stands, beside what the backend saves."""

    step: int
    version: int
    sampler_position: tuple[int, int]
    next_group_id: int
    first_evaluation: dict[str, float]
    unfinished: list[tuple[int, tuple[int, int]]] = field(default_factory=list)
    """Groups that were drawn and not trained: id, and where their task was drawn."""


def checkpoint_folder(run_dir: Path, step: int) -> Path:
    """Folder of the checkpoint of a step."""
    return run_dir / "checkpoints" / f"{_PREFIX}{step:06d}"


async def save_checkpoint(run_dir: Path, state: TrainerState, backend: Backend, keep_last: int) -> Path:
    """Save backend and trainer state; drop all but the newest `keep_last`."""
    target = checkpoint_folder(run_dir, state.step)
    beside = target.with_name(f".{target.name}.partial")
    shutil.rmtree(beside, ignore_errors=True)
    await backend.save(beside)
    (beside / "trainer.json").write_text(json.dumps(asdict(state)))
    shutil.rmtree(target, ignore_errors=True)
    beside.rename(target)
    for old in list_checkpoints(run_dir)[:-keep_last]:
        shutil.rmtree(old)
    return target


def list_checkpoints(run_dir: Path) -> list[Path]:
    """Whole checkpoints, oldest first."""
    found = {p.name.removeprefix(_PREFIX): p for p in (run_dir / "checkpoints").glob(f"{_PREFIX}*")}
    whole = {int(step): p for step, p in found.items() if step.isdecimal() and (p / "trainer.json").is_file()}
    return [whole[step] for step in sorted(whole)]


async def load_checkpoint(folder: Path, backend: Backend) -> TrainerState:
    """Load the backend's state and return the trainer's."""
    try:
        values = json.loads((folder / "trainer.json").read_text())
        unfinished = [(group_id, (epoch, place)) for group_id, (epoch, place) in values["unfinished"]]
        position = tuple(values["sampler_position"])
        state = TrainerState(**{**values, "sampler_position": position, "unfinished": unfinished})
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise BackendError(f"cannot read the checkpoint {folder}: {error}; choose another one") from error
    await backend.load(folder)
    return state
