"""UnifiedTrainer: the loops, and nothing else.

Three loops run side by side. The `Producer` rolls tasks out as the coordinator admits them; `_learn` turns whole groups
into optimizer steps and hands the weights back; `_watch` looks after the engine. They meet in the coordinator and the
buffer. With `max_staleness = 0` a batch is admitted only when the version that it trains is published, so the first
two take turns: that is synchronous training. Above 0, generation goes on while the learner learns.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncGenerator, Coroutine, Iterator, Sequence
from contextlib import aclosing, closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from headrace import memory
from headrace.advantage.filters import is_uniform
from headrace.assembly import Tasks, assemble, resolve_objective
from headrace.callbacks import Callback, CallbackSet, Evaluating, Saving, Tracking
from headrace.checkpoint import TrainerState, list_checkpoints, load_checkpoint, save_checkpoint
from headrace.config import RunConfig
from headrace.errors import DataError, EngineError, PublicationError
from headrace.learner import Learner
from headrace.metrics import Reducer
from headrace.pipeline.buffer import FinishedGroup, TrajectoryGroupBuffer
from headrace.pipeline.clock import StepClock
from headrace.pipeline.coordinator import SyncCoordinator
from headrace.producer import Changes, OpenedBatch, Producer
from headrace.registry import resolve
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
    """Trains by a configuration; workflow, tasks, judger and callbacks may be given as objects instead of names."""

    def __init__(
        self,
        config: RunConfig,
        workflow: Any = None,
        tasks: Tasks | None = None,
        judger: Any = None,
        eval_tasks: dict[str, Tasks] | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        self._as_given = config
        self.config = resolve_objective(config)
        self.step = 0
        self._given = (workflow, tasks, judger, eval_tasks)
        named = [resolve("callback", name)() for name in config.trainer.callbacks]
        self._own_callbacks = [*named, *callbacks]
        self._stop_requested = False
        self._skipped_in_a_row = 0
        self._warned: set[str] = set()
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
            # tracked before it is saved: what a checkpoint contains is never missing from the metrics
            self._callbacks = CallbackSet([Evaluating(), *self._own_callbacks, Tracking(self._trackers), Saving()])
            self._parts = await asyncio.to_thread(assemble, self.config, *self._given)
            self.engine = self._parts.engine
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
        config = self.config
        self._trackers.start(
            RunInfo(config.run.name, self._run_dir, config.trainer.steps, self._as_given.model_dump(mode="json"))
        )
        if self._run_dir.name != config.run.name:
            self._trackers.message(f"{config.run.name} is finished; this run is {self._run_dir.name}")
        await self._set_up(await self._resumed_state())
        async with asyncio.TaskGroup() as self._loops:
            before = await self._callbacks.call("on_train_start", self)
            if before:
                self._trackers.log(0, before)
            self._clock.restart()
            watch = self.spawn(self._watch())
            self._producing = self.spawn(self._producer.run())
            await self._learn()
            self._producing.cancel()
            await self._callbacks.call("on_train_end", self)
            watch.cancel()

    async def _set_up(self, state: TrainerState | None) -> None:
        """The state of the loops, new or as a checkpoint has it, and the engine with its weights."""
        config, parts = self.config, self._parts
        version = state.version if state else 0
        self.step = state.step if state else 0
        self._coordinator = SyncCoordinator(
            parts.policy,
            config.fresh_groups,
            version=version,
            over_sample=config.produce.over_sample,
            capacity=config.produce.capacity,
            batches=self._batches_left,
        )
        self._buffer = TrajectoryGroupBuffer(config, parts.grouping, self._run_dir / "spill")
        self._changes = Changes()
        self._producer = Producer(config, parts.sampler, parts.manager, self._coordinator, self._buffer, self._changes)
        self._learner = Learner(config, parts.backend, parts.objective, parts.policy)
        self._clock = StepClock()
        section, shares = config.trainer, parts.engine.shares_weights
        self._streams = self._learner.streams and (not shares if section.stream is None else section.stream)
        lends = section.max_staleness == 0 if section.release_cache is None else section.release_cache
        self._lends = shares and lends and not self._streams
        if state is not None:
            parts.sampler.position = state.sampler_position
            self._producer.next_group_id = state.next_group_id
            self._producer.resume(state.unfinished)
            self._first_evaluation = state.first_evaluation
        await parts.backend.publish(version)

    @property
    def _batches_left(self) -> int:
        """Batches that the rest of the run needs."""
        return -(-(self.config.trainer.steps - self.step) // self.config.trainer.updates_per_batch)

    # ---- the learner's loop ---------------------------------------------------------------------------------------

    async def _learn(self) -> None:
        """Consumes whole groups, waits for those of a step, produces optimizer steps and published weights."""
        epoch: int | None = None
        while self.step < self.config.trainer.steps and not self._stop_requested:
            batch = await self._producer.batches.get()
            if epoch is not None and batch.epoch != epoch:
                await self._callbacks.call("on_epoch_end", epoch)
            if batch.epoch != epoch:
                epoch = batch.epoch
                await self._callbacks.call("on_epoch_start", epoch)
            await self._callbacks.call("on_batch_start", self.step)
            await self._make_step(batch)
        if epoch is not None:
            await self._callbacks.call("on_epoch_end", epoch)

    async def _make_step(self, batch: OpenedBatch) -> None:
        """Gather the groups of a step, learn from them, publish."""
        self._learner.begin(self._coordinator.version)
        memory.reset_peak()
        finished: list[FinishedGroup] = []
        again: list[FinishedGroup] = []
        async with aclosing(self._gather(batch.size)) as pieces:
            async for some, last in pieces:
                finished += some
                if last:
                    again = self._buffer.take_used(self.config.trainer.batch_size - len(finished), self._too_old)
                if self._lends:
                    peak_mb = memory.peak_mb()
                    await self._lend_memory()
                    self._learner.metrics.record("memory/generate_peak_mb", peak_mb, Reducer.MAX)
                with self._clock.training():
                    await self._learner.learn(some, again)
        if self._learner.has_something:
            with self._clock.training():
                await self._update(finished, again)
        if self._lends:
            self._learner.metrics.record("memory/train_peak_mb", memory.peak_mb(), Reducer.MAX)
            await self.engine.resume()
        if self._learner.has_something:
            await self._end_of_step()
        else:
            self._skip(finished)
        self._clock.restart()
        self._coordinator.resume()
        self._changes.notify()

    async def _lend_memory(self) -> None:
        """The engine's cache makes room for the learner's activations; it is rebuilt when decoding goes on."""
        await self.engine.pause()
        await self.engine.release_cache()
        memory.reset_peak()

    async def _gather(self, size: int) -> AsyncGenerator[tuple[list[FinishedGroup], bool], None]:
        """The groups of a step: all at once, or, when streaming, some as soon as they are whole; and if they are all."""
        taken, last = 0, False
        while not last:
            some = await self._take(size - taken)
            taken += len(some)
            last = taken >= size and not self._coordinator.due()
            assert last or self._streams, "a step that does not stream is taken at once"
            yield some if self._streams else await self._with_partly_solved(some), last

    async def _take(self, wanted: int) -> list[FinishedGroup]:
        """Wait for groups that the step may take, and take them.

        None, if it has enough and waited only for due groups, which turned out to be younger than they could have been.
        """

        def is_ready() -> bool:
            return self._takeable(wanted)[0] > 0 or (wanted <= 0 and not self._coordinator.due())

        await self._changes.until(is_ready)
        count, first = self._takeable(wanted)
        some = self._buffer.take(count, first)
        for group in some:
            self._coordinator.taken(group.group_id)
        self._changes.notify()
        return some

    def _takeable(self, wanted: int) -> tuple[int, list[int]]:
        """How many whole groups the step may take now, of those it still wants (0: wait), and which of them first."""
        self._drop_stale()
        due = self._coordinator.due()
        late = sum(group_id not in self._buffer for group_id in due)
        if not self._streams:
            enough = max(wanted, len(due))
            return (enough if not late and len(self._buffer) >= enough else 0), due
        if self.config.run.deterministic:  # in the order of dispatch, so that gradients add up in the same order
            in_order, enough = self._coordinator.whole_in_order(), max(wanted, 0)
            chosen = [*in_order[:enough], *(group_id for group_id in in_order[enough:] if group_id in due)]
            return len(chosen), chosen
        ready = len(self._buffer)
        return max(min(ready, wanted - late), min(ready, len(due) - late)), due

    def _drop_stale(self) -> None:
        """Throw away what the staleness policy will not train, and start others in their place."""
        stale = self._coordinator.stale()
        for group in self._buffer.take(len(stale), first=stale) if stale else ():
            self._coordinator.gone(group.group_id)
            self._coordinator.settled(stale=group.kept)
            self._producer.bias.dropped(group)
            self._producer.trained([group])
        self._producer.refill(len(stale))

    async def _with_partly_solved(self, finished: list[FinishedGroup]) -> list[FinishedGroup]:
        """With more batches, until enough tasks are partly solved (`filters.min_partial_tasks`)."""
        wanted = self.config.filters.min_partial_tasks
        for added in range(self.config.filters.most_replacements):
            partial = sum(any(not is_uniform(g) for g in item.groups if g.has_rewards) for item in finished)
            if partial >= wanted or self._stop_requested:
                return finished
            self._trackers.message(f"{partial} of {wanted} partly solved tasks; adding batch {added + 2}")
            self._coordinator.skipped()
            self._changes.notify()
            finished += await self._take((await self._producer.batches.get()).size)
        raise DataError(
            f"filters.min_partial_tasks wants {wanted} partly solved tasks, and {len(finished)} tasks in "
            f"{self.config.filters.most_replacements} batches did not hold them; use tasks of middling difficulty"
        )

    def _too_old(self, group: FinishedGroup) -> bool:
        """Whether a group is too old to be trained once more. Policies that look at single tokens do so later."""
        policy, oldest = self._parts.policy, group.oldest_version
        age = self._coordinator.version - oldest if oldest is not None else 0
        return policy.is_stale(age) or (policy.waits_for_due and age > policy.max_staleness)

    async def _update(self, finished: list[FinishedGroup], again: list[FinishedGroup]) -> None:
        """Change the weights and hand them to the engine."""
        coordinator = self._coordinator
        if not (self.config.trainer.max_staleness and self.config.trainer.partial_rollouts):
            coordinator.pause()  # in step, evaluation and checkpoint are to see the engine idle
        if self.engine.shares_weights:
            await self._drained()
            await self.engine.pause()  # until it knows the version: tokens in between would carry the wrong one
        self.step += await self._learner.update(self.step)
        await self._drained()
        publication = await self._parts.backend.publish(coordinator.version + 1)
        coordinator.settled(trained=sum(item.kept for item in finished))
        coordinator.published(publication.version)
        coordinator.needs(self._batches_left)  # a batch of few rows makes fewer updates than it should
        if self.engine.shares_weights and not self._lends:
            await self.engine.resume()
        self._producer.trained(finished)
        self._producer.bias.trained(finished)
        self._buffer.retain([*finished, *again])
        self._skipped_in_a_row = 0
        self._changes.notify()
        await self._callbacks.call("on_policy_updated", publication.version, publication.fingerprint)

    async def _drained(self) -> None:
        """Without partial rollouts, wait until nothing is in flight."""
        if not self.config.trainer.partial_rollouts:
            with self._clock.waiting():
                await self._changes.until(lambda: self._coordinator.in_flight == 0)

    def _skip(self, finished: list[FinishedGroup]) -> None:
        """Nothing in the batch can be trained: no update, and another batch in its place."""
        self._coordinator.settled(filtered=sum(item.kept for item in finished))
        self._coordinator.skipped()
        self._producer.trained(finished)
        for group in finished:
            self._producer.bias.dropped(group)
        found = self._learner.metrics.reduce()
        why = {key: value for key, value in found.items() if value and not key.startswith("memory/")}
        self._trackers.message(f"no update: the batch holds nothing to train {why}")
        self._skipped_in_a_row += 1
        if self._skipped_in_a_row >= self.config.filters.most_replacements:
            raise DataError(f"{self._skipped_in_a_row} batches in a row held nothing to train: {why}")

    async def _end_of_step(self) -> None:
        """Figures, and callbacks: evaluation, tracking and checkpoint are among them."""
        if self.step >= self.config.trainer.steps:
            self._producing.cancel()  # what is still in flight will not be trained
        metrics = self._learner.metrics
        for name, count in asdict(self._coordinator.account()).items():
            metrics.record(f"episodes/{name}", count, Reducer.LAST)
        metrics.merge(self._producer.durations())
        metrics.merge(self._producer.bias.metrics())
        metrics.merge(self._clock.end(self.engine.health(), overlapping=self.config.trainer.max_staleness > 0))
        values = metrics.reduce()
        values["tokens/generated_per_s"] = values["tokens/generated"] / max(self._clock.generating_s, 1e-9)
        values["tokens/trained_per_s"] = values["tokens/trained"] / max(self._clock.training_s, 1e-9)
        self._check_drift(values)
        self._warn_of_uniform_rewards(values)
        self._last_metrics = await self._callbacks.end_batch(self.step, values)

    def _check_drift(self, values: dict[str, float]) -> None:
        """The mismatch alarm: the learner's log-probabilities against those that the same version sampled with."""
        drift, alarm = values.get("drift/same_version", 0.0), self.config.alarm
        if self._samples_cut or not drift > alarm.warn_drift:
            return
        found = (
            f"step {self.step}: sampler and learner differ by {drift:.3g} on average on tokens of the same version "
            f"(log-probability)"
        )
        if drift > alarm.stop_drift:
            raise PublicationError(
                f"{found}, above alarm.stop_drift {alarm.stop_drift:g}: the engine does not sample from the weights "
                f"that were published; restart it, or raise the limit if the two are known to compute differently"
            )
        self._warn_once("drift", f"{found}; above alarm.warn_drift {alarm.warn_drift:g} training is not exact")

    @property
    def _samples_cut(self) -> bool:
        """Whether the sampler's distribution is not the learner's by intention."""
        rollout = self.config.rollout
        return rollout.top_p < 1 or rollout.top_k > 0 or self.config.model.lora.dropout > 0

    def _warn_of_uniform_rewards(self, values: dict[str, float]) -> None:
        """Once, when a whole step taught nothing."""
        if values.get("reward/uniform_groups") == 1.0 and values.get("policy/grad_norm") == 0.0:
            self._warn_once(
                "uniform",
                f"step {self.step}: in every group all rewards are equal (mean {values['reward/mean']:g}), so nothing "
                f"was learned; use tasks that are sometimes solved, or a reward that tells rollouts apart",
            )

    def _warn_once(self, what: str, text: str) -> None:
        if what not in self._warned:
            self._warned.add(what)
            self._trackers.message(text)

    # ---- beside the learner ---------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Looks at the engine on an interval, shows its state, and ends the run if it has died for good."""
        while True:
            health = self.engine.health()
            self._trackers.status(health)
            if health.error is not None:
                raise EngineError(f"the engine has stopped: {health.error}")
            await asyncio.sleep(self.config.engine.health_every_s)

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run something beside training; its failure ends the run."""
        return self._loops.create_task(work)

    async def evaluate(self, pinned: bool = False) -> dict[str, float]:
        """Evaluate every set; `pinned` keeps the weights of now for it while training goes on."""
        step = self.step
        if pinned:  # first of all: a callback may take its time, and the weights would change
            await self.engine.pin()
        try:
            await self._callbacks.call("on_validation_start", step)
            found = await self._parts.evaluator.evaluate(self._parts.eval_manager)
        finally:
            if pinned:
                await self.engine.unpin()
        self._last_evaluation = found
        if step == 0:
            self._first_evaluation = found
        await self._callbacks.call("on_validation_end", step, found)
        return {**found, "eval/step": float(step)}

    async def save(self) -> None:
        """Write a checkpoint."""
        state = TrainerState(
            step=self.step,
            version=self._coordinator.version,
            sampler_position=self._parts.sampler.position,
            next_group_id=self._producer.next_group_id,
            first_evaluation=self._first_evaluation,
            unfinished=self._producer.unfinished(),
        )
        await save_checkpoint(self._run_dir, state, self._parts.backend, self.config.trainer.keep_last)

    async def _resumed_state(self) -> TrainerState | None:
        """That of the newest checkpoint, with the backend's loaded; None if there is none."""
        checkpoints = list_checkpoints(self._run_dir)
        if not checkpoints:
            return None
        state = await load_checkpoint(checkpoints[-1], self._parts.backend)
        self._trackers.message(f"going on from {checkpoints[-1]}")
        return state

    def _finish(self) -> RunResult:
        interrupted = self._stop_requested and self.step < self.config.trainer.steps
        result = RunResult(
            self._run_dir, self.step, interrupted, self._first_evaluation, self._last_evaluation, self._last_metrics
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


def _first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The exception that ended a loop; the others were cancelled because of it."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
