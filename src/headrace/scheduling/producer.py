"""Producer: starts rollouts when the coordinator admits them, and drives them until their groups are complete."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from headrace.config import AgentLoopConfig
from headrace.data.episode import Episode
from headrace.data.sampler import Draw, Position, TaskSampler
from headrace.data.seeds import derive_seed
from headrace.errors import DataError
from headrace.ledger.columns import stored_text
from headrace.ledger.records import GroupRecord, GroupState, UnfinishedGroup
from headrace.rollout.agent_loop import AgentLoop, sampling_of
from headrace.scheduling.buffer import FinishedGroup
from headrace.scheduling.coordinator import SyncCoordinator
from headrace.scheduling.lifecycle import GroupLifecycle, LiveGroup

_FAILURES = 8  # episodes; fewer failures in a row may be chance


@dataclass(frozen=True, slots=True)
class OpenedBatch:
    """The number of groups for a step, and the epoch they were drawn from."""

    size: int
    epoch: int


class Producer:
    """Consumes tasks, waits for admission, produces complete groups. Replaces a dropped group by another task's."""

    def __init__(
        self,
        config: AgentLoopConfig,
        sampler: TaskSampler,
        loop: AgentLoop,
        coordinator: SyncCoordinator,
        lifecycle: GroupLifecycle,
        resumed: Sequence[LiveGroup] = (),
        begun_at: Position | None = None,
    ) -> None:
        """`resumed` are groups that an earlier process drew; they start first. `begun_at` is the position of their
        batch's first task: dropped groups of that batch are not in `resumed`. In asynchronous training it is not used,
        because a batch is just a number of groups."""
        self._config = config
        self._sampler = sampler
        self._loop = loop
        self._coordinator = coordinator
        self._lifecycle = lifecycle
        self._seed = derive_seed("train", config.run.seed)
        self._sampling = sampling_of(config.rollout)
        self.batches: asyncio.Queue[OpenedBatch] = asyncio.Queue()
        self._resumed = sorted(resumed, key=lambda group: group.group_id)
        self._begun_at = None if config.trainer.max_staleness else begun_at
        self._failed_groups = 0
        self._some_worked = False
        self._rollouts: asyncio.TaskGroup | None = None

    async def run(self) -> None:
        """Open batches and start their groups, until cancelled."""
        async with asyncio.TaskGroup() as self._rollouts:
            while True:
                await self._lifecycle.changes.until(self._coordinator.may_open_batch)
                groups = self._next_groups()
                self._coordinator.open_batch()
                self.batches.put_nowait(OpenedBatch(len(groups), groups[0].draw.position[0]))
                for group in groups:
                    await self._lifecycle.changes.until(self._coordinator.may_start)
                    self._start(group)

    def replace_stale(self, step: int) -> None:
        """Drop groups that have become stale, and start others instead."""
        for _ in range(self._lifecycle.drop_stale(step)):
            self._start(self._lifecycle.drawn(self._sampler.next()))

    def _next_groups(self) -> list[LiveGroup]:
        # in asynchronous training a step takes groups of any batch, so a short batch would leave later steps short
        may_be_short = not self._config.trainer.max_staleness or self._config.data.drop_last
        begun_at, self._begun_at = self._begun_at, None
        if begun_at is None and self._resumed:
            begun_at = self._resumed[0].draw.position
        if begun_at is None and may_be_short:
            return [self._lifecycle.drawn(draw) for draw in self._sampler.next_batch()]
        size = self._sampler.size_at(begun_at) if begun_at and may_be_short else self._config.fresh_groups
        groups, self._resumed = self._resumed[:size], self._resumed[size:]
        return groups + [self._lifecycle.drawn(self._sampler.next()) for _ in range(size - len(groups))]

    def _start(self, group: LiveGroup) -> None:
        assert self._rollouts is not None
        self._lifecycle.started(group)
        self._rollouts.create_task(self._fill(group))

    async def _fill(self, group: LiveGroup) -> None:
        """Run the group; if it is dropped, run another task's in its slot."""
        most = self._config.filters.most_replacements
        for replaced in range(most):
            finished = await self._roll_out(group)
            if finished.dropped_because is None:
                return
            if replaced == most - 1:
                raise _nothing_to_train(finished, most)
            group = self._lifecycle.drawn(self._sampler.next())
            self._lifecycle.started(group)

    async def _roll_out(self, group: LiveGroup) -> FinishedGroup:
        complete: list[FinishedGroup] = []

        def keep(episode: Episode) -> None:
            finished = self._lifecycle.episode_finished(group, episode)
            if finished is not None:
                complete.append(finished)

        size = self._config.rollout.group_size
        await self._loop.roll_out_group(
            group.draw.task, group.group_id, size, self._seed, self._sampling, keep, group.known
        )
        (finished,) = complete
        self._stop_if_nothing_ever_worked(finished)
        return finished

    def _stop_if_nothing_ever_worked(self, finished: FinishedGroup) -> None:
        """End the run after one batch if the workflow has never succeeded, not after a hundred replacements."""
        self._some_worked |= finished.failed < len(finished.episodes)
        self._failed_groups += finished.failed == len(finished.episodes)
        failed_episodes = self._failed_groups * self._config.rollout.group_size
        enough = self._failed_groups >= self._config.trainer.batch_size and failed_episodes >= _FAILURES
        if enough and not self._some_worked:
            raise _nothing_to_train(finished, self._failed_groups)


def resume_groups(
    lifecycle: GroupLifecycle,
    sampler: TaskSampler,
    by_ledger: Iterable[UnfinishedGroup],
    by_checkpoint: Iterable[tuple[int, Position]] = (),
) -> list[LiveGroup]:
    """Groups that an earlier process drew and did not finish, with the episodes that the ledger has.

    Groups that only the checkpoint has start again from their draw.
    """
    resumed: list[LiveGroup] = []
    for group_id, position in by_checkpoint:
        group = LiveGroup(group_id, sampler.draw_at(position))
        lifecycle.restored(group, recorded=False)
        resumed.append(group)
    for found in by_ledger:
        record = found.group
        draw = sampler.draw_at(record.position)
        _require_same_task(draw, record)
        since = record.version if found.episodes or found.running else None
        settled = record.state == GroupState.COMPLETE
        group = LiveGroup(record.group_id, draw, found.episodes, counted=True, settled=settled, since=since)
        lifecycle.restored(group, recorded=True)
        resumed.append(group)
    return resumed


def _require_same_task(draw: Draw, group: GroupRecord) -> None:
    if stored_text(draw.task.id) != group.task_id:
        raise DataError(
            f'the run was interrupted while it rolled out task "{group.task_id}", and at its position the tasks now '
            f'have "{draw.task.id}"; resume a run with the tasks that it was started with'
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
