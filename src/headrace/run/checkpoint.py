"""Checkpoints: what is in them, which there are, and how they are read.

A checkpoint is a folder `step_000020` with a manifest. It is written beside and renamed, so a folder of that name was
complete once; its checksums show whether it still is.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.errors import CheckpointError, ConfigError
from headrace.run import manifest

if TYPE_CHECKING:
    from headrace.backends.base import Backend

_PREFIX = "step_"
_STATE, _RANDOM = "trainer.json", "random.json"
Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class TrainerState:
    """Where the loop stands, beside what the backend saves."""

    step: int
    version: int
    sampler_position: tuple[int, int]
    next_group_id: int
    evaluations: list[dict[str, float]] = field(default_factory=list)
    """Every evaluation so far, oldest first; `eval/step` says of which step."""
    unfinished: list[tuple[int, tuple[int, int]]] = field(default_factory=list)
    """Groups that were drawn and not trained: id, and where their task was drawn."""
    random: dict[str, Any] = field(default_factory=dict)
    """`random_states()` as they were."""
    extra: dict[str, Any] = field(default_factory=dict)
    """What the parts of the loop want to find again, as JSON: tuples come back as lists, keys as strings."""
    ledger: dict[str, Any] = field(default_factory=dict)
    """What the ledger must contain (see agreement.py); empty without a ledger."""

    @property
    def first_evaluation(self) -> dict[str, float]:
        """The one before training; empty if there was none."""
        return next((without_step(found) for found in self.evaluations if found["eval/step"] == 0), {})

    @property
    def last_evaluation(self) -> dict[str, float]:
        """The newest; empty if there is none."""
        return without_step(self.evaluations[-1]) if self.evaluations else {}

    def texts(self) -> dict[str, str]:
        """The files that hold this, as it is now."""
        values = asdict(self)
        random = values.pop("random")
        return {_STATE: json.dumps(values), _RANDOM: json.dumps(random)}

    @classmethod
    def read(cls, folder: Path) -> TrainerState:
        """The inverse of `texts`."""
        try:
            values = json.loads((folder / _STATE).read_text())
            values["random"] = json.loads((folder / _RANDOM).read_text())
            values["sampler_position"] = tuple(values["sampler_position"])
            values["unfinished"] = [(group_id, (epoch, place)) for group_id, (epoch, place) in values["unfinished"]]
            return cls(**values)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise CheckpointError(
                f"cannot read the checkpoint {folder}: {type(error).__name__}: {error}; choose another one, or use the "
                f"Headrace that wrote it"
            ) from error


def without_step(evaluation: dict[str, float]) -> dict[str, float]:
    """An evaluation's metrics alone."""
    return {key: value for key, value in evaluation.items() if key != "eval/step"}


def with_evaluation(evaluations: Sequence[dict[str, float]], found: dict[str, float]) -> list[dict[str, float]]:
    """The history with one more. One of the same step is replaced: a resumed run may repeat it."""
    return [*(one for one in evaluations if one["eval/step"] != found["eval/step"]), found]


def checkpoint_folder(run_dir: Path, step: int) -> Path:
    """Folder of the checkpoint of a step."""
    return run_dir / "checkpoints" / f"{_PREFIX}{step:06d}"


def step_of(checkpoint: Path) -> int:
    """The inverse of `checkpoint_folder`."""
    return int(checkpoint.name.removeprefix(_PREFIX))


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder was a whole checkpoint once."""
    return (folder / manifest.NAME).is_file()


def list_checkpoints(run_dir: Path) -> list[Path]:
    """Checkpoints that were written to their end, oldest first. `find_damage` says whether they are intact."""
    return [folder for folder in _folders(run_dir) if is_checkpoint(folder)]


def _folders(run_dir: Path) -> list[Path]:
    """All that bear the name of one."""
    found = (run_dir / "checkpoints").glob(f"{_PREFIX}*")
    return sorted((path for path in found if path.name.removeprefix(_PREFIX).isdecimal()), key=step_of)


@dataclass(frozen=True, slots=True)
class Found:
    """The newest intact checkpoint, and the damaged ones that were passed over for it, with what is wrong."""

    intact: Path
    damaged: tuple[tuple[Path, str], ...] = ()


def find_intact(path: Path) -> Found | None:
    """A checkpoint, or the newest intact one of a run folder; None if there is none at all. Damage is an error."""
    if is_checkpoint(path):
        damage = manifest.find_damage(path)
        if damage:
            raise CheckpointError(f"the checkpoint {path} is damaged: {damage}; choose another one")
        return Found(path)
    damaged: list[tuple[Path, str]] = []
    for folder in reversed(_folders(path)):
        damage = manifest.find_damage(folder)
        if not damage:
            return Found(folder, tuple(damaged))
        damaged.append((folder, damage))
    if not damaged:
        return None
    found = "; ".join(f"{folder.name}: {damage}" for folder, damage in damaged)
    raise CheckpointError(
        f"no checkpoint of {path} is intact ({found}); put one back from a copy, or start a new run with "
        f'run.resume = "never"'
    )


async def load_newest(
    path: Path, backend: Backend, report: Report = lambda _: None, set_aside: bool = False
) -> TrainerState | None:
    """Load a checkpoint, or the newest intact one of a run folder; None if there is none at all.

    Damaged ones are reported and skipped. `set_aside` renames them: they are no longer this run's newest.
    """
    found = await asyncio.to_thread(find_intact, path)
    if found is None:
        return None
    for folder, damage in found.damaged:
        report(f"the checkpoint {folder} is damaged: {damage}; it is skipped for the one before")
    state = TrainerState.read(found.intact)
    await backend.load(found.intact)
    report(f"{'resuming from' if set_aside else 'loaded'} {found.intact}")
    for folder, _ in found.damaged if set_aside else ():
        report(f"the damaged checkpoint is now {_set_aside(folder)}; delete it when you have looked at it")
    return state


async def load_checkpoint(path: Path, backend: Backend, report: Report = lambda _: None) -> TrainerState:
    """`load_newest`, where there must be one."""
    state = await load_newest(path, backend, report)
    if state is None:
        raise ConfigError(f"{path} is neither a checkpoint nor a run folder with one")
    return state


def _set_aside(folder: Path) -> Path:
    aside = folder.with_name(f"damaged_{folder.name}")
    shutil.rmtree(aside, ignore_errors=True)
    return folder.rename(aside)
