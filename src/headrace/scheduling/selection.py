"""Selection: which complete groups the current step may take. No side effects: trainer and simulator share it."""

from __future__ import annotations

from headrace.scheduling.buffer import FinishedGroup, TrajectoryGroupBuffer
from headrace.scheduling.coordinator import SyncCoordinator


class Selection:
    """A step that `streams` takes groups as soon as they are complete; otherwise it takes all together."""

    def __init__(
        self, coordinator: SyncCoordinator, buffer: TrajectoryGroupBuffer, streams: bool, in_order: bool
    ) -> None:
        self.streams = streams
        self._in_order = in_order
        self._coordinator = coordinator
        self._buffer = buffer

    def takeable(self, wanted: int) -> tuple[int, list[int]]:
        """How many complete groups the step may take now, of the `wanted` ones (0: wait), and which first."""
        due = self._coordinator.due()
        late = sum(group_id not in self._buffer for group_id in due)
        ready = len(self._buffer)
        if not self.streams:
            enough = max(wanted, len(due))
            return (enough if not late and ready >= enough else 0), due
        if self._in_order:  # in dispatch order, so that gradients are summed in the same order
            in_order, enough = self._coordinator.complete_in_order(), max(wanted, 0)
            chosen = [*in_order[:enough], *(group_id for group_id in in_order[enough:] if group_id in due)]
            return len(chosen), chosen
        return max(min(ready, wanted - late), min(ready, len(due) - late)), due

    def has_enough(self, wanted: int) -> bool:
        """Whether the step needs no more groups and none is due."""
        return wanted <= 0 and not self._coordinator.due()

    def is_too_old(self, group: FinishedGroup) -> bool:
        """Whether a group is too old to be reused. Policies that mask tokens do so later."""
        policy, oldest = self._coordinator.policy, group.oldest_version
        age = self._coordinator.version - oldest if oldest is not None else 0
        return policy.is_stale(age) or (policy.waits_for_due and age > policy.max_staleness)
