"""Producer: starts rollouts as the coordinator admits them, and puts whole groups into the buffer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from headrace.rollout.manager import AgentLoopManager
from headrace.config import RunConfig
from headrace.data.curriculum import CurriculumSampler
from headrace.data.episode import Episode
from headrace.ledger.columns import stored_text
from headrace.ledger.records import GroupRecord, GroupState, UnfinishedGroup
from headrace.data.sampler import Draw, Position, TaskSampler
from headrace.data.seeds import derive_seed
from headrace.engines.base import SamplingParams
from headrace.errors import DataError
from headrace.run.journal import RunJournal
from headrace.tracking.metrics import MetricsAggregator
from headrace.scheduling.bias import SelectionBias
from headrace.scheduling.buffer import FinishedGroup, TrajectoryGroupBuffer
from headrace.scheduling.coordinator import SyncCoordinator
from headrace.scheduling.durations import GroupDurations
from headrace.scheduling.batch_metrics import RewardsBeforeFilters

_FAILURES = 8  # episodes; fewer in a row may be bad luck


class Changes:
    """What the loops wait for: something about coordinator or buffer is not as it was."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        """Have everyone who waits look again."""
        self._event.set()
        self._event = asyncio.Event()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until it is true."""
        while not condition():
            await self._event.wait()


@dataclass(frozen=True, slots=True)
class OpenedBatch:
    """How many groups a step is to train, and of which epoch they were drawn."""

    size: int
    epoch: int


@dataclass(slots=True)
class _Place:
    """A place of an opened batch: the task that is to fill it, and under which group id."""

    draw: Draw
    group_id: int
    known: Mapping[int, Episode] = field(default_factory=dict)
    """Episodes that were rolled out before the run was interrupted."""
    counted: bool = False
    """Whether the account has its episodes already."""
    settled: bool = False
    """Whether it was whole already, and the account has what was lost of it."""
    since: int | None = None
    """The version that it was drawn under, if some of it was sampled before the run was interrupted."""


Unfinished = list[tuple[int, Position]]
"""Group ids of tasks that were drawn and not trained, and where they were drawn: to be rolled out again on resume."""


class Producer:
    """Consumes tasks, waits for admission, produces whole groups. A dropped group is replaced by another task's."""

    def __init__(
        self,
        config: RunConfig,
        sampler: TaskSampler,
        manager: AgentLoopManager,
        coordinator: SyncCoordinator,
        buffer: TrajectoryGroupBuffer,
        changes: Changes,
        journal: RunJournal,
    ) -> None:
        self._config = config
        self._journal = journal
        self._sampler = sampler
        self._manager = manager
        self._coordinator = coordinator
        self._buffer = buffer
        self._changes = changes
        self._seed = derive_seed("train", config.run.seed)
        rollout = config.rollout
        self._sampling = SamplingParams(
            rollout.temperature, rollout.top_p, rollout.top_k, rollout.max_tokens, tuple(rollout.stop)
        )
        self.bias = SelectionBias()
        self.batches: asyncio.Queue[OpenedBatch] = asyncio.Queue()
        self.next_group_id = 0
        self._places: dict[int, _Place] = {}
        self._resumed: list[_Place] = []
        self._begun_at: Position | None = None
        self._durations = GroupDurations()
        self.before_filters = RewardsBeforeFilters(config.algorithm)
        self._failed_groups = 0
        self._some_worked = False
        self._rollouts: asyncio.TaskGroup | None = None

    async def run(self) -> None:
        """Open batches and start their groups, for ever."""
        async with asyncio.TaskGroup() as self._rollouts:
            while True:
                await self._changes.until(self._coordinator.may_open_batch)
                places = self._next_places()
                self._coordinator.open_batch()
                self.batches.put_nowait(OpenedBatch(len(places), places[0].draw.position[0]))
                for place in places:
                    await self._changes.until(self._coordinator.may_start)
                    self._start(place)

    def refill(self, count: int) -> None:
        """Start so many groups in place of groups that were thrown away."""
        for _ in range(count):
            self._start(self._new_place(self._sampler.next()))

    def trained(self, groups: Iterable[FinishedGroup]) -> None:
        """These groups are done with."""
        for group in groups:
            self._places.pop(group.group_id, None)

    def learned(self, groups: Iterable[FinishedGroup]) -> None:
        """A version ends with these groups trained: from here on the curriculum draws by how all its groups went."""
        if isinstance(self._sampler, CurriculumSampler):
            self.observe(groups)
            self._sampler.curriculum.count(self._coordinator.version)

    def observe(self, groups: Iterable[FinishedGroup]) -> None:
        """Tell the curriculum how groups went."""
        for group in groups if isinstance(self._sampler, CurriculumSampler) else ():
            assert isinstance(self._sampler, CurriculumSampler)
            place = self._places.get(group.group_id)
            position = self._journal.position_of(group.group_id) if place is None else place.draw.position
            draw = self._sampler.draw_at(position)
            self._sampler.observe(self._coordinator.version, group.group_id, draw, group.episodes)

    def recall_outcomes(self, state: dict[str, Any] | None, groups: Iterable[int]) -> None:
        """The curriculum as a checkpoint has it, and how those of `groups` went that were dropped since."""
        if not isinstance(self._sampler, CurriculumSampler):
            return
        if state is not None:
            self._sampler.curriculum.restore(state)
        for version, group in self._journal.filtered_among(groups):
            episodes = self._journal.episodes_of(group.group_id)
            self._sampler.observe(version, group.group_id, self._sampler.draw_at(group.position), episodes)

    def unfinished(self) -> Unfinished:
        """What a resumed run has to roll out again."""
        return [(place.group_id, place.draw.position) for place in self._places.values()]

    def resume(self, unfinished: Iterable[tuple[int, Position]]) -> None:
        """Roll these out first, under the ids (and so the seeds) that they had. The ledger does not know them."""
        for group_id, position in unfinished:
            place = _Place(self._sampler.draw_at(position), group_id)
            self._take_up(place)
            self._record(place)

    def take_up(self, unfinished: Iterable[UnfinishedGroup], begun_at: Position | None) -> None:
        """Go on with these first, from where the ledger says that they were.

        `begun_at` is where their batch begins: of those that were dropped nothing but their places is left. Where
        generation runs ahead, batches are only so many groups.
        """
        self._begun_at = None if self._config.trainer.max_staleness else begun_at
        for found in unfinished:
            group = found.group
            settled = group.state == GroupState.WHOLE
            draw = self._sampler.draw_at(group.position)
            _require_same_task(draw, group)
            since = group.version if found.episodes or found.running else None
            self._take_up(_Place(draw, group.group_id, found.episodes, counted=True, settled=settled, since=since))
        self._resumed.sort(key=lambda place: place.group_id)

    def _take_up(self, place: _Place) -> None:
        self._resumed.append(place)
        self._places[place.group_id] = place

    def durations(self) -> MetricsAggregator:
        """How long the groups took that became whole since this was last asked."""
        return self._durations.metrics(self._coordinator.version)

    def _next_places(self) -> list[_Place]:
        # where generation runs ahead, a step trains what is whole, of whatever batch: a short one would be a debt
        may_be_short = not self._config.trainer.max_staleness or self._config.data.drop_last
        begun_at, self._begun_at = self._begun_at, None
        if begun_at is None and self._resumed:
            begun_at = self._resumed[0].draw.position
        if begun_at is None and may_be_short:
            return [self._new_place(draw) for draw in self._sampler.next_batch()]
        size = self._sampler.size_at(begun_at) if begun_at and may_be_short else self._config.fresh_groups
        places, self._resumed = self._resumed[:size], self._resumed[size:]
        return places + [self._new_place(self._sampler.next()) for _ in range(size - len(places))]

    def _new_place(self, draw: Draw) -> _Place:
        place = _Place(draw, self._new_group_id())
        self._places[place.group_id] = place
        self._record(place)
        return place

    def _record(self, place: _Place) -> None:
        size = self._config.rollout.group_size
        self._journal.drawn(place.group_id, place.draw, size, self._coordinator.version)

    def _new_group_id(self) -> int:
        self.next_group_id += 1
        return self.next_group_id - 1

    def _start(self, place: _Place) -> None:
        assert self._rollouts is not None
        self._admitted(place)
        self._rollouts.create_task(self._fill(place))

    def _admitted(self, place: _Place) -> None:
        episodes = 0 if place.counted else self._config.rollout.group_size
        self._coordinator.started(place.group_id, episodes, place.since)
        self.bias.submitted(place.draw.task.source)

    async def _fill(self, place: _Place) -> None:
        """Roll the place's task out; if its group is dropped, roll out another in its place."""
        most = self._config.filters.most_replacements
        for replaced in range(most):
            finished = await self._roll_out(place)
            if finished.dropped_because is None:
                return
            if replaced == most - 1:
                raise _nothing_to_train(finished, most)
            del self._places[place.group_id]
            place = self._new_place(self._sampler.next())
            self._admitted(place)

    async def _roll_out(self, place: _Place) -> FinishedGroup:
        size, started = self._config.rollout.group_size, time.perf_counter()
        whole: list[FinishedGroup] = []

        def keep(episode: Episode) -> None:
            finished = self._buffer.add_episode(episode, size)
            if finished is not None:  # told at once: from now on the learner may take it
                self._settle(finished, time.perf_counter() - started, place.settled)
                whole.append(finished)

        await self._manager.roll_out_group(
            place.draw.task, place.group_id, size, self._seed, self._sampling, keep, place.known
        )
        (finished,) = whole
        self._stop_if_nothing_ever_worked(finished)
        return finished

    def _settle(self, finished: FinishedGroup, duration_s: float, settled: bool) -> None:
        self._durations.add(duration_s, finished)
        self.before_filters.add(finished)
        self.bias.finished(finished, duration_s)
        if not settled:
            self._coordinator.settled(failed=finished.failed, filtered=finished.filtered)
            self._journal.whole(finished, self._coordinator.version)
        if finished.dropped_because is None:
            self._coordinator.became_whole(finished.group_id, finished.oldest_version)
        else:
            self.observe([finished])
            self._coordinator.gone(finished.group_id)
        self._changes.notify()

    def _stop_if_nothing_ever_worked(self, finished: FinishedGroup) -> None:
        """A workflow that fails from the start is told after one batch, not after a hundred replacements."""
        self._some_worked |= finished.failed < len(finished.episodes)
        self._failed_groups += finished.failed == len(finished.episodes)
        failed_episodes = self._failed_groups * self._config.rollout.group_size
        enough = self._failed_groups >= self._config.trainer.batch_size and failed_episodes >= _FAILURES
        if enough and not self._some_worked:
            raise _nothing_to_train(finished, self._failed_groups)


def _require_same_task(draw: Draw, group: GroupRecord) -> None:
    if stored_text(draw.task.id) != group.task_id:
        raise DataError(
            f'the run was interrupted while it rolled out task "{group.task_id}", and in its place the tasks now have '
            f'"{draw.task.id}"; a run that goes on must have the tasks that it was begun with'
        )


def _nothing_to_train(finished: FinishedGroup, dropped: int) -> DataError:
    errors = [episode.error for episode in finished.episodes if episode.error]
    return DataError(
        f"{dropped} groups in a row were dropped, the last because of: {finished.dropped_because}; "
        + (
            f"its last error: {errors[-1]} (log.txt in the run folder names the line of your code)"
            if errors
            else "use tasks that the model sometimes solves, or no filter"
        )
    )
