"""UnifiedTrainer: trains by a configuration. The loops themselves are in `loops.py`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.config import RunConfig
from headrace.config.loading import build_config
from headrace.config.rules import check_settings, resolve_objective, warn_of_long_intervals
from headrace.errors import first_of
from headrace.evaluation.plan import Tasks
from headrace.registry import resolve
from headrace.run.directory import claim_run_dir, log_to_file, mark_finished, resumed_config
from headrace.tracking.terminal import working
from headrace.trainer.callbacks import Callback
from headrace.trainer.loops import TrainingLoops
from headrace.trainer.setup import Run, StopRequest, UserObjects, numerics_of, open_run
from headrace.trainer.summary import summarize
from headrace.utils import memory
from headrace.utils.event_loop import run_loop
from headrace.utils.interrupts import on_interrupt
from headrace.utils.loopwatch import watched_loop
from headrace.utils.threads import run_in_thread

log = logging.getLogger("headrace")


@dataclass(frozen=True, slots=True)
class RunResult:
    """What a run came to."""

    run_dir: Path
    steps: int
    interrupted: bool
    first_evaluation: dict[str, float]
    last_evaluation: dict[str, float]
    metrics: dict[str, float]


class UnifiedTrainer:
    """Trains by a configuration, given as such or as a dict of its sections, which is checked as a run file is.

    Workflow, tasks, judger and callbacks may be given as objects instead of names.
    """

    def __init__(
        self,
        config: RunConfig | dict[str, Any],
        workflow: Any = None,
        tasks: Tasks | None = None,
        judger: Any = None,
        eval_tasks: dict[str, Tasks] | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        self._as_given = config if isinstance(config, RunConfig) else build_config(config)
        objects = UserObjects(workflow, tasks, judger, eval_tasks, tuple(callbacks)).objects()
        check_settings(self._as_given, objects, begun_with=resumed_config(self._as_given))
        warn_of_long_intervals(self._as_given)
        self.config = resolve_objective(self._as_given)
        section = self.config.trainer
        resolve("staleness", section.staleness)  # a wrong name is reported before a run folder is made
        named = [resolve("callback", name)() for name in section.callbacks]
        self._given = UserObjects(workflow, tasks, judger, eval_tasks, (*named, *callbacks))
        self._stop = StopRequest()
        self._fitting: asyncio.Task[Any] | None = None
        self._loops: TrainingLoops | None = None
        self._interrupted_early = False

    def fit(self) -> RunResult:
        """Train to the end. Ctrl-C or SIGTERM finishes the current step, saves, and returns; a second one aborts."""
        return run_loop(self.fit_async, self._interrupted)

    def stop(self) -> None:
        """Finish the current step, save, and return from `fit`."""
        self._stop.request()

    async def fit_async(self) -> RunResult:
        """`fit` for a running event loop."""
        self._fitting, self._interrupted_early = asyncio.current_task(), False
        memory.share_one_heap()  # before there are threads: those that come before have heaps of their own
        try:
            with on_interrupt(self._interrupted):
                with working("loading the training backend"):
                    numerics = await run_in_thread(numerics_of, self.config)
                claiming = claim_run_dir(self._as_given, numerics, self._given.names())
                with claiming as claim, closing(log_to_file(claim.folder)):
                    try:
                        async with open_run(self.config, self._as_given, self._given, claim, self._stop) as run:
                            claim.begin()
                            loops = await self._train(run)
                    except Exception as error:  # for who looks at the folder later; the caller reports it
                        log.info("the run failed: %s: %s", type(error).__name__, error)
                        raise
                    return self._finish(run, loops)
        except asyncio.CancelledError:
            if self._interrupted_early:
                raise KeyboardInterrupt from None
            raise

    async def _train(self, run: Run) -> TrainingLoops:
        self._loops = loops = TrainingLoops(run)
        watched = watched_loop(run.trackers.message, limit_s=self.config.rollout.timeout_s)
        try:
            with memory.frozen(), watched:
                await loops.train()
        except BaseExceptionGroup as group:
            raise first_of(group) from None
        return loops

    def _finish(self, run: Run, loops: TrainingLoops) -> RunResult:
        left = loops.step < self.config.trainer.steps or run.evaluating.unreported is not None
        interrupted = self._stop.requested and left
        first, last = run.evaluations.first, run.evaluations.last
        result = RunResult(run.folder, loops.step, interrupted, first, last, loops.last_metrics)
        if not interrupted:
            mark_finished(run.folder, last)
        summarize(result, self.config)
        return result

    def _interrupted(self) -> None:
        if self._loops is not None and self._loops.has_work:
            self._stop.request(by_signal=True)
            grace_s = self.config.run.grace_s
            when = "after this step"
            if self._loops.evaluating:
                when = "without this evaluation, which is made when the run is resumed"
            elif grace_s is not None:
                when += f", or without it if it waits for rollouts {grace_s:g} s from now"
            self._loops.report(f"stopping {when}; a second Ctrl-C or SIGTERM aborts at once")
        elif self._fitting is not None:  # nothing is trained yet: there is nothing to save
            self._interrupted_early = True
            self._fitting.cancel()
