"""GroupLifecycle: the one place where a group changes state.

    drawn ──▶ started ──▶ complete ──▶ taken ──▶ trained
                 │            │          └─────▶ dropped    nothing in its batch could be trained
                 │            └────────────────▶ stale      older than the staleness policy trains
                 └─────────────────────────────▶ dropped    failed, or filtered

One method per transition. Each updates everything that tracks groups: the coordinator (admission, versions, account),
the buffer (episodes), the ledger (durable), the sampler (a curriculum learns from outcomes), and the metrics of
durations and selection bias. A group that may be reused is no longer tracked here: the buffer holds it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from headrace.config import AlgorithmSection
from headrace.data.episode import Episode
from headrace.data.sample import TrainBatch
from headrace.data.sampler import Draw, Position, TaskSampler
from headrace.run.journal import RunJournal
from headrace.scheduling.batch_metrics import RewardsBeforeFilters
from headrace.scheduling.bias import SelectionBias
from headrace.scheduling.buffer import FinishedGroup, TrajectoryGroupBuffer
from headrace.scheduling.coordinator import SyncCoordinator
from headrace.scheduling.durations import GroupDurations
from headrace.tracking.metrics import MetricsAggregator
from headrace.weights.base import SyncedWeights


class Changes:
    """Wakes the loops that wait for a change of the coordinator or the buffer."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        """Wake all waiting loops."""
        self._event.set()
        self._event = asyncio.Event()

    async def next(self) -> None:
        """Wait for the next change."""
        await self._event.wait()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition holds. It must have no side effects: it is evaluated at every change."""
        while not condition():
            await self.next()


class Stage(StrEnum):
    """The states of a group."""

    DRAWN = "drawn"
    STARTED = "started"
    COMPLETE = "complete"
    TAKEN = "taken"
    TRAINED = "trained"
    DROPPED = "dropped"
    STALE = "stale"


_NEXT = {
    Stage.DRAWN: {Stage.STARTED},
    Stage.STARTED: {Stage.COMPLETE, Stage.DROPPED},
    Stage.COMPLETE: {Stage.TAKEN, Stage.STALE},
    Stage.TAKEN: {Stage.TRAINED, Stage.DROPPED},
}


@dataclass(slots=True)
class LiveGroup:
    """A group that has not reached its final state: the rollouts of one task."""

    group_id: int
    draw: Draw
    known: Mapping[int, Episode] = field(default_factory=dict)
    """Episodes that an earlier process of the run finished."""
    counted: bool = False
    """Whether the account includes its episodes already."""
    settled: bool = False
    """Whether an earlier process completed it: the account includes its failed and filtered episodes already."""
    since: int | None = None
    """The version at its start, if an earlier process sampled some of it."""
    stage: Stage = Stage.DRAWN
    started_s: float = 0.0


class GroupLifecycle:
    """The groups of a run, from their draw to their final state."""

    def __init__(
        self,
        group_size: int,
        algorithm: AlgorithmSection,
        sampler: TaskSampler,
        coordinator: SyncCoordinator,
        buffer: TrajectoryGroupBuffer,
        journal: RunJournal,
        next_group_id: int = 0,
    ) -> None:
        self._group_size = group_size
        self._sampler = sampler
        self._coordinator = coordinator
        self._buffer = buffer
        self._journal = journal
        self._bias = SelectionBias()
        self._durations = GroupDurations()
        self._before_filters = RewardsBeforeFilters(algorithm)
        self._live: dict[int, LiveGroup] = {}
        self._next_group_id = next_group_id
        self.changes = Changes()

    @property
    def next_group_id(self) -> int:
        """The id of the next group."""
        return self._next_group_id

    def unfinished(self) -> list[tuple[int, Position]]:
        """Groups without a final state, with task positions: a resumed run without a ledger starts them again."""
        return [(group.group_id, group.draw.position) for group in self._live.values()]

    # ---- transitions ----------------------------------------------------------------------------------------------

    def drawn(self, draw: Draw) -> LiveGroup:
        """A task is drawn; its group gets an id."""
        group = LiveGroup(self._next_group_id, draw)
        self._next_group_id += 1
        self._live[group.group_id] = group
        self._journal.drawn(group.group_id, draw, self._group_size, self._coordinator.version)
        return group

    def restored(self, group: LiveGroup, *, recorded: bool) -> None:
        """Track a group that an earlier process drew, under its old id (and so its old seeds)."""
        self._live[group.group_id] = group
        if not recorded:
            self._journal.drawn(group.group_id, group.draw, self._group_size, self._coordinator.version)

    def recalled(self, group_ids: Iterable[int]) -> list[FinishedGroup]:
        """The groups of a recorded batch that an earlier process took; they are trained unchanged."""
        recalled = [self.form_recorded(group_id) for group_id in group_ids]
        for finished in recalled:
            draw = self._sampler.draw_at(self._journal.position_of(finished.group_id))
            self._live[finished.group_id] = LiveGroup(finished.group_id, draw, stage=Stage.TAKEN)
            self._before_filters.add(finished)  # groups that filters dropped are not restored
        return recalled

    def form_recorded(self, group_id: int) -> FinishedGroup:
        """A recorded group as the buffer formed it, to train or to count it again."""
        return self._buffer.form(group_id, self._journal.episodes_of(group_id))

    def started(self, group: LiveGroup) -> None:
        """The rollouts of the group start, under the current version."""
        self._move(group.group_id, Stage.STARTED)
        group.started_s = time.perf_counter()
        self._coordinator.started(group.group_id, 0 if group.counted else self._group_size, group.since)
        self._bias.submitted(group.draw.task.source)

    def episode_finished(self, group: LiveGroup, episode: Episode) -> FinishedGroup | None:
        """An episode has finished. With its last episode a group is complete, or dropped. The learner may take complete
        groups from then on."""
        finished = self._buffer.add_episode(episode, self._group_size)
        if finished is not None:
            self._completed(group, finished)
        return finished

    def _completed(self, group: LiveGroup, finished: FinishedGroup) -> None:
        duration_s = time.perf_counter() - group.started_s
        self._durations.add(duration_s, finished)
        self._before_filters.add(finished)
        self._bias.finished(finished, duration_s)
        if not group.settled:
            self._coordinator.settled(failed=finished.failed, filtered=finished.filtered)
            self._journal.completed(finished, self._coordinator.version)
        if finished.dropped_because is None:
            self._move(finished.group_id, Stage.COMPLETE)
            self._coordinator.completed(finished.group_id, finished.oldest_version)
        else:
            self._observe(finished)
            self._coordinator.discarded(finished.group_id)
            self._move(finished.group_id, Stage.DROPPED)
        self.changes.notify()

    def taken(self, count: int, first: Sequence[int] = ()) -> list[FinishedGroup]:
        """The step at this version takes complete groups: those named `first`, then by order."""
        some = self._buffer.take(count, first)
        for finished in some:
            self._move(finished.group_id, Stage.TAKEN)
            self._coordinator.taken(finished.group_id)
        self.changes.notify()
        return some

    def drop_stale(self, step: int) -> int:
        """Drop the complete groups that the staleness policy rejects. Returns how many."""
        stale = self._coordinator.stale()
        for finished in self._buffer.take(len(stale), first=stale) if stale else ():
            self._coordinator.discarded(finished.group_id)
            self._coordinator.settled(stale=finished.kept)
            self._journal.stale(finished, step)
            self._bias.dropped(finished)
            self._move(finished.group_id, Stage.STALE)
        return len(stale)

    async def recorded(
        self,
        step: int,
        pieces: Sequence[Sequence[FinishedGroup]],
        again: Sequence[FinishedGroup],
        batches: Sequence[TrainBatch],
    ) -> None:
        """Record the batch in the ledger. Returns when the record is durable.

        After a crash the recorded batch is trained again. So the update must wait for the record: a crash in between
        would train its groups twice.
        """
        await self._journal.training(step, self._coordinator.version, pieces, again, batches)

    def trained(
        self,
        fresh: Sequence[FinishedGroup],
        again: Sequence[FinishedGroup],
        step: int,
        made: int,
        synced: SyncedWeights,
    ) -> None:
        """A batch was trained in `made` optimizer steps after `step`, and the engine has the new weights."""
        self._coordinator.settled(trained=sum(finished.kept for finished in fresh))
        for finished in fresh:
            self._observe(finished)
        self._sampler.end_version(self._coordinator.version)  # first: draws of the next version use the rates
        self._journal.trained(step, made, synced)
        self._coordinator.synced(synced.version)
        for finished in fresh:
            self._move(finished.group_id, Stage.TRAINED)
        self._bias.trained(fresh)
        self._buffer.retain([*fresh, *again])
        self.changes.notify()

    def delivered(self, fresh: Sequence[FinishedGroup], again: Sequence[FinishedGroup]) -> None:
        """A batch went to a caller that synced no new weights: another batch is opened for the same version."""
        self._coordinator.settled(trained=sum(finished.kept for finished in fresh))
        self._coordinator.skipped()
        for finished in fresh:
            self._observe(finished)
            self._move(finished.group_id, Stage.TRAINED)
        self._bias.trained(fresh)
        self._buffer.retain([*fresh, *again])
        self.changes.notify()

    def nothing_to_train(self, taken: Sequence[FinishedGroup], step: int) -> None:
        """A batch made no update: drop its groups, and open another batch for the same version."""
        self._coordinator.settled(filtered=sum(finished.kept for finished in taken))
        self._coordinator.skipped()
        self._journal.nothing_to_train(taken, step)
        for finished in taken:
            self._observe(finished)
            self._bias.dropped(finished)
            self._move(finished.group_id, Stage.DROPPED)
        self.changes.notify()

    def _move(self, group_id: int, to: Stage) -> None:
        group = self._live[group_id]
        assert to in _NEXT[group.stage], f"group {group_id} is {group.stage}, and cannot become {to}"
        group.stage = to
        if to not in _NEXT:  # a final state
            del self._live[group_id]

    def _observe(self, finished: FinishedGroup) -> None:
        draw = self._live[finished.group_id].draw
        self._sampler.observe(self._coordinator.version, finished.group_id, draw, finished.episodes)

    # ---- metrics --------------------------------------------------------------------------------------------------

    def metrics(self) -> MetricsAggregator:
        """Of the groups completed since the last call, and the selection bias of the run."""
        metrics = self._durations.metrics(self._coordinator.version)
        metrics.merge(self._before_filters.metrics())
        metrics.merge(self._bias.metrics())
        return metrics
