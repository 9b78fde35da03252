"""HandOut: what a step is made of. Waits for whole groups, and takes them from the buffer."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable

from headrace.algorithms.filters import is_uniform
from headrace.config import RunConfig
from headrace.errors import DataError
from headrace.run.journal import RunJournal
from headrace.scheduling.buffer import FinishedGroup, TrajectoryGroupBuffer
from headrace.scheduling.coordinator import SyncCoordinator
from headrace.scheduling.producer import Changes, Producer


class HandOut:
    """Between buffer and learner. Where it `streams`, groups are handed out as soon as they are whole."""

    def __init__(
        self,
        config: RunConfig,
        coordinator: SyncCoordinator,
        buffer: TrajectoryGroupBuffer,
        producer: Producer,
        changes: Changes,
        journal: RunJournal,
        streams: bool,
        tell: Callable[[str], None],
    ) -> None:
        self._config = config
        self._coordinator = coordinator
        self._buffer = buffer
        self._producer = producer
        self._changes = changes
        self._journal = journal
        self._streams = streams
        self._tell = tell
        self._beyond = 0  # groups that steps took beyond their batches, which are still queued
        self.enough = False
        """Set to be content with what is there: the run is to stop."""

    async def gather(
        self, size: int, step: int
    ) -> AsyncGenerator[tuple[list[FinishedGroup], list[FinishedGroup]], None]:
        """The groups of a step, all at once or in pieces; with the last, those that are trained once more.

        A batch that has too few to train once more takes more new ones: it is always full.
        """
        taken, last = 0, False
        size += self._lacking(size)
        while not last:
            some = await self._take(size - taken, step)
            taken += len(some)
            last = taken >= size and not self._coordinator.due()
            assert last or self._streams, "a step that does not stream is taken at once"
            if not self._streams:
                some = await self._with_partly_solved(some, step)
                taken = len(some)
            again = self._config.trainer.batch_size - taken if last else 0
            yield some, self._buffer.take_used(again, self._is_too_old)

    def _lacking(self, size: int) -> int:
        """New groups that the step needs beyond those of its batch, because too few can be trained once more."""
        if self._config.produce.reuse == 1:
            return 0
        queue, fresh = self._producer.batches, self._config.fresh_groups
        while self._beyond >= fresh and not queue.empty():  # batches that went into earlier steps
            self._beyond -= queue.get_nowait().size
        extra = max(self._config.trainer.batch_size - size - self._buffer.usable(self._is_too_old), 0)
        self._beyond += extra
        self._coordinator.enlarge(extra)
        self._changes.notify()
        return extra

    async def _take(self, wanted: int, step: int) -> list[FinishedGroup]:
        """Wait for groups that the step may take, and take them.

        None, if it has enough and waited only for due groups, which turned out to be younger than they could have been.
        """

        def is_ready() -> bool:
            return self._takeable(wanted, step)[0] > 0 or (wanted <= 0 and not self._coordinator.due())

        await self._changes.until(is_ready)
        count, first = self._takeable(wanted, step)
        some = self._buffer.take(count, first)
        for group in some:
            self._coordinator.taken(group.group_id)
        self._changes.notify()
        return some

    def _takeable(self, wanted: int, step: int) -> tuple[int, list[int]]:
        """How many whole groups the step may take now, of those it still wants (0: wait), and which of them first."""
        self._drop_stale(step)
        due = self._coordinator.due()
        late = sum(group_id not in self._buffer for group_id in due)
        if not self._streams:
            enough = max(wanted, len(due))
            return (enough if not late and len(self._buffer) >= enough else 0), due
        if self._config.run.deterministic:  # in the order of dispatch, so that gradients add up in the same order
            in_order, enough = self._coordinator.whole_in_order(), max(wanted, 0)
            chosen = [*in_order[:enough], *(group_id for group_id in in_order[enough:] if group_id in due)]
            return len(chosen), chosen
        ready = len(self._buffer)
        return max(min(ready, wanted - late), min(ready, len(due) - late)), due

    def _drop_stale(self, step: int) -> None:
        """Throw away what the staleness policy will not train, and start others in their place."""
        stale = self._coordinator.stale()
        for group in self._buffer.take(len(stale), first=stale) if stale else ():
            self._coordinator.gone(group.group_id)
            self._coordinator.settled(stale=group.kept)
            self._journal.stale(group, step)
            self._producer.bias.dropped(group)
            self._producer.trained([group])
        self._producer.refill(len(stale))

    async def _with_partly_solved(self, finished: list[FinishedGroup], step: int) -> list[FinishedGroup]:
        """With more batches, until enough tasks are partly solved (`filters.min_partial_tasks`)."""
        wanted = self._config.filters.min_partial_tasks
        for added in range(self._config.filters.most_replacements):
            partial = sum(any(not is_uniform(g) for g in item.groups if g.has_rewards) for item in finished)
            if partial >= wanted or self.enough:
                return finished
            self._tell(f"{partial} of {wanted} partly solved tasks; adding batch {added + 2}")
            self._coordinator.skipped()
            self._changes.notify()
            finished += await self._take((await self._producer.batches.get()).size, step)
        raise DataError(
            f"filters.min_partial_tasks wants {wanted} partly solved tasks, and {len(finished)} tasks in "
            f"{self._config.filters.most_replacements} batches did not hold them; use tasks of middling difficulty"
        )

    def _is_too_old(self, group: FinishedGroup) -> bool:
        """Whether a group is too old to be trained once more. Policies that look at single tokens do so later."""
        policy, oldest = self._coordinator.policy, group.oldest_version
        age = self._coordinator.version - oldest if oldest is not None else 0
        return policy.is_stale(age) or (policy.waits_for_due and age > policy.max_staleness)
