"""What of the finished episodes is trained: pure functions, used by the buffer."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from itertools import count

from headrace.config import FilterSection
from headrace.data.episode import Episode, Trajectory, TrajectoryGroup

UNNAMED = "agent"
UNIFORM = "uniform rewards"


def drop_by_termination(episodes: Iterable[Episode], reasons: Collection[str]) -> list[Episode]:
    """The episodes that ended for none of these reasons."""
    return [episode for episode in episodes if episode.termination not in reasons]


def impute_names(trajectories: Sequence[Trajectory]) -> tuple[Trajectory, ...]:
    """The trajectories of one episode, those without a name called "agent", "agent_1", ... in order.

    So the first unnamed one is compared with the first of the other rollouts, the second with the second. Names that
    the episode uses already are passed over, or different roles would be compared.
    """
    taken = {trajectory.name for trajectory in trajectories}
    candidates = (f"{UNNAMED}_{number}" if number else UNNAMED for number in count())
    free = (name for name in candidates if name not in taken)
    return tuple(trajectory if trajectory.name else replace(trajectory, name=next(free)) for trajectory in trajectories)


def is_uniform(group: TrajectoryGroup) -> bool:
    """Whether all rewards of the group are equal, so that comparing them teaches nothing; a group of one is."""
    return len(set(group.rewards())) <= 1


def too_few(group: TrajectoryGroup, minimum: int) -> bool:
    """Whether fewer than `minimum` trajectories are left in the group."""
    return len(group.trajectories) < minimum


def drop_too_few(groups: Iterable[TrajectoryGroup], minimum: int) -> tuple[TrajectoryGroup, ...]:
    """The groups with enough trajectories."""
    return tuple(group for group in groups if not too_few(group, minimum))


def reason_to_drop(groups: Sequence[TrajectoryGroup], filters: FilterSection) -> str | None:
    """Why nothing of one task's groups (one per role) is worth training; None if something is."""
    if not groups:
        return "every episode failed"
    enough = drop_too_few(groups, filters.min_trajectories)
    if not enough:
        return f"fewer than {filters.min_trajectories} trajectories"
    if filters.drop_uniform and all(group.has_rewards and is_uniform(group) for group in enough):
        return UNIFORM
    return None
