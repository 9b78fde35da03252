"""TrajectoryGroupBuffer: holds finished episodes until a group is whole, filters, hands out groups."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass

from headrace.config import FilterSection
from headrace.data.episode import Episode, Trajectory, TrajectoryGroup


@dataclass(frozen=True, slots=True)
class FinishedGroup:
    """All episodes of one dispatched task, and what of them is to be trained."""

    group_id: int
    episodes: tuple[Episode, ...]
    groups: tuple[TrajectoryGroup, ...]
    dropped_because: str | None = None

    @property
    def failed(self) -> int:
        """Episodes that failed."""
        return sum(episode.failed for episode in self.episodes)


class TrajectoryGroupBuffer:
    """Finished groups in the order of their dispatch."""

    def __init__(self, filters: FilterSection) -> None:
        self._filters = filters
        self._ready: dict[int, FinishedGroup] = {}
        self._arrived = asyncio.Event()

    def add(self, group_id: int, episodes: Iterable[Episode]) -> FinishedGroup:
        """Form the groups of one task's episodes; a dropped one is not kept, and says why."""
        episodes = tuple(episodes)
        groups = form_groups([episode for episode in episodes if not episode.failed])
        finished = FinishedGroup(group_id, episodes, groups, self._reason_to_drop(groups))
        if finished.dropped_because is None:
            self._ready[group_id] = finished
            self._arrived.set()
        return finished

    async def take(self, count: int) -> list[FinishedGroup]:
        """Wait for `count` groups; oldest dispatch first."""
        while len(self._ready) < count:
            self._arrived.clear()
            await self._arrived.wait()
        return [self._ready.pop(group_id) for group_id in sorted(self._ready)[:count]]

    def _reason_to_drop(self, groups: tuple[TrajectoryGroup, ...]) -> str | None:
        if not groups:
            return "every episode failed"
        if self._filters.drop_uniform and all(len(set(group.rewards())) == 1 for group in groups):
            return "uniform rewards"
        return None


def form_groups(episodes: Iterable[Episode]) -> tuple[TrajectoryGroup, ...]:
    """Trajectories of one task, grouped by role."""
    members: dict[str, list[Trajectory]] = {}
    first: Episode | None = None
    for episode in episodes:
        first = first or episode
        for trajectory in episode.trajectories:
            members.setdefault(trajectory.name, []).append(trajectory)
    if first is None:
        return ()
    return tuple(
        TrajectoryGroup(first.task_id, name, tuple(trajectories), first.group_id, first.source)
        for name, trajectories in members.items()
    )
