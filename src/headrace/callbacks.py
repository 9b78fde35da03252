"""Callbacks: told of every step, publication and evaluation, in the same order in every schedule.

Evaluation and checkpoints are callbacks too. Methods may be plain or async; an exception in one ends the run.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol

from headrace.config import RunConfig
from headrace.track.base import TrackerSet

Metrics = Mapping[str, float]


class TrainerHandle(Protocol):
    """What a callback may ask of the trainer."""

    config: RunConfig
    step: int
    """Optimizer steps made."""

    async def evaluate(self, pinned: bool = False) -> dict[str, float]:
        """Evaluate every set; `pinned` keeps the weights of now for it while training goes on."""
        ...

    async def evaluate_again(self, step: int) -> dict[str, float]:
        """The evaluation of a step that was begun, and not told, when the run was interrupted."""
        ...

    async def save(self) -> None:
        """Write a checkpoint."""
        ...

    def stop(self) -> None:
        """Finish the current step, save, and return from `fit`."""
        ...

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run something beside training; its failure ends the run."""
        ...


class Callback:
    """Derive from it and override what is of interest; every method may also be `async def`."""

    def on_train_start(self, trainer: TrainerHandle) -> Any:
        """Before the first step. A returned dict is tracked as step 0."""

    def on_train_end(self, trainer: TrainerHandle) -> Any:
        """After the last step, or after the step at which the run was stopped."""

    def on_epoch_start(self, epoch: int) -> Any:
        """Before the first step on tasks of this epoch."""

    def on_epoch_end(self, epoch: int) -> Any:
        """After the last step on tasks of this epoch."""

    def on_batch_start(self, step: int) -> Any:
        """Before a batch is trained, with the optimizer steps made so far."""

    def on_policy_updated(self, version: int, fingerprint: str) -> Any:
        """The engine has new weights, and has shown by their fingerprint that it has."""

    def on_batch_end(self, step: int, metrics: Metrics) -> Any:
        """After a batch is trained and published. A returned dict is tracked with the step."""

    def on_validation_start(self, step: int) -> Any:
        """Before an evaluation."""

    def on_validation_end(self, step: int, metrics: Metrics) -> Any:
        """After an evaluation, with its metrics; `step` is the one it was started after."""


class CallbackSet:
    """Several callbacks as one, called in order."""

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self._callbacks = tuple(callbacks)

    async def call(self, event: str, *arguments: Any) -> dict[str, float]:
        """Call one method of each, and wait for it; what they returned, together."""
        found: dict[str, float] = {}
        for callback in self._callbacks:
            found |= await _call(callback, event, *arguments)
        return found

    async def end_batch(self, step: int, metrics: Metrics) -> dict[str, float]:
        """`on_batch_end` of each, with what those before it returned; all metrics, together."""
        found = dict(metrics)
        for callback in self._callbacks:
            found |= await _call(callback, "on_batch_end", step, dict(found))
        return found


async def _call(callback: Callback, event: str, *arguments: Any) -> dict[str, float]:
    result = getattr(callback, event)(*arguments)
    if inspect.isawaitable(result):
        result = await result
    return result or {}


class Evaluating(Callback):
    """Evaluates before, between and after. While generation runs ahead, an evaluation runs beside training."""

    def __init__(self, saving: Saving) -> None:
        self._saving = saving
        self._before = 0
        self._running: asyncio.Task[dict[str, float]] | None = None
        self.untold: int | None = None
        """The step whose evaluation is under way, or is done and not told. A checkpoint keeps it."""

    async def on_train_start(self, trainer: TrainerHandle) -> dict[str, float]:
        self._trainer = trainer
        self._section = trainer.config.eval
        if self.untold is not None:
            self._running = trainer.spawn(trainer.evaluate_again(self.untold))
        if not (self._section.before and self._section.sets and trainer.step == 0):
            return {}
        return await trainer.evaluate()

    def on_batch_start(self, step: int) -> None:
        self._before = step

    async def on_batch_end(self, step: int, metrics: Metrics) -> dict[str, float]:
        found: dict[str, float] = {}
        section = self._trainer.config.trainer
        last, saves = step >= section.steps, self._saving.due(step)
        wanted = bool(self._section.sets) and due(self._section.every, self._before, step) and not last
        # a run that goes on from a checkpoint has no weights of earlier steps to evaluate
        if self._running is not None and (last or wanted or saves or self._running.done()):
            found, self._running, self.untold = await self._running, None, None
        if wanted and section.max_staleness:
            self._running, self.untold = self._trainer.spawn(self._trainer.evaluate(pinned=True)), step
        elif wanted or (last and self._section.after and self._section.sets):
            found |= await self._trainer.evaluate()
        return found

    async def on_train_end(self, trainer: TrainerHandle) -> None:
        if self._running is not None:  # the run was stopped: told when it goes on
            await self._running


class Tracking(Callback):
    """Hands the metrics of each step to the trackers."""

    def __init__(self, trackers: TrackerSet) -> None:
        self._trackers = trackers

    def on_batch_end(self, step: int, metrics: Metrics) -> None:
        self._trackers.log(step, metrics)


class Saving(Callback):
    """Writes checkpoints: every so many steps, and after every so many seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._before = self._saved = -1
        self._decided = (-1, False)

    def on_train_start(self, trainer: TrainerHandle) -> None:
        self._trainer = trainer
        self._saved_s = self._clock()

    def on_batch_start(self, step: int) -> None:
        self._before = step

    def due(self, step: int) -> bool:
        """Whether `step` is saved. Decided once, by who asks first: an evaluation under way has to agree with us."""
        if self._decided[0] != step:
            section = self._trainer.config.trainer
            by_time = section.save_every_s > 0 and self._clock() - self._saved_s >= section.save_every_s
            by_step = due(section.save_every, self._before, step) or (step >= section.steps and section.save_last)
            self._decided = (step, by_step or (by_time and step < section.steps))
        return self._decided[1]

    async def on_batch_end(self, step: int, metrics: Metrics) -> None:
        if self.due(step):
            await self._save(step)

    async def on_train_end(self, trainer: TrainerHandle) -> None:
        if trainer.step < trainer.config.trainer.steps and self._saved != trainer.step:  # it was stopped
            await self._save(trainer.step)

    async def _save(self, step: int) -> None:
        await self._trainer.save()
        self._saved, self._saved_s = step, self._clock()  # from its end: slow saving must not become all there is


def due(every: int, before: int, step: int) -> bool:
    """Whether a multiple of `every` was reached by going from step `before` to `step`; 0 is never."""
    return every > 0 and step // every > before // every
