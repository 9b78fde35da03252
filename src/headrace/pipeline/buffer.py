"""TrajectoryGroupBuffer: holds finished episodes until a group is whole, filters, hands out groups."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from headrace.advantage.assign import trained_roles
from headrace.advantage.filters import drop_by_termination, drop_too_few, impute_names, reason_to_drop
from headrace.config import RunConfig
from headrace.data.episode import Episode, Trajectory, TrajectoryGroup
from headrace.errors import WorkflowError


@dataclass(frozen=True, slots=True)
class FinishedGroup:
    """All episodes of one dispatched task, and what of them is to be trained."""

    group_id: int
    episodes: tuple[Episode, ...]
    groups: tuple[TrajectoryGroup, ...]
    kept: int
    """Episodes that are to be trained; 0 if the group was dropped."""
    dropped_because: str | None = None

    @property
    def failed(self) -> int:
        """Episodes that failed."""
        return sum(episode.failed for episode in self.episodes)

    @property
    def filtered(self) -> int:
        """Episodes that neither failed nor are trained."""
        return len(self.episodes) - self.failed - self.kept


Grouping = Callable[[Sequence[Episode]], Sequence[TrajectoryGroup]]
"""Which trajectories of one task's finished episodes are compared with each other."""


class TrajectoryGroupBuffer:
    """Finished groups in the order of their dispatch."""

    def __init__(self, config: RunConfig, grouping: Grouping | None = None) -> None:
        self._filters = config.filters
        self._algorithm = config.algorithm
        self._grouping = grouping
        self._hook_name = config.workflow.grouping or getattr(grouping, "__name__", repr(grouping))
        self._ready: dict[int, FinishedGroup] = {}
        self._arrived = asyncio.Event()

    def add(self, group_id: int, episodes: Iterable[Episode]) -> FinishedGroup:
        """Form the groups of one task's episodes; a dropped one is not kept, and says why."""
        episodes = tuple(episodes)
        sound = [episode for episode in episodes if not episode.failed]
        kept = drop_by_termination(sound, self._filters.drop_terminations)
        groups = trained_roles(self._form(kept), self._algorithm) if kept else []
        reason = reason_to_drop(groups, self._filters)
        if sound and not kept:
            reason = f"every episode ended by {', '.join(sorted({episode.termination for episode in sound}))}"
        elif kept and not groups:
            reason = "no trajectory of a trained role"
        enough = drop_too_few(groups, self._filters.min_trajectories)
        finished = FinishedGroup(group_id, episodes, enough, len(kept) if reason is None else 0, reason)
        if reason is None:
            self._ready[group_id] = finished
            self._arrived.set()
        return finished

    def _form(self, episodes: Sequence[Episode]) -> Sequence[TrajectoryGroup]:
        """Groups by role, or as the user's hook says. Its failure is no episode's fault: the run ends with it."""
        if self._grouping is None:
            return form_groups(episodes)
        doing = f'the grouping hook "{self._hook_name}" failed on task "{episodes[0].task_id}"'
        try:
            groups = list(self._grouping(episodes))
        except Exception as cause:  # ours too: only the hook's name says where to look
            raise WorkflowError(f"{doing}: {type(cause).__name__}: {cause}") from cause
        wrong = [type(group).__name__ for group in groups if not isinstance(group, TrajectoryGroup)]
        if wrong:
            raise WorkflowError(f"{doing}: it must return TrajectoryGroups, got {wrong[0]}")
        return groups

    async def take(self, count: int) -> list[FinishedGroup]:
        """Wait for `count` groups; oldest dispatch first."""
        while len(self._ready) < count:
            self._arrived.clear()
            await self._arrived.wait()
        return [self._ready.pop(group_id) for group_id in sorted(self._ready)[:count]]


def form_groups(episodes: Sequence[Episode]) -> tuple[TrajectoryGroup, ...]:
    """Trajectories of one task, grouped by role."""
    members: dict[str, list[Trajectory]] = {}
    for episode in episodes:
        for trajectory in impute_names(episode.trajectories):
            members.setdefault(trajectory.name, []).append(trajectory)
    return tuple(
        TrajectoryGroup(episodes[0].task_id, name, tuple(trajectories), episodes[0].group_id, episodes[0].source)
        for name, trajectories in members.items()
    )


def group_by_step(episodes: Sequence[Episode]) -> list[TrajectoryGroup]:
    """A grouping hook: the n-th Steps of a role are compared with each other, each by its own reward."""
    members: dict[tuple[str, int], list[Trajectory]] = {}
    for episode in episodes:
        for trajectory in impute_names(episode.trajectories):
            for place, step in enumerate(trajectory.steps):
                reward = step.reward if step.reward is not None else trajectory.reward
                alone = Trajectory((step,), trajectory.name, reward)
                members.setdefault((trajectory.name, place), []).append(alone)
    first = episodes[0]
    return [
        TrajectoryGroup(first.task_id, name, tuple(trajectories), first.group_id, first.source)
        for (name, _), trajectories in members.items()
    ]
