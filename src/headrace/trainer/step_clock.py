"""StepClock: where the time of a step went."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from headrace.engines.base import EngineHealth
from headrace.tracking.metrics import MetricsAggregator


class StepClock:
    """Measures steps one after another; what is not spent training is spent waiting for rollouts.

    A step lasts from the end of the one before, so that nothing is left out between two.
    """

    def __init__(self) -> None:
        self._engine_busy_s = 0.0
        self._begin()

    def _begin(self) -> None:
        self._started = time.perf_counter()
        self._train_s = 0.0

    @contextmanager
    def training(self) -> Iterator[None]:
        """Count this as training."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self._train_s += time.perf_counter() - started

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count this as waiting, in the midst of training."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self._train_s -= time.perf_counter() - started

    def restart(self) -> None:
        """Begin a step now: what came before (an evaluation) belongs to none."""
        self._begin()

    def end(self, engine: EngineHealth, overlapping: bool) -> MetricsAggregator:
        """The times of a step, which ends now. `overlapping`: generation continued while the learner worked."""
        metrics = MetricsAggregator()
        step_s, train_s = time.perf_counter() - self._started, self._train_s
        generate_s = max(step_s - train_s, 0.0)
        metrics.record("time/step_s", step_s)
        metrics.record("time/train_s", train_s)
        metrics.record("time/generate_s", generate_s)
        metrics.record("utilisation/learner", train_s / max(step_s, 1e-9))
        busy_s = max(engine.busy_s - self._engine_busy_s, 0.0)  # an engine that was started again counts from 0
        metrics.record("utilisation/engine", min(busy_s / max(step_s, 1e-9), 1.0))
        self._engine_busy_s = engine.busy_s
        self.generating_s = step_s if overlapping else generate_s
        self.training_s = train_s
        self._begin()
        return metrics
