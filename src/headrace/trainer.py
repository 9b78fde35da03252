"""UnifiedTrainer: the loops, and nothing else.

`_produce` rolls tasks out as the coordinator admits them; `_learn` turns finished groups into optimizer steps and
hands the weights back. They meet in the buffer. With `max_staleness = 0` a batch is admitted only when the version
that it trains is published, so the two take turns: that is synchronous training.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.advantage.filters import is_uniform
from headrace.assembly import Tasks, assemble, resolve_objective
from headrace.checkpoint import TrainerState, list_checkpoints, load_checkpoint, save_checkpoint
from headrace.config import RunConfig
from headrace.data.seeds import derive_seed
from headrace.data.task import Task
from headrace.engine.base import SamplingParams
from headrace.errors import DataError
from headrace.metrics import MetricsAggregator, Reducer
from headrace.objectives import Prepared, in_shares
from headrace.pipeline.buffer import FinishedGroup, TrajectoryGroupBuffer
from headrace.pipeline.coordinator import SyncCoordinator
from headrace.pipeline.schedule import learning_rate
from headrace.pipeline.stats import batch_metrics
from headrace.rundir import log_to_file, mark_finished, prepare_run_dir
from headrace.summary import summarize
from headrace.track.base import RunInfo, TrackerSet


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
    """Trains by a configuration; workflow, tasks and judger may be given as objects instead of names."""

    def __init__(
        self,
        config: RunConfig,
        workflow: Any = None,
        tasks: Tasks | None = None,
        judger: Any = None,
        eval_tasks: dict[str, Tasks] | None = None,
    ) -> None:
        self._as_given = config
        self.config = resolve_objective(config)
        self._given = (workflow, tasks, judger, eval_tasks)
        self._stop_requested = False
        self._step = 0
        self._next_group_id = 0
        self._skipped_in_a_row = 0
        self._failed_groups = 0
        self._some_worked = False
        self._warned_of_uniform = False
        self._first_evaluation: dict[str, float] = {}
        self._last_evaluation: dict[str, float] = {}
        self._last_metrics: dict[str, float] = {}

    def fit(self) -> RunResult:
        """Train to the end. Ctrl-C finishes the current step, saves, and returns; a second one aborts."""
        return asyncio.run(self.fit_async())

    def stop(self) -> None:
        """Finish the current step, save, and return from `fit`."""
        self._stop_requested = True

    async def fit_async(self) -> RunResult:
        """`fit` for a running event loop."""
        self._run_dir = prepare_run_dir(self._as_given)
        with closing(log_to_file(self._run_dir)):
            self._trackers = TrackerSet.from_names(self.config.track.trackers)
            self._parts = await asyncio.to_thread(assemble, self.config, *self._given)
            try:
                with self._stop_on_interrupt():
                    await self._train()
            except BaseExceptionGroup as group:
                raise _first_error(group) from None
            finally:
                self._trackers.close()
                await self._parts.engine.close()
                await self._parts.backend.close()
        return self._finish()

    async def _train(self) -> None:
        config, parts = self.config, self._parts
        self._trackers.start(
            RunInfo(config.run.name, self._run_dir, config.trainer.steps, self._as_given.model_dump(mode="json"))
        )
        if self._run_dir.name != config.run.name:
            self._trackers.message(f"{config.run.name} is finished; this run is {self._run_dir.name}")
        version = await self._resume()
        self._coordinator = SyncCoordinator(config.trainer.max_staleness, version)
        self._buffer = TrajectoryGroupBuffer(config, parts.grouping)
        self._batch_sizes: asyncio.Queue[int] = asyncio.Queue()
        self._admission_changed = asyncio.Event()
        await parts.engine.load_weights(version)
        if config.eval.before and config.eval.sets and self._step == 0:
            self._first_evaluation = await self._evaluate()
            self._trackers.log(0, self._first_evaluation)
        async with asyncio.TaskGroup() as loops:
            producer = loops.create_task(self._produce())
            await self._learn()
            producer.cancel()

    async def _produce(self) -> None:
        """Consumes tasks, waits for admission, produces finished groups in the buffer."""
        async with asyncio.TaskGroup() as groups:
            while True:
                while not self._coordinator.may_open_batch():
                    self._admission_changed.clear()
                    await self._admission_changed.wait()
                tasks = self._parts.sampler.next_batch()
                self._coordinator.open_batch()
                self._batch_sizes.put_nowait(len(tasks))
                for task in tasks:
                    groups.create_task(self._roll_out(task))

    async def _roll_out(self, task: Task) -> None:
        """Roll one task out; if its group is dropped, roll out another in its place."""
        section = self.config.rollout
        sampling = SamplingParams(
            section.temperature, section.top_p, section.top_k, section.max_tokens, tuple(section.stop)
        )
        for replaced in range(self.config.filters.most_replacements):
            group_id, self._next_group_id = self._next_group_id, self._next_group_id + 1
            self._coordinator.dispatched(section.group_size)
            episodes = await self._parts.manager.roll_out_group(
                task, group_id, section.group_size, derive_seed("train", self.config.run.seed), sampling
            )
            finished = self._buffer.add(group_id, episodes)
            self._coordinator.settled(failed=finished.failed, filtered=finished.filtered)
            self._stop_if_nothing_ever_worked(finished)
            if finished.dropped_because is None:
                return
            if replaced == self.config.filters.most_replacements - 1:
                raise _nothing_to_train(finished, replaced + 1)
            task = self._parts.sampler.next_task()

    def _stop_if_nothing_ever_worked(self, finished: FinishedGroup) -> None:
        """A workflow that fails from the start is told after one batch, not after a hundred replacements."""
        self._some_worked |= finished.failed < len(finished.episodes)
        self._failed_groups += finished.failed == len(finished.episodes)
        if not self._some_worked and self._failed_groups >= self.config.trainer.batch_size:
            raise _nothing_to_train(finished, self._failed_groups)

    async def _learn(self) -> None:
        """Consumes groups, waits for a whole batch, produces optimizer steps and published weights."""
        config = self.config
        while self._step < config.trainer.steps and not self._stop_requested:
            started = time.perf_counter()
            finished = await self._collect()
            generated = time.perf_counter()
            prepared = await self._parts.objective.prepare([g for item in finished for g in item.groups], self._step)
            if not prepared.parts:
                self._skip(finished, prepared)
                continue
            before = self._step
            metrics = await self._update(finished, prepared)
            publication = await self._parts.backend.publish(self._coordinator.version + 1)
            trained = time.perf_counter()
            metrics.record("time/generate_s", generated - started, Reducer.LAST)
            metrics.record("time/train_s", trained - generated, Reducer.LAST)
            self._coordinator.published(publication.version)
            await self._end_of_step(metrics, started, before)
            self._admission_changed.set()  # only now: evaluation and checkpoint see the engine idle
        if self._stop_requested and self._step < config.trainer.steps:
            await self._save()

    async def _collect(self) -> list[FinishedGroup]:
        """The groups of one step: a batch, or as many as it takes until enough tasks are partly solved."""
        wanted = self.config.filters.min_partial_tasks
        finished = await self._buffer.take(await self._batch_sizes.get())
        for added in range(self.config.filters.most_replacements):
            partial = sum(any(not is_uniform(g) for g in item.groups if g.has_rewards) for item in finished)
            if partial >= wanted or self._stop_requested:
                return finished
            self._trackers.message(f"{partial} of {wanted} partly solved tasks; adding batch {added + 2}")
            self._coordinator.skipped()
            self._admission_changed.set()
            finished += await self._buffer.take(await self._batch_sizes.get())
        raise DataError(
            f"filters.min_partial_tasks wants {wanted} partly solved tasks, and {len(finished)} tasks in "
            f"{self.config.filters.most_replacements} batches did not hold them; use tasks of middling difficulty"
        )

    async def _update(self, finished: list[FinishedGroup], prepared: Prepared) -> MetricsAggregator:
        """The optimizer steps on one batch."""
        config, backend = self.config, self._parts.backend
        metrics = batch_metrics(finished, prepared.parts[0].batch, self._coordinator.version)
        metrics.merge(prepared.metrics)
        shares = min(config.trainer.updates_per_batch, config.trainer.steps - self._step)
        for share in in_shares(prepared, shares, config.backend.micro_batch_tokens):
            for part in share.parts:
                figures = await backend.forward_backward(part.batch, part.algorithm)
                metrics.merge(figures.renamed("policy/", f"{part.area}/"))
            self._step += 1
            rate = learning_rate(self._step, config.trainer.steps, config.optimizer)
            metrics.merge(await backend.optim_step(rate, share.grad_scale))
        self._coordinator.settled(trained=sum(item.kept for item in finished))
        self._skipped_in_a_row = 0
        return metrics

    def _skip(self, finished: list[FinishedGroup], prepared: Prepared) -> None:
        """Nothing in the batch can be trained: no update, and another batch in its place."""
        self._coordinator.settled(filtered=sum(item.kept for item in finished))
        self._coordinator.skipped()
        self._admission_changed.set()
        why = {key: value for key, value in prepared.metrics.reduce().items() if value}
        self._trackers.message(f"no update: the batch holds nothing to train {why}")
        self._skipped_in_a_row += 1
        if self._skipped_in_a_row >= self.config.filters.most_replacements:
            raise DataError(f"{self._skipped_in_a_row} batches in a row held nothing to train: {why}")

    async def _end_of_step(self, metrics: MetricsAggregator, started: float, before: int) -> None:
        """Evaluation, checkpoint, tracking."""
        config, step = self.config, self._step
        last = step == config.trainer.steps
        account = self._coordinator.account()
        for name in ("dispatched", "trained", "filtered", "failed", "stale", "pending"):
            metrics.record(f"episodes/{name}", getattr(account, name), Reducer.LAST)
        metrics.record("time/step_s", time.perf_counter() - started, Reducer.LAST)
        values = metrics.reduce()
        values |= _rates(values)
        if (_due(config.eval.every, before, step) and not last) or (config.eval.after and last):
            values |= await self._evaluate()
        self._trackers.log(step, values)
        self._last_metrics = values
        self._warn_of_uniform_rewards(values)
        if _due(config.trainer.save_every, before, step) or (last and config.trainer.save_last):
            await self._save()

    def _warn_of_uniform_rewards(self, values: dict[str, float]) -> None:
        """Once, when a whole step taught nothing."""
        uniform = values.get("reward/uniform_groups") == 1.0 and values.get("policy/grad_norm") == 0.0
        if uniform and not self._warned_of_uniform:
            self._trackers.message(
                f"step {self._step}: in every group all rewards are equal (mean {values['reward/mean']:g}), so nothing "
                f"was learned; use tasks that are sometimes solved, or a reward that tells rollouts apart"
            )
            self._warned_of_uniform = True

    async def _evaluate(self) -> dict[str, float]:
        self._last_evaluation = await self._parts.evaluator.evaluate(self._parts.eval_manager)
        return self._last_evaluation

    async def _save(self) -> None:
        state = TrainerState(
            step=self._step,
            version=self._coordinator.version,
            sampler_position=self._parts.sampler.position,
            next_group_id=self._next_group_id,
            first_evaluation=self._first_evaluation,
        )
        await save_checkpoint(self._run_dir, state, self._parts.backend, self.config.trainer.keep_last)

    async def _resume(self) -> int:
        """Go on from the newest checkpoint, if there is one; returns its version."""
        checkpoints = list_checkpoints(self._run_dir)
        if not checkpoints:
            return 0
        state = await load_checkpoint(checkpoints[-1], self._parts.backend)
        self._step, self._next_group_id = state.step, state.next_group_id
        self._parts.sampler.position = state.sampler_position
        self._first_evaluation = state.first_evaluation
        self._trackers.message(f"going on from {checkpoints[-1]}")
        return state.version

    def _finish(self) -> RunResult:
        interrupted = self._stop_requested and self._step < self.config.trainer.steps
        result = RunResult(
            self._run_dir, self._step, interrupted, self._first_evaluation, self._last_evaluation, self._last_metrics
        )
        if not interrupted:
            mark_finished(self._run_dir, self._last_evaluation)
        summarize(result, self.config)
        return result

    @contextmanager
    def _stop_on_interrupt(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()

        def request_stop() -> None:
            self.stop()
            self._trackers.message("stopping after this step; press Ctrl-C again to abort at once")
            loop.remove_signal_handler(signal.SIGINT)

        try:
            loop.add_signal_handler(signal.SIGINT, request_stop)
        except (ValueError, RuntimeError, NotImplementedError):  # not the main thread: the caller handles signals
            yield
            return
        try:
            yield
        finally:
            loop.remove_signal_handler(signal.SIGINT)


def _due(every: int, before: int, step: int) -> bool:
    """Whether a multiple of `every` was reached by going from step `before` to `step`; 0 is never."""
    return every > 0 and step // every > before // every


def _rates(values: dict[str, float]) -> dict[str, float]:
    return {
        "tokens/generated_per_s": values["tokens/generated"] / max(values["time/generate_s"], 1e-9),
        "tokens/trained_per_s": values["tokens/trained"] / max(values["time/train_s"], 1e-9),
    }


def _first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The exception that ended a loop; the others were cancelled because of it."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _nothing_to_train(finished: FinishedGroup, dropped: int) -> DataError:
    errors = [episode.error for episode in finished.episodes if episode.error]
    return DataError(
        f"{dropped} groups in a row were dropped, the last because of: {finished.dropped_because}; "
        + (f"its last error: {errors[-1]}" if errors else "use tasks that the model sometimes solves, or no filter")
    )
