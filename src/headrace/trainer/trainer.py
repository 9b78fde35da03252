"""UnifiedTrainer: the loops, and nothing else.

Three loops run side by side. The `Producer` rolls tasks out as the coordinator admits them; `_learn` turns whole groups
into optimizer steps and hands the weights back; `_watch` looks after the engine. They meet in the coordinator and the
buffer. With `max_staleness = 0` a batch is admitted only when the version that it trains is published, so the first
two take turns: that is synchronous training. Above 0, generation goes on while the learner learns.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import AsyncExitStack, aclosing, closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from headrace.utils import memory
from headrace.rollout.gateway import close_gateway
from headrace.rollout.manager import close_all, start_workflows
from headrace.rollout.store import StoredValues
from headrace.run.agreement import missing_steps
from headrace.trainer.alarms import Alarms
from headrace.trainer.setup import Tasks, assemble, numerics_of, resolve_objective
from headrace.backends.base import Publication
from headrace.trainer.callbacks import Callback, CallbackSet, Evaluating, Saving, Tracking
from headrace.run.checkpoint import TrainerState, list_checkpoints, load_newest, step_of, with_evaluation
from headrace.config import RunConfig
from headrace.ledger.account import Account
from headrace.utils.deadline import end_user_tasks
from headrace.errors import DataError, EngineError, first_of
from headrace.evaluation.evaluator import under
from headrace.scheduling.batch_source import HandOut
from headrace.utils.interrupts import on_interrupt
from headrace.run.journal import in_pieces, open_journal
from headrace.trainer.learner_step import Learner
from headrace.utils.loopwatch import watched_loop
from headrace.tracking.metrics import Reducer
from headrace.scheduling.buffer import FinishedGroup, TrajectoryGroupBuffer
from headrace.trainer.step_clock import StepClock
from headrace.scheduling.coordinator import SyncCoordinator
from headrace.scheduling.producer import Changes, OpenedBatch, Producer
from headrace.run.random_state import random_states, restore_random_states
from headrace.registry import resolve
from headrace.run.directory import claim_run_dir, log_to_file, mark_finished
from headrace.config.loading import build_config
from headrace.utils.running import run_loop
from headrace.run.checkpoint_writer import CheckpointWriter, adopt
from headrace.trainer.summary import summarize
from headrace.tracking.terminal import working
from headrace.utils.threads import in_own_thread
from headrace.tracking.base import RunInfo, TrackerSet
from headrace.utils.usercode import reporting_abandoned


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
        config = config if isinstance(config, RunConfig) else build_config(config)
        self._as_given = config
        given = {"workflow": workflow, "judger": judger}
        self.config = resolve_objective(config, [name for name, one in given.items() if one is not None])
        self.step = 0
        self._given = (workflow, tasks, judger, eval_tasks)
        resolve("staleness", config.trainer.staleness)  # a wrong name is told before a run folder is made
        named = [resolve("callback", name)() for name in config.trainer.callbacks]
        self._own_callbacks = [*named, *callbacks]
        self._stop_requested = False
        self._hand_out: HandOut | None = None
        self._skipped_in_a_row = 0
        self._producing: asyncio.Task[None] | None = None
        self._evaluations: list[dict[str, float]] = []
        self._evaluating: set[int] = set()
        self._first_evaluation: dict[str, float] = {}
        self._last_evaluation: dict[str, float] = {}
        self._last_metrics: dict[str, float] = {}

    def fit(self) -> RunResult:
        """Train to the end. Ctrl-C or SIGTERM finishes the current step, saves, and returns; a second one aborts."""
        return run_loop(self.fit_async, self._interrupted)

    def stop(self) -> None:
        """Finish the current step, save, and return from `fit`."""
        self._stop_requested = True
        if self._hand_out is not None:
            self._hand_out.enough = True

    async def fit_async(self) -> RunResult:
        """`fit` for a running event loop."""
        self._fitting, self._interrupted_early = asyncio.current_task(), False
        try:
            with on_interrupt(self._interrupted):
                with working("loading the training backend"):
                    numerics = await in_own_thread(numerics_of, self.config)
                with claim_run_dir(self._as_given, numerics) as self._claim:
                    self._run_dir = self._claim.folder
                    return await self._fit()
        except asyncio.CancelledError:
            if self._interrupted_early:
                raise KeyboardInterrupt from None
            raise

    async def _fit(self) -> RunResult:
        self._trackers = TrackerSet.from_names(self.config.track.trackers)
        with closing(log_to_file(self._run_dir)), closing(self._trackers):
            # tracked before it is saved: what a checkpoint contains is never missing from the metrics
            saving = Saving()
            self._evaluations_of = Evaluating(saving)
            self._callbacks = CallbackSet(
                [self._evaluations_of, *self._own_callbacks, Tracking(self._trackers), saving],
                self.config.trainer.hook_timeout_s,
            )
            self._trackers.message(f"loading {self.config.model.name} for the run in {self._run_dir}")
            self._parts = await in_own_thread(assemble, self.config, *self._given, report=self._trackers.progress)
            self.engine = self._parts.engine
            self._alarms = Alarms(self.config, self._trackers.message)
            async with AsyncExitStack() as held:  # closed in the opposite order, all of it, whatever fails
                held.push_async_callback(lambda: self._parts.backend.close())
                held.push_async_callback(close_gateway)
                held.push_async_callback(lambda: self._parts.engine.close())
                held.push_async_callback(end_user_tasks)
                self._journal = held.enter_context(closing(open_journal(self._run_dir, self.config)))
                held.callback(self._trackers.close)
                values = held.enter_context(closing(StoredValues(self._run_dir / "store.sqlite")))
                managers = [self._parts.manager, self._parts.eval_manager, *self._parts.evaluator.managers]
                for manager in managers:
                    manager.values = values
                held.push_async_callback(close_all, managers)
                await start_workflows(managers, self.config.trainer.hook_timeout_s)
                self._checkpoints = CheckpointWriter(self._run_dir, self._parts.backend, self.config)
                held.push_async_callback(self._checkpoints.close)
                await self._train_interruptibly()
        return self._finish()

    async def _train_interruptibly(self) -> None:
        try:
            with (
                memory.frozen(),
                watched_loop(self._trackers.message, limit_s=self.config.rollout.timeout_s),
                reporting_abandoned(self._trackers.message) as self._abandoned,
            ):
                await self._train()
        except BaseExceptionGroup as group:
            raise first_of(group) from None

    async def _train(self) -> None:
        config, notes = self.config, list(self._claim.notes)
        self._trackers.progress("looking for a checkpoint")
        state = await self._resumed_state(notes.append)
        branches = self._claim.start_from is not None and not self._claim.goes_on
        notes += self._journal.agree_with(state, branches)
        info = self._as_given.model_dump(mode="json")
        self._trackers.start(
            RunInfo(config.run.name, self._run_dir, config.trainer.steps, info, self._goes_on_from(state))
        )
        if state is not None and "jsonl" in config.track.trackers:
            notes += self._missing_metrics(state)
        if state is None and self._goes_on_from(state) is not None:
            notes.append(f'going on with the run in {self._run_dir}; run.resume = "never" starts another')
        for note in notes:
            self._trackers.message(note)
        self._journal.resumed(self._goes_on_from(state))
        await self._set_up(state)
        async with asyncio.TaskGroup() as self._loops:
            before = await self._callbacks.call("on_train_start", self)
            before |= await self._evaluations_of.begin()
            if before:
                self._trackers.log(0, before)
            self._clock.restart()
            watch = self.spawn(self._watch())
            await self._replay()
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
        self._buffer = TrajectoryGroupBuffer(config, parts.grouping, self._run_dir / "spill")
        self._recorded = self._journal.batches_from(self.step)
        account = self._account_before_replay()
        self._coordinator = SyncCoordinator(
            parts.policy,
            config.fresh_groups,
            version=version,
            over_sample=config.produce.over_sample,
            capacity=config.produce.capacity,
            batches=self._batches_left,
            largest_step=config.trainer.batch_size,
            account=account,
        )
        self._changes = Changes()
        self._producer = Producer(
            config, parts.sampler, parts.manager, self._coordinator, self._buffer, self._changes, self._journal
        )
        self._learner = Learner(config, parts.backend, parts.objective, parts.policy)
        self._clock = StepClock()
        section, shares = config.trainer, parts.engine.shares_weights
        self._streams = self._learner.streams and (not shares if section.stream is None else section.stream)
        lends = section.max_staleness == 0 if section.release_cache is None else section.release_cache
        self._lends = shares and lends and not self._streams
        self._hand_out = HandOut(
            config, self._coordinator, self._buffer, self._producer, self._changes, self._journal, self._streams,
            self._trackers.message,
        )  # fmt: skip
        parts.manager.journal = self._journal.episodes()
        self._take_up(state)
        self._trackers.progress("giving the engine its weights")
        await parts.backend.publish(version)

    def _account_before_replay(self) -> Account:
        """Where every episode is; those of the recorded steps are trained when these are made again."""
        trained = 0
        for record in self._recorded:  # the decisions on the very last may have been cut off by the crash
            groups = self._recorded_groups(record.group_ids)
            self._journal.decide_trained(record.step, groups)
            trained += sum(group.kept for group in groups)
        account = self._journal.account()
        return replace(account, trained=account.trained - trained, pending=account.pending + trained)

    def _take_up(self, state: TrainerState | None) -> None:
        """Go on where the run stood: by the ledger, which knows more than the checkpoint.

        Only of groups that no ledger has, or that of the run which this one began from, the checkpoint knows more.
        """
        sampler, producer, journal = self._parts.sampler, self._producer, self._journal
        sampler.position = max(journal.next_position() or (0, 0), state.sampler_position if state else (0, 0))
        producer.next_group_id = max(journal.next_group_id(), state.next_group_id if state else 0)
        if state is not None:
            producer.resume(found for found in state.unfinished if not journal.knows(found[0]))
        producer.take_up(journal.under_way(self._recorded), journal.batch_begun_at())
        before = (state.unfinished, state.next_group_id) if state else ((), 0)
        since = (*(group_id for group_id, _ in before[0]), *range(before[1], producer.next_group_id))
        producer.recall_outcomes(state.extra.get("curriculum") if state else None, since)
        if state is not None:
            self._evaluations = state.evaluations
            self._first_evaluation, self._last_evaluation = state.first_evaluation, state.last_evaluation
            restore_random_states(state.random)
            self._parts.policy.restore(state.extra.get("policy"))
            self._evaluations_of.untold = state.extra.get("untold_evaluation")
            for group_id, uses in state.extra.get("used", ()):
                if journal.knows(group_id):
                    self._buffer.retain_again(self._recorded_groups([group_id])[0], uses)

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
        pieces: list[list[FinishedGroup]] = []
        again: list[FinishedGroup] = []
        assert self._hand_out is not None
        step, complete = f"step {self.step + 1}/{self.config.trainer.steps}", self._buffer
        self._trackers.progress(
            lambda: f"{step}: {len(complete)} of {batch.size} groups complete, {self._coordinator.in_flight} under way"
        )
        async with aclosing(self._hand_out.gather(batch.size, self.step)) as gathered:
            async for some, again in gathered:
                pieces.append(some)
                if self._lends:
                    peak_mb = memory.peak_mb()
                    await self._lend_memory()
                    self._learner.metrics.record("memory/generate_peak_mb", peak_mb, Reducer.MAX)
                self._trackers.progress(f"{step}: training")
                with self._clock.training():
                    await self._learner.learn(some, again)
        if self._learner.has_something:
            with self._clock.training():
                batches = self._learner.batches
                await self._journal.training(self.step, self._coordinator.version, pieces, again, batches)
                await self._update([group for piece in pieces for group in piece], again)
        if self._lends:
            self._learner.metrics.record("memory/train_peak_mb", memory.peak_mb(), Reducer.MAX)
            await self.engine.resume()
        if self._learner.has_something:
            await self._end_of_step()
        else:
            self._skip([group for piece in pieces for group in piece])
        self._clock.restart()
        self._coordinator.resume()
        self._changes.notify()

    async def _replay(self) -> None:
        """Make the steps again that were recorded after the checkpoint: from the record, with nothing generated."""
        if self._recorded:
            self._trackers.message(f"making {len(self._recorded)} recorded steps again, from step {self.step + 1}")
        for number, record in enumerate(self._recorded, 1):
            self._trackers.progress(f"making recorded step {number} of {len(self._recorded)} again")
            await self._callbacks.call("on_batch_start", self.step)
            self._coordinator.open_batch()
            self._learner.begin(self._coordinator.version)
            fresh, again = map(self._recorded_groups, (record.group_ids, record.again))
            for group in fresh:  # what was dropped beside them is not made again
                self._producer.before_filters.add(group)
            with self._clock.training():
                for piece, last in in_pieces(fresh, record.pieces):
                    await self._learner.learn(piece, again if last else ())
                await self._update(fresh, again, replayed=True)
            await self._end_of_step()
            self._clock.restart()
            self._coordinator.resume()

    def _recorded_groups(self, group_ids: Iterable[int]) -> list[FinishedGroup]:
        return [self._buffer.form(group_id, self._journal.episodes_of(group_id)) for group_id in group_ids]

    async def _lend_memory(self) -> None:
        """The engine's cache makes room for the learner's activations; it is rebuilt when decoding goes on."""
        await self.engine.pause()
        await self.engine.release_cache()
        memory.reset_peak()

    async def _update(self, finished: list[FinishedGroup], again: list[FinishedGroup], replayed: bool = False) -> None:
        """Change the weights and hand them to the engine. `replayed`: the ledger has this step already."""
        coordinator, before = self._coordinator, self.step
        if not (self.config.trainer.max_staleness and self.config.trainer.partial_rollouts):
            coordinator.pause()  # in step, evaluation and checkpoint are to see the engine idle
        if self.engine.shares_weights:
            await self._drained()
            await self.engine.pause()  # until it knows the version: tokens in between would carry the wrong one
        self.step += await self._learner.update(self.step)
        await self._drained()
        publication = await self._parts.backend.publish(coordinator.version + 1)
        if replayed:
            self._compare_with_record(publication)
        coordinator.settled(trained=sum(item.kept for item in finished))
        self._producer.learned(finished)
        self._journal.trained(before, self.step - before, publication)
        coordinator.published(publication.version)
        coordinator.needs(self._batches_left)  # a batch of few rows makes fewer updates than it should
        if self.engine.shares_weights and not (self._lends and not replayed):
            await self.engine.resume()
        self._producer.trained(finished)
        self._producer.bias.trained(finished)
        self._buffer.retain([*finished, *again])
        self._skipped_in_a_row = 0
        self._changes.notify()
        await self._callbacks.call("on_policy_updated", publication.version, publication.fingerprint)

    def _compare_with_record(self, publication: Publication) -> None:
        recorded = self._journal.fingerprint(publication.version)
        if recorded is not None and recorded != publication.fingerprint:
            self._alarms.warn_once(
                "replay",
                f"step {self.step}, made again from its record, gave other weights (fingerprint "
                f"{publication.fingerprint}, not {recorded}): the same up to rounding, unless the installation has "
                f"changed; run.deterministic = true makes them equal",
            )

    async def _drained(self) -> None:
        """Without partial rollouts, wait until nothing is in flight."""
        if not self.config.trainer.partial_rollouts:
            with self._clock.waiting():
                await self._changes.until(lambda: self._coordinator.in_flight == 0)

    def _skip(self, finished: list[FinishedGroup]) -> None:
        """Nothing in the batch can be trained: no update, and another batch in its place."""
        self._coordinator.settled(filtered=sum(item.kept for item in finished))
        self._coordinator.skipped()
        self._journal.nothing_to_train(finished, self.step)
        self._producer.observe(finished)
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
        if self.step >= self.config.trainer.steps and self._producing is not None:
            self._producing.cancel()  # what is still in flight will not be trained
        metrics = self._learner.metrics
        for name, count in asdict(self._coordinator.account()).items():
            metrics.record(f"episodes/{name}", count, Reducer.LAST)
        if self._journal.restarted:
            metrics.record("episodes/restarted", self._journal.restarted, Reducer.LAST)
        if self._abandoned.count:
            metrics.record("user_code/abandoned", self._abandoned.count, Reducer.LAST)
        metrics.merge(self._producer.durations())
        metrics.merge(self._producer.before_filters.metrics())
        metrics.merge(self._producer.bias.metrics())
        for name, value in (self._parts.sampler.figures() | self._parts.manager.figures()).items():
            metrics.record(name, value, Reducer.LAST)
        metrics.merge(self._clock.end(self.engine.health(), overlapping=self.config.trainer.max_staleness > 0))
        values = metrics.reduce()
        values["tokens/generated_per_s"] = values["tokens/generated"] / max(self._clock.generating_s, 1e-9)
        values["tokens/trained_per_s"] = values["tokens/trained"] / max(self._clock.training_s, 1e-9)
        self._alarms.check(self.step, values)
        self._last_metrics = await self._callbacks.end_batch(self.step, values)

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

    async def evaluate(self) -> dict[str, float]:
        """Evaluate every set, and wait for it."""
        step = self.step
        self._evaluating.add(step)
        await self._callbacks.call("on_validation_start", step)
        return await self.end_evaluation(step, await self._recorded_or_new_evaluation(step, shown=True))

    async def start_evaluation(self) -> asyncio.Task[dict[str, float]]:
        """Start to evaluate the weights of now, which are kept for it while training goes on."""
        step = self.step
        self._evaluating.add(step)
        await self.engine.pin()  # first of all: a callback may take its time, and the weights would change
        try:
            await self._callbacks.call("on_validation_start", step)
            return self.spawn(self._evaluate_pinned(step))
        except BaseException:
            await self.engine.unpin()
            raise

    async def _evaluate_pinned(self, step: int) -> dict[str, float]:
        try:
            return await self._recorded_or_new_evaluation(step, shown=False)
        finally:
            await self.engine.unpin()

    async def end_evaluation(self, step: int, found: dict[str, float]) -> dict[str, float]:
        """Report what an evaluation came to; its metrics, with the step that they are of."""
        self._last_evaluation = found
        if step == 0:
            self._first_evaluation = found
        await self._callbacks.call("on_validation_end", step, found)
        whole = {**found, "eval/step": float(step)}
        self._evaluations = with_evaluation(self._evaluations, whole)
        self._evaluating.discard(step)
        return dict(whole)  # whose history does not change with what the caller makes of it

    def evaluated(self, step: int) -> dict[str, float]:
        """The metrics of an evaluation that was reported before; empty if there are none."""
        return next((dict(found) for found in self._evaluations if found["eval/step"] == step), {})

    async def _recorded_or_new_evaluation(self, step: int, shown: bool) -> dict[str, float]:
        recorded = self._journal.evaluation(step, self.config.eval.sets)
        if recorded is not None:  # made before the run was interrupted
            return {key: value for name, metrics in recorded.items() for key, value in under(name, metrics).items()}
        when, at = f"after step {step}" if step else "before training", ""

        def progress(name: str, done: int, total: int) -> None:
            nonlocal at
            at = f": {name}, {done} of {total} episodes"

        if shown:  # beside training, what training does is shown
            self._trackers.progress(lambda: f"evaluating {when}{at}")
        return await self._parts.evaluator.evaluate(
            self._parts.eval_manager, progress, keep=lambda *found: self._journal.evaluated(step, *found)
        )

    async def save(self) -> None:
        """Write a checkpoint."""
        self._trackers.progress(f"saving the checkpoint of step {self.step}")
        state = TrainerState(
            step=self.step,
            version=self._coordinator.version,
            sampler_position=self._parts.sampler.position,
            next_group_id=self._producer.next_group_id,
            evaluations=self._evaluations,
            unfinished=self._producer.unfinished(),
            random=random_states(),
            extra={
                "policy": self._parts.policy.state(),
                "curriculum": self._parts.sampler.state(),
                "used": self._buffer.used(),
                "untold_evaluation": self._evaluations_of.untold,
            },
        )
        await self._journal.flushed()  # what a checkpoint contains is not made again: it must not be missing
        state = self._journal.with_excerpt(state)
        last = self._stop_requested or self.step >= self.config.trainer.steps
        await self._checkpoints.save(state, last, self._evaluating)
        for oldest in list_checkpoints(self._run_dir)[:1]:  # none while the first is being written
            self._journal.saved(step_of(oldest), self._buffer.reusable)
        self.spawn(self._checkpoints.wait())  # a failure while it is written ends the run

    async def _resumed_state(self, tell: Callable[[str], None]) -> TrainerState | None:
        """That of the newest checkpoint, with the backend's loaded; None if there is none."""
        backend = self._parts.backend
        if self._claim.start_from is not None:
            await asyncio.to_thread(adopt, self._run_dir, self._claim.start_from, tell)
        return await load_newest(self._run_dir, backend, tell, set_aside=True)

    def _missing_metrics(self, state: TrainerState) -> list[str]:
        one_each = self.config.trainer.updates_per_batch == 1
        expected = range(1, state.step + 1) if one_each else self._journal.made_steps(state.step)
        return missing_steps(self._run_dir, self._journal.begun_at, state.step, expected or ())

    def _goes_on_from(self, state: TrainerState | None) -> int | None:
        """The step that trackers are to go on from; None for a run that begins."""
        if state is not None:
            return state.step
        return 0 if self._claim.goes_on or self._journal.goes_on else None

    def _finish(self) -> RunResult:
        interrupted = self._stop_requested and self.step < self.config.trainer.steps
        result = RunResult(
            self._run_dir, self.step, interrupted, self._first_evaluation, self._last_evaluation, self._last_metrics
        )
        if not interrupted:
            mark_finished(self._run_dir, self._last_evaluation)
        summarize(result, self.config)
        return result

    def _interrupted(self) -> None:
        if self._producing is None and self._fitting is not None:  # nothing is trained yet: there is nothing to save
            self._interrupted_early = True
            self._fitting.cancel()
            return
        self.stop()
        self._trackers.message("stopping after this step; a second Ctrl-C or SIGTERM aborts at once")
