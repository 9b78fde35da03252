"""Callbacks: called at every step, weight sync and evaluation, one at a time, in the same order in every schedule.

Evaluation and checkpoints are callbacks too. Methods may be plain or async; an exception in one ends the run.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol

from headrace.config import RunConfig
from headrace.errors import ConfigError
from headrace.registry import nearest
from headrace.tracking.base import TrackerSet
from headrace.utils.deadline import Call
from headrace.utils.usercode import contained

Metrics = Mapping[str, float]


class TrainerHandle(Protocol):
    """What a callback may ask of the trainer."""

    config: RunConfig
    step: int
    """Optimizer steps made."""

    async def evaluate(self) -> dict[str, float]:
        """Evaluate every set, and wait for it."""
        ...

    async def evaluate_unless_stopped(self) -> dict[str, float] | None:
        """The same; None if a signal ends the run before it is done. Then it can be made when the run is resumed."""
        ...

    async def start_evaluation(self) -> asyncio.Task[dict[str, float]]:
        """Start to evaluate the weights of now, which are pinned for it while training continues."""
        ...

    async def end_evaluation(self, step: int, found: dict[str, float]) -> dict[str, float]:
        """Report what `start_evaluation` came to; its metrics, with the step that they are of."""
        ...

    def evaluated(self, step: int) -> dict[str, float]:
        """The metrics of an evaluation that was reported before; empty if there are none."""
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
        """Before everything else. A returned dict is tracked as step 0."""

    def on_train_end(self, trainer: TrainerHandle) -> Any:
        """After the last step, or after the step at which the run was stopped."""

    def on_epoch_start(self, epoch: int) -> Any:
        """Before the first step on tasks of this epoch."""

    def on_epoch_end(self, epoch: int) -> Any:
        """After the last step on tasks of this epoch."""

    def on_batch_start(self, step: int) -> Any:
        """Before a batch is trained, with the optimizer steps made so far."""

    def on_policy_updated(self, version: int, digest: str) -> Any:
        """The engine has new weights, and has shown by their digest that it has."""

    def on_batch_end(self, step: int, metrics: Metrics) -> Any:
        """After a batch is trained and the weights are synced. A returned dict is tracked with the step."""

    def on_validation_start(self, step: int) -> Any:
        """Before an evaluation, and before the end of the batch that it comes after."""

    def on_validation_end(self, step: int, metrics: Metrics) -> Any:
        """With the metrics of an evaluation, before the end of the batch whose metrics they are added to.

        `step` is the one that the evaluation was started after. Where generation runs ahead, a later batch is ended.
        """


def _check_hooks(callback: Callback) -> None:
    """A method that looks like a hook and is none would never be called."""
    known = [name for name in dir(Callback) if name.startswith("on_")]
    for name in dir(type(callback)):
        if name.startswith("on_") and name not in known:
            raise ConfigError(
                f"callback {type(callback).__name__} has {name}, which nothing calls{nearest(name, known)}; "
                f"the hooks are {', '.join(known)}"
            )


class CallbackSet:
    """Several callbacks as one, called in order. A call of one that is the user's may take `limit_s`."""

    def __init__(self, callbacks: Sequence[Callback], limit_s: float) -> None:
        for callback in callbacks:
            _check_hooks(callback)
        self._callbacks = tuple(callbacks)
        self._limit_s = limit_s

    async def call(self, event: str, *arguments: Any) -> dict[str, float]:
        """Call one method of each, and wait for it; what they returned, together."""
        found: dict[str, float] = {}
        for callback in self._callbacks:
            found |= await self._call(callback, event, *arguments)
        return found

    async def end_batch(self, step: int, metrics: Metrics) -> dict[str, float]:
        """`on_batch_end` of each, with what those before it returned; all metrics, together."""
        found = dict(metrics)
        for callback in self._callbacks:
            found |= await self._call(callback, "on_batch_end", step, dict(found))
        return found

    async def _call(self, callback: Callback, event: str, *arguments: Any) -> dict[str, float]:
        method = getattr(callback, event)
        if isinstance(callback, (Evaluating, Tracking, Saving)):
            result = method(*arguments)
            return (await result if inspect.isawaitable(result) else result) or {}
        what = f"{event} of the callback {type(callback).__name__}"
        # a plain method stays on this thread: what it holds (a database, a tracker's run) may belong to it
        with contained(what, self._limit_s):
            result = method(*arguments)
        if inspect.isawaitable(result):
            result = await Call(what, self._limit_s).run(lambda: result)
        return result or {}


class Evaluating(Callback):
    """Evaluates before, between and after. While generation runs ahead, an evaluation runs beside training."""

    def __init__(self, saving: Saving, unreported: int | None = None) -> None:
        self._saving = saving
        self._before = 0
        self._running: asyncio.Task[dict[str, float]] | None = None
        self.unreported = unreported
        """The step whose evaluation is under way, was cut off, or is done and not reported. A checkpoint keeps it."""
        self._found: dict[str, float] = {}

    def on_train_start(self, trainer: TrainerHandle) -> None:
        self._trainer = trainer
        self._section = trainer.config.eval

    async def begin(self) -> dict[str, float]:
        """After every `on_train_start`: the evaluation before the first step, or one that an interruption cut off.

        Returns what is tracked at once: there may be no later step whose metrics it could be added to.
        """
        step, trainer = self._trainer.step, self._trainer.config.trainer
        if self.unreported is None:
            return await self._trainer.evaluate() if self._section.before and self._section.sets and not step else {}
        if self.unreported != step:
            self._found = self._trainer.evaluated(self.unreported)
        elif trainer.max_staleness and step < trainer.steps:
            self._running = await self._trainer.start_evaluation()
        else:
            return await self._evaluate(step)
        return {}

    def on_batch_start(self, step: int) -> None:
        self._before = step

    async def on_batch_end(self, step: int, metrics: Metrics) -> dict[str, float]:
        found, self._found = self._found, {}
        if self._running is None:
            self.unreported = None
        section = self._trainer.config.trainer
        last, saves = step >= section.steps, self._saving.due(step)
        wanted = bool(self._section.sets) and due(self._section.every, self._before, step) and not last
        # a run that resumes from a checkpoint has no weights of earlier steps to evaluate
        if self._running is not None and (last or wanted or saves or self._running.done()):
            found |= await self._end()
        if wanted and section.max_staleness:
            self.unreported, self._running = step, await self._trainer.start_evaluation()
        elif wanted or (last and self._section.after and self._section.sets):
            found |= await self._evaluate(step)
        return found

    async def _evaluate(self, step: int) -> dict[str, float]:
        """While nothing else works. If a signal ends the run first, it is made when the run is resumed."""
        found = await self._trainer.evaluate_unless_stopped()
        self.unreported = step if found is None else None
        return found or {}

    async def on_train_end(self, trainer: TrainerHandle) -> None:
        if self._running is not None:  # the run was stopped: its metrics are tracked when it is resumed
            unreported = self.unreported
            await self._end()
            self.unreported = unreported

    async def _end(self) -> dict[str, float]:
        assert self._running is not None and self.unreported is not None
        found = await self._running
        step, self._running, self.unreported = self.unreported, None, None
        return await self._trainer.end_evaluation(step, found)


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
