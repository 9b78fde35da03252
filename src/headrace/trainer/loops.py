"""The loops of a run, and nothing else.

Three run side by side. The `Producer` rolls tasks out as the coordinator admits them; `_learn` turns complete groups
into optimizer steps and syncs the weights; `_watch` monitors the engine. They meet in the coordinator and the
buffer. With `max_staleness = 0` a batch is admitted only when the engine has the version that it trains, so the first
two take turns: that is synchronous training. Above 0, generation continues while the learner learns.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from headrace.config import RunConfig
from headrace.errors import DataError, EngineError
from headrace.run.checkpoint import list_checkpoints, step_of
from headrace.scheduling.buffer import FinishedGroup
from headrace.scheduling.producer import OpenedBatch
from headrace.tracking.episodes import sampled_rows
from headrace.trainer.recovery import learn_recorded, other_weights
from headrace.trainer.setup import Run, batches_left
from headrace.utils import memory
from headrace.weights.base import SyncedWeights

T = TypeVar("T")
_LOOK_EVERY_S = 0.2


class _GraceOverError(Exception):
    """The run is to stop, and its step waited for too long."""


class TrainingLoops:
    """Drives the parts of a run. Callbacks get it as their `trainer`."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.config: RunConfig = run.config
        self.engine = run.engine
        self.step = run.start.step
        """Optimizer steps made."""
        self.last_metrics: dict[str, float] = {}
        self.evaluating = False
        """Whether all else waits for an evaluation, which a stop ends at once."""
        self._skipped_in_a_row = 0
        self._tasks = asyncio.TaskGroup()
        self._producing: asyncio.Task[None] | None = None
        self._replaying = False

    @property
    def has_work(self) -> bool:
        """Whether steps are repeated or rollouts have begun, so that there is something to save."""
        return self._replaying or self._producing is not None

    def report(self, text: str) -> None:
        """Show it to the user."""
        self._run.trackers.message(text)

    async def train(self) -> None:
        """To the last step, or until the run is asked to stop."""
        run = self._run
        async with self._tasks:
            before = await run.callbacks.call("on_train_start", self)
            before |= await run.evaluating.begin()
            if before:
                run.trackers.log(self.step, before)
            run.clock.restart()
            watch = self.spawn(self._watch())
            await self._replay()
            self._producing = self.spawn(run.manager.run())
            await self._learn()
            self._producing.cancel()
            await run.callbacks.call("on_train_end", self)
            if self.config.track.upload_model:
                await self._upload_model()
            watch.cancel()

    async def _upload_model(self) -> None:
        """Write the model as a folder, and give it to the trackers."""
        folder = self._run.folder / "model"
        await self._run.backend.export(folder)
        self._run.trackers.model(folder, self.step)

    # ---- the learner's loop ---------------------------------------------------------------------------------------

    async def _learn(self) -> None:
        """Consumes complete groups, waits for those of a step, produces optimizer steps and synced weights."""
        callbacks, epoch = self._run.callbacks, None
        while self.step < self.config.trainer.steps and not self._run.stop.requested:
            batch = await self._run.manager.next_batch()
            if epoch is not None and batch.epoch != epoch:
                await callbacks.call("on_epoch_end", epoch)
            if batch.epoch != epoch:
                epoch = batch.epoch
                await callbacks.call("on_epoch_start", epoch)
            await callbacks.call("on_batch_start", self.step)
            try:
                await self._make_step(batch)
            except _GraceOverError:  # nothing was changed: the groups of the step stay unfinished, and are recorded
                self.report(f"step {self.step + 1} is given up: run.grace_s = {self.config.run.grace_s:g} s are over")
                return
        if epoch is not None:
            await callbacks.call("on_epoch_end", epoch)

    async def _make_step(self, batch: OpenedBatch) -> None:
        """Gather the groups of a step, learn from them, sync the weights."""
        run, grace_s = self._run, self.config.run.grace_s
        over = None if grace_s is None else lambda: run.stop.seconds_ago() >= grace_s
        run.learner.begin(run.coordinator.version)
        memory.reset_peak()
        pieces: list[list[FinishedGroup]] = []
        again: list[FinishedGroup] = []
        step = f"step {self.step + 1}/{self.config.trainer.steps}"
        run.trackers.progress(
            lambda: f"{step}: {len(run.buffer)} of {batch.size} groups complete, {run.coordinator.in_flight} under way"
        )
        async with aclosing(run.manager.gather(batch.size, self.step)) as gathered:
            while (piece := await self._unless(over, anext(gathered, None))) is not None:
                some, again = piece
                pieces.append(some)
                if run.releases_cache:
                    await self._release_cache()
                run.trackers.progress(f"{step}: training")
                with run.clock.training():
                    await run.learner.learn(some, again)
        fresh = [group for piece in pieces for group in piece]
        if run.learner.has_something:
            with run.clock.training():
                await run.lifecycle.recorded(self.step, pieces, again, run.learner.batches)
                await self._update(fresh, again)
        if run.releases_cache:
            run.learner.metrics.record("memory/train_peak_mb", memory.peak_mb())
            await run.sync.resume()
        if run.learner.has_something:
            await self._end_of_step()
            self._show_episodes(fresh)
        else:
            self._skip(fresh)
        self._begin_next()

    async def _unless(self, over: Callable[[], bool] | None, work: Awaitable[T]) -> T:
        """Await; once it is over, because the run is to stop, cancel the work instead."""
        waiting = asyncio.ensure_future(work)
        try:
            while not waiting.done():
                if over is not None and over():
                    raise _GraceOverError
                await asyncio.wait({waiting}, timeout=None if over is None else _LOOK_EVERY_S)
            return waiting.result()
        finally:
            if not waiting.done():
                waiting.cancel()
                await asyncio.wait({waiting})

    def _show_episodes(self, trained: list[FinishedGroup]) -> None:
        """Give trackers a sample of what the step was trained on."""
        track = self.config.track
        if track.episodes:
            episodes = [episode for finished in trained for episode in finished.episodes]
            self._run.trackers.episodes(
                self.step, sampled_rows(episodes, track.episodes, self._run.folder, track.viewer)
            )

    async def _replay(self) -> None:
        """Repeat the steps that were recorded after the checkpoint: from the record, with nothing generated."""
        run, recorded = self._run, self._run.start.recorded
        if recorded:
            run.trackers.message(f"repeating {len(recorded)} recorded steps, from step {self.step + 1}")
        self._replaying = bool(recorded)
        for number, record in enumerate(recorded, 1):
            if run.stop.requested:  # the steps that are left stay recorded
                return
            run.trackers.progress(f"repeating recorded step {number} of {len(recorded)}")
            await run.callbacks.call("on_batch_start", self.step)
            run.coordinator.open_batch()
            fresh = run.lifecycle.recalled(record.group_ids)
            again = [run.lifecycle.form_recorded(group_id) for group_id in record.again]
            expected = run.journal.weight_digest(run.coordinator.version + 1)  # before the update records another
            with run.clock.training():
                await learn_recorded(run.learner, record, fresh, again)
                synced = await self._update(fresh, again, releases_cache=False)
            if expected not in (None, synced.digest):
                run.alarms.warn_once("replay", other_weights(self.step, synced.digest, expected))
            await self._end_of_step()
            self._begin_next()

    def _begin_next(self) -> None:
        self._run.clock.restart()
        self._run.coordinator.resume()
        self._run.lifecycle.changes.notify()

    async def _release_cache(self) -> None:
        """The engine's cache makes room for the learner's activations; it is rebuilt when decoding continues."""
        run, peak_mb = self._run, memory.peak_mb()
        await run.engine.pause()
        await run.engine.release_cache()
        memory.reset_peak()
        run.learner.metrics.record("memory/generate_peak_mb", peak_mb)

    async def _update(
        self, fresh: list[FinishedGroup], again: list[FinishedGroup], releases_cache: bool | None = None
    ) -> SyncedWeights:
        """Change the weights and sync them to the engine."""
        run, before, trainer = self._run, self.step, self.config.trainer
        if not (trainer.max_staleness and trainer.partial_rollouts):
            run.coordinator.pause()  # synchronous: evaluation and checkpoint see the engine idle
        if run.sync.in_place:
            await self._drained()
            await run.engine.pause()  # until it has the version: tokens in between would carry the wrong one
        self.step += await run.learner.update(self.step)
        run.journal.learned(before, run.learner.shares)
        await self._drained()
        synced = await run.sync.sync(run.coordinator.version + 1)
        run.lifecycle.trained(fresh, again, before, self.step - before, synced)
        run.coordinator.needs(
            batches_left(self.config, self.step)
        )  # a batch of few rows makes fewer updates than it should
        if run.sync.in_place and not (run.releases_cache if releases_cache is None else releases_cache):
            await run.sync.resume()
        self._skipped_in_a_row = 0
        await run.callbacks.call("on_policy_updated", synced.version, synced.digest)
        return synced

    async def _drained(self) -> None:
        """Without partial rollouts, wait until nothing is in flight."""
        run = self._run
        if not self.config.trainer.partial_rollouts:
            with run.clock.waiting():
                await run.lifecycle.changes.until(lambda: run.coordinator.in_flight == 0)

    def _skip(self, taken: list[FinishedGroup]) -> None:
        """Nothing in the batch can be trained: no update, and another batch instead."""
        self._run.lifecycle.nothing_to_train(taken, self.step)
        found = self._run.learner.metrics.reduce()
        why = {key: value for key, value in found.items() if value and not key.startswith("memory/")}
        self._run.trackers.message(f"no update: the batch holds nothing to train {why}")
        self._skipped_in_a_row += 1
        if self._skipped_in_a_row >= self.config.filters.most_replacements:
            raise DataError(f"{self._skipped_in_a_row} batches in a row held nothing to train: {why}")

    async def _end_of_step(self) -> None:
        """Metrics, and callbacks: evaluation, tracking and checkpoint are among them."""
        run = self._run
        if self.step >= self.config.trainer.steps and self._producing is not None:
            self._producing.cancel()  # what is still in flight will not be trained
        values = run.step_metrics()
        run.alarms.check(self.step, values)
        run.alarms.check_roles(self.step, run.learner.roles)
        self.last_metrics = await run.callbacks.end_batch(self.step, values)

    # ---- beside the learner ---------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Checks the engine on an interval, shows its state, and ends the run if it has died for good."""
        while True:
            health = self._run.engine.health()
            self._run.trackers.status(health)
            if health.error is not None:
                raise EngineError(f"the engine has stopped: {health.error}")
            await asyncio.sleep(self.config.engine.health_every_s)

    # ---- what callbacks may ask for -------------------------------------------------------------------------------

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run something beside training; its failure ends the run."""
        return self._tasks.create_task(work)

    def stop(self) -> None:
        """Finish the current step, save, and return from `fit`."""
        self._run.stop.request()

    async def evaluate(self) -> dict[str, float]:
        """Evaluate every set, and wait for it."""
        return await self._run.evaluations.evaluate(self.step)

    async def evaluate_unless_stopped(self) -> dict[str, float] | None:
        """The same; None if a signal ends the run before it is done. Then it can be made when the run is resumed."""
        self.evaluating = True
        try:
            return await self._unless(lambda: self._run.stop.signalled, self.evaluate())
        except _GraceOverError:
            return None
        finally:
            self.evaluating = False

    async def start_evaluation(self) -> asyncio.Task[dict[str, float]]:
        """Start to evaluate the current weights, which are pinned for it while training continues."""
        return await self._run.evaluations.start(self.step, self.spawn)

    async def end_evaluation(self, step: int, found: dict[str, float]) -> dict[str, float]:
        """Report what `start_evaluation` came to; its metrics, with the step that they are of."""
        return await self._run.evaluations.end(step, found)

    def evaluated(self, step: int) -> dict[str, float]:
        """The metrics of an evaluation that was reported before; empty if there are none."""
        return self._run.evaluations.of(step)

    async def save(self) -> None:
        """Write a checkpoint."""
        run = self._run
        run.trackers.progress(f"saving the checkpoint of step {self.step}")
        # the state before the flush: what a checkpoint contains is not made again, so the ledger must have all of it
        state = run.state(self.step)
        await run.journal.flushed()
        last = run.stop.requested or self.step >= self.config.trainer.steps
        await run.checkpoints.save(run.journal.with_excerpt(state), last, run.evaluations.running)
        for oldest in list_checkpoints(run.folder)[:1]:  # none while the first is being written
            run.journal.saved(step_of(oldest), run.buffer.reusable)
        self.spawn(run.checkpoints.wait())  # a failure while it is written ends the run
