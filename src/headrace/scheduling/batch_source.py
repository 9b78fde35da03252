"""BatchSource: the groups of each step. Waits for complete groups and takes them from the buffer."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable

from headrace.algorithms.filters import is_uniform
from headrace.config import AgentLoopConfig
from headrace.errors import DataError
from headrace.scheduling.buffer import FinishedGroup, TrajectoryGroupBuffer
from headrace.scheduling.coordinator import SyncCoordinator
from headrace.scheduling.lifecycle import GroupLifecycle
from headrace.scheduling.producer import OpenedBatch, Producer
from headrace.scheduling.selection import Selection


class BatchSource:
    """Between buffer and learner; the only consumer of the producer's batches."""

    def __init__(
        self,
        config: AgentLoopConfig,
        coordinator: SyncCoordinator,
        buffer: TrajectoryGroupBuffer,
        lifecycle: GroupLifecycle,
        producer: Producer,
        streams: bool,
        stopping: Callable[[], bool],
        report: Callable[[str], None],
    ) -> None:
        """When the run is `stopping`, a step trains the groups that it has."""
        self._config = config
        self._coordinator = coordinator
        self._buffer = buffer
        self._lifecycle = lifecycle
        self._producer = producer
        self._selection = Selection(coordinator, buffer, streams, in_order=config.run.deterministic)
        self._stopping = stopping
        self._report = report
        self._taken_ahead = 0  # groups that steps took of batches that are still queued

    async def next_batch(self) -> OpenedBatch:
        """The next batch that was opened."""
        return await self._producer.batches.get()

    async def gather(
        self, size: int, step: int
    ) -> AsyncGenerator[tuple[list[FinishedGroup], list[FinishedGroup]], None]:
        """The groups of a step, in one or several pieces; the last piece comes with the groups to reuse.

        If there are too few groups to reuse, the step takes more new ones: a batch is always full.
        """
        taken, last, streams = 0, False, self._selection.streams
        size += self._extra_groups(size)
        while not last:
            some = await self._take(size - taken, step)
            taken += len(some)
            last = self._selection.has_enough(size - taken)
            assert last or streams, "a step that does not stream has one piece"
            if not streams:
                some = await self._with_partly_solved(some, step)
                taken = len(some)
            again = self._config.trainer.batch_size - taken if last else 0
            yield some, self._buffer.take_used(again, self._selection.is_too_old)

    def _extra_groups(self, size: int) -> int:
        """New groups that the step needs in addition to its batch, because too few can be reused."""
        if self._config.produce.reuse == 1:
            return 0
        queue, fresh = self._producer.batches, self._config.fresh_groups
        while self._taken_ahead >= fresh and not queue.empty():  # batches that earlier steps trained
            self._taken_ahead -= queue.get_nowait().size
        extra = max(self._config.trainer.batch_size - size - self._buffer.usable(self._selection.is_too_old), 0)
        self._taken_ahead += extra
        self._coordinator.enlarge(extra)
        self._lifecycle.changes.notify()
        return extra

    async def _take(self, wanted: int, step: int) -> list[FinishedGroup]:
        """Wait for groups that the step may take, and take them.

        Empty if the step has enough and waited only for due groups that turned out to be young enough to wait.
        """
        while True:
            self._producer.replace_stale(step)
            count, first = self._selection.takeable(wanted)
            if count > 0 or self._selection.has_enough(wanted):
                return self._lifecycle.taken(count, first)
            await self._lifecycle.changes.next()

    async def _with_partly_solved(self, finished: list[FinishedGroup], step: int) -> list[FinishedGroup]:
        """Add batches until enough tasks are partly solved (`filters.min_partial_tasks`)."""
        wanted = self._config.filters.min_partial_tasks
        for added in range(self._config.filters.most_replacements):
            partial = sum(any(not is_uniform(g) for g in item.groups if g.has_rewards) for item in finished)
            if partial >= wanted or self._stopping():
                return finished
            self._report(f"{partial} of {wanted} partly solved tasks; adding batch {added + 2}")
            self._coordinator.skipped()
            self._lifecycle.changes.notify()
            finished += await self._take((await self.next_batch()).size, step)
        raise DataError(
            f"filters.min_partial_tasks wants {wanted} partly solved tasks, and {len(finished)} tasks in "
            f"{self._config.filters.most_replacements} batches were not enough; use tasks that are sometimes solved"
        )
