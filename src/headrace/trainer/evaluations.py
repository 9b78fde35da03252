"""Evaluations of a run: made once per step, recorded, and remembered for checkpoints and the result."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from headrace.engines.base import RolloutEngine
from headrace.evaluation.evaluator import Evaluator, under
from headrace.run.checkpoint import with_evaluation, without_step
from headrace.run.journal import RunJournal
from headrace.trainer.callbacks import CallbackSet

Metrics = dict[str, float]
Spawn = Callable[[Coroutine[Any, Any, Metrics]], asyncio.Task[Metrics]]


class Evaluations:
    """Evaluates every set, and keeps the history."""

    def __init__(
        self,
        evaluator: Evaluator,
        engine: RolloutEngine,
        journal: RunJournal,
        callbacks: CallbackSet,
        progress: Callable[[str | Callable[[], str]], None],
        history: Sequence[Metrics] = (),
    ) -> None:
        self._sets = tuple(evaluator.sets)
        self._evaluator = evaluator
        self._engine = engine
        self._journal = journal
        self._callbacks = callbacks
        self._progress = progress
        self.history = list(history)
        """Every evaluation so far, oldest first; `eval/step` says of which step."""
        self.running: set[int] = set()
        """Steps whose evaluation has begun and is not reported."""

    @property
    def first(self) -> Metrics:
        """The one before training; empty if there was none."""
        return without_step(self.of(0))

    @property
    def last(self) -> Metrics:
        """The newest; empty if there is none."""
        return without_step(self.history[-1]) if self.history else {}

    def of(self, step: int) -> Metrics:
        """That of a step; empty if there is none."""
        return next((dict(found) for found in self.history if found["eval/step"] == step), {})

    async def evaluate(self, step: int) -> Metrics:
        """Evaluate the current weights, and wait for it."""
        self.running.add(step)
        await self._callbacks.call("on_validation_start", step)
        return await self.end(step, await self._recorded_or_new(step, shown=True))

    async def start(self, step: int, spawn: Spawn) -> asyncio.Task[Metrics]:
        """Start to evaluate the current weights, which are pinned for it while training continues."""
        self.running.add(step)
        await self._engine.pin()  # first: a callback may take its time, and the weights would change
        try:
            await self._callbacks.call("on_validation_start", step)
            return spawn(self._pinned(step))
        except BaseException:
            await self._engine.unpin()
            raise

    async def end(self, step: int, found: Metrics) -> Metrics:
        """Report what an evaluation came to; its metrics, with the step that they are of."""
        await self._callbacks.call("on_validation_end", step, found)
        complete = {**found, "eval/step": float(step)}
        self.history = with_evaluation(self.history, complete)
        self.running.discard(step)
        return dict(complete)  # a copy: what the caller adds must not change the history

    async def _pinned(self, step: int) -> Metrics:
        try:
            return await self._recorded_or_new(step, shown=False)
        finally:
            await self._engine.unpin()

    async def _recorded_or_new(self, step: int, shown: bool) -> Metrics:
        recorded = self._journal.evaluation(step, self._sets)
        if recorded is not None:  # made before the run was interrupted
            return {key: value for name, metrics in recorded.items() for key, value in under(name, metrics).items()}
        when, at = f"after step {step}" if step else "before training", ""

        def progress(name: str, done: int, total: int) -> None:
            nonlocal at
            at = f": {name}, {done} of {total} episodes"

        if shown:  # beside training, what training does is shown
            self._progress(lambda: f"evaluating {when}{at}")
        return await self._evaluator.evaluate(progress, keep=lambda *found: self._journal.evaluated(step, *found))
