"""Small backends that keep one number on disk, and states to save with them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from headrace.config import RunConfig
from headrace.config.loading import build_config
from headrace.run.checkpoint import TrainerState
from headrace.run.checkpoint_writer import CheckpointWriter


class FileBackend:
    """Writes its number in two files, one of them in a folder; `fails` is raised after the first."""

    def __init__(self, weights: int = 0, fails: BaseException | None = None, bytes_: int = 0) -> None:
        self.weights, self.fails, self.bytes = weights, fails, bytes_

    async def save(self, folder: Path) -> None:
        self._write(folder, self.weights)

    async def load(self, folder: Path) -> None:
        self.weights = int((folder / "weights").read_text())
        assert self.weights == int((folder / "optimizer" / "moments").read_text())

    def _write(self, folder: Path, weights: int) -> None:
        (folder / "optimizer").mkdir(parents=True)
        (folder / "weights").write_text(str(weights).zfill(self.bytes))
        if self.fails is not None:
            raise self.fails
        (folder / "optimizer" / "moments").write_text(str(weights))


class SnapshotBackend(FileBackend):
    """The same, and its copy is written while it goes on."""

    async def snapshot(self) -> Callable[[Path], None]:
        weights = self.weights
        return lambda folder: self._write(folder, weights)


def some_state(step: int, **changes: Any) -> TrainerState:
    return TrainerState(step, step, (1, 4), 12, **changes)


def score(step: int, value: float) -> dict[str, float]:
    return {"eval/words/pass@1": value, "eval/step": float(step)}


def some_config(**trainer: Any) -> RunConfig:
    return build_config({"trainer": trainer, "eval": {"every": 1, "sets": {"words": {"tasks": "countdown"}}}})


def writer(run_dir: Path, backend: Any = None, **trainer: Any) -> CheckpointWriter:
    given: Any = backend or FileBackend()
    config = some_config(**trainer)
    return CheckpointWriter(run_dir, given, config.trainer, config.eval.sets)


async def save_one(
    run_dir: Path, step: int, backend: Any = None, state: TrainerState | None = None, **trainer: Any
) -> Path:
    """Save the checkpoint of a step, whose weights are its number, to the end."""
    backend = backend or FileBackend(step)
    saving = writer(run_dir, backend, **trainer)
    try:
        target = await saving.save(state or some_state(step))
        await saving.wait()
    finally:
        await saving.close()
    return target
