"""CheckpointWriter: a kill at any moment, or a full disk, leaves the checkpoint before it whole.

A checkpoint is written into a folder beside, synced, sealed with checksums and renamed. Nothing old is deleted before
the new one is in its place. Names that begin with a dot are ours: `tidy` clears up what a kill left of them.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import shutil
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.config import TrainerSection
from headrace.config.rules import best_metric
from headrace.errors import BackendError, CheckpointError, ConfigError, SnapshotLostError
from headrace.run import manifest
from headrace.run.checkpoint import Report, TrainerState, checkpoint_folder, find_intact, list_checkpoints, step_of
from headrace.utils.durable import put_in_place, sync_tree

if TYPE_CHECKING:
    from headrace.backends.base import Backend

_log = logging.getLogger(__name__)
_PARTIAL, _REPLACED, _DELETED = "partial", "replaced", "deleted"
WriteState = Callable[[Path], None]
Snapshot = Callable[[], Awaitable[WriteState]]


class CheckpointWriter:
    """Writes the checkpoints of a run, one after another; with `trainer.save_async` while training continues."""

    def __init__(self, run_dir: Path, backend: Backend, trainer: TrainerSection, sets: Collection[str] = ()) -> None:
        """`sets` are the names of the evaluation sets, by which `trainer.keep_best` goes."""
        self._run_dir = run_dir
        self._backend = backend
        self._section = trainer
        self._best_metric = best_metric(trainer, sets)
        self._snapshot: Snapshot | None = getattr(backend, "snapshot", None)  # not every backend can copy its state
        if self._section.save_async and self._snapshot is None:
            raise ConfigError(
                f"trainer.save_async = true needs a backend with the method snapshot, and {type(backend).__name__} has "
                f"none; leave it out to write as much as possible beside training, or set it to false"
            )
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="headrace-checkpoint")
        self._writing: asyncio.Future[None] | None = None

    async def save(self, state: TrainerState, last: bool = False, undecided: Collection[int] = ()) -> Path:
        """Copy the state and begin to write it, once the checkpoint before it is complete.

        The `last` one is written at once, as nothing runs beside it. Checkpoints of `undecided` steps are kept: they
        are still being evaluated.
        """
        await self.wait()
        target = checkpoint_folder(self._run_dir, state.step)
        keep = self._keeper(state, undecided)
        texts = state.texts()  # now: what it refers to keeps changing
        write: WriteState | None = None
        with explained(target, self._run_dir):
            _new_folder(target)
            if self._snapshot is None or last or self._section.save_async is False:
                await self._backend.save(_beside(target, _PARTIAL))
            else:
                write = await self._snapshot()
        loop = asyncio.get_running_loop()
        self._writing = loop.run_in_executor(self._thread, self._write, target, write, texts, keep)
        if last or self._section.save_async is False:
            await self.wait()
        return target

    async def wait(self) -> None:
        """Until what is being written is complete; raises what went wrong with it."""
        if self._writing is not None:
            await asyncio.shield(self._writing)  # who waits may be cancelled, what is written not

    async def close(self) -> None:
        """`wait` at the end of a run, which may have ended for another reason already: a failure is only logged."""
        try:
            await self.wait()
        except CheckpointError as error:
            _log.error("%s", error)
        self._thread.shutdown(wait=False)

    # ---- on the writing thread ------------------------------------------------------------------------------------

    def _write(
        self, target: Path, write: WriteState | None, texts: Mapping[str, str], keep: Callable[[list[int]], set[int]]
    ) -> None:
        beside = _beside(target, _PARTIAL)
        try:
            if write is not None:
                with explained(target, self._run_dir):
                    write(beside)
        except SnapshotLostError as error:
            _log.warning("the checkpoint %s is left out: %s", target, error)
            return
        with explained(target, self._run_dir):
            for name, text in texts.items():
                (beside / name).write_text(text)
            manifest.seal(beside, step=step_of(target))
            put_in_place(beside, target)
        if saved := getattr(self._backend, "saved", None):  # before an older one, which it may need, is deleted
            saved(target)
        self._delete_all_but(keep)

    def _delete_all_but(self, keep: Callable[[list[int]], set[int]]) -> None:
        checkpoints = {step_of(folder): folder for folder in list_checkpoints(self._run_dir)}
        kept = keep(list(checkpoints))
        for step, folder in checkpoints.items():
            if step not in kept:
                try:
                    _delete(folder)
                except OSError as error:  # it costs space, and nothing else
                    _log.warning("cannot delete the old checkpoint %s: %s", folder, error.strerror)

    # ---- which are kept -------------------------------------------------------------------------------------------

    def _keeper(self, state: TrainerState, undecided: Collection[int]) -> Callable[[list[int]], set[int]]:
        scores = self._scores(state)
        return lambda steps: {state.step, *undecided, *steps_to_keep(steps, self._section, scores)}

    def _scores(self, state: TrainerState) -> dict[int, float]:
        metric = self._best_metric
        if metric is None:
            return {}
        for found in state.evaluations[-1:]:
            if metric not in found:
                raise ConfigError(
                    f'trainer.best_metric is "{metric}", which the evaluation did not report; it reported '
                    f"{', '.join(key for key in found if key != 'eval/step')}"
                )
        values = {int(found["eval/step"]): found.get(metric, math.nan) for found in state.evaluations}
        return {step: value for step, value in values.items() if not math.isnan(value)}


@contextmanager
def explained(target: Path, run_dir: Path) -> Iterator[None]:
    """What fails leaves nothing half-written behind, and says which checkpoint there still is."""
    try:
        yield
    except Exception as error:
        shutil.rmtree(_beside(target, _PARTIAL), ignore_errors=True)
        if isinstance(error, SnapshotLostError) or not isinstance(error, (OSError, BackendError)):
            raise
        why = (error.strerror if isinstance(error, OSError) else None) or str(error)
        whole = list_checkpoints(run_dir)
        left = f"{whole[-1].name} is intact, and the run resumes from it" if whole else "there is none before it"
        raise CheckpointError(
            f"cannot write the checkpoint {target}: {why}; {left}. Make room, or make the folder writable, and "
            f"start the run again"
        ) from error


def steps_to_keep(steps: list[int], section: TrainerSection, scores: Mapping[int, float]) -> set[int]:
    """The last ones, and those with the best scores; of equal ones the later.

    Those of `save_every` are not displaced by the others, of which only the newest is kept beside them.
    """
    best = sorted((step for step in steps if step in scores), key=lambda step: (scores[step], step))
    newest_last = sorted(steps, key=lambda step: (_is_scheduled(step, section), step))
    return {
        max(steps, default=0),
        *newest_last[-section.keep_last :],
        *(best[-section.keep_best :] if section.keep_best else ()),
    }


def _is_scheduled(step: int, section: TrainerSection) -> bool:
    """Whether `save_every` asks for the step: updates on one batch may have passed over the exact multiple."""
    return section.save_every > 0 and step % section.save_every < section.updates_per_batch


def adopt(run_dir: Path, source: Path, report: Report = lambda _: None) -> None:
    """Make a checkpoint, or the newest intact one of another run, the first of this run, unless it has one.

    It stands on its own from then on, whatever happens to the other run.
    """
    if list_checkpoints(run_dir):
        return
    found = find_intact(source)
    if found is None:
        raise ConfigError(f"{source} is neither a checkpoint nor a run folder with one")
    target = checkpoint_folder(run_dir, TrainerState.read(found.intact).step)
    beside = _beside(target, _PARTIAL)
    with explained(target, run_dir):
        _new_folder(target)
        shutil.copytree(found.intact, beside, copy_function=_link)
        sync_tree(beside)
        put_in_place(beside, target)
    for folder, damage in found.damaged:
        report(f"the checkpoint {folder} is damaged: {damage}; it is skipped for the one before")
    report(f"this run starts from {found.intact}")


def _link(source: str, target: str) -> None:
    """The same file under another name where that can be: files of a checkpoint are never changed."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def tidy(run_dir: Path) -> None:
    """Clear up what a kill while saving left behind. The run folder must be ours alone."""
    for path in (run_dir / "checkpoints").glob(".step_*"):
        target = path.with_name(path.stem.removeprefix("."))
        if path.suffix == f".{_REPLACED}" and not target.exists():
            path.rename(target)  # killed between two renames: this one is complete
        elif path.suffix in (f".{_PARTIAL}", f".{_REPLACED}", f".{_DELETED}"):
            shutil.rmtree(path)


def _beside(target: Path, what: str) -> Path:
    return target.with_name(f".{target.name}.{what}")


def _new_folder(target: Path) -> None:
    """The folder beside is made by the backend, and its parent here."""
    shutil.rmtree(_beside(target, _PARTIAL), ignore_errors=True)
    target.parent.mkdir(parents=True, exist_ok=True)


def _delete(folder: Path) -> None:
    """Renamed first: a kill in the midst of deleting must not leave half of what looks like a checkpoint."""
    shutil.rmtree(folder.rename(_beside(folder, _DELETED)))
