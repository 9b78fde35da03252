"""Where groups get their advantages: by their estimator, or from the workflow."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from headrace.algorithms.advantages.estimators import GroupRewards
from headrace.algorithms.advantages.precomputed import use_precomputed, warn_of_overwriting
from headrace.config import AlgorithmSection
from headrace.data.codec import altered
from headrace.data.episode import NO_ROLLOUT, Trajectory, TrajectoryGroup
from headrace.errors import DataError
from headrace.registry import facts, resolve


def assign_advantages(groups: Sequence[TrajectoryGroup], algorithm: AlgorithmSection) -> list[TrajectoryGroup]:
    """The groups of a complete training batch with an advantage on every response token, without roles not trained.

    Each estimator sees all groups of the batch whose role it has. Groups that bring advantages of their own keep
    them when `use_precomputed_advantage` is on, and then need no reward.
    """
    groups = trained_roles(groups, algorithm)
    done: dict[int, TrajectoryGroup] = {}
    if algorithm.use_precomputed_advantage:
        done = use_precomputed(groups)
    else:
        warn_of_overwriting(groups)
    indices_of: dict[str, list[int]] = {}
    for index, group in enumerate(groups):
        if index not in done:
            indices_of.setdefault(algorithm.for_role(group.name).estimator, []).append(index)
    for estimator, indices in indices_of.items():
        done |= zip(indices, _estimate(estimator, [groups[index] for index in indices], algorithm), strict=True)
    return [done[index] for index in range(len(groups))]


def trained_roles(groups: Sequence[TrajectoryGroup], algorithm: AlgorithmSection) -> list[TrajectoryGroup]:
    """The groups whose role is trained."""
    return [group for group in groups if group.name not in algorithm.roles or algorithm.roles[group.name].train]


def _estimate(name: str, groups: list[TrajectoryGroup], algorithm: AlgorithmSection) -> list[TrajectoryGroup]:
    estimator = resolve("estimator", name)
    rewards = [_rewards_of(group) for group in groups]
    if facts("estimator", name).group_relative and any(group.count == 1 for group in rewards):
        _warn_of_singletons(name)
    advantages = estimator(rewards, algorithm)
    wanted = [len(group.trajectories) for group in groups]
    try:
        found = [len(scalars) for scalars in advantages]
    except TypeError:
        found = repr(advantages)[:60]
    if found != wanted:
        raise DataError(
            f'estimator "{name}" must return one list per group with one number per trajectory: '
            f"lists of lengths {wanted}, got {found}"
        )
    return [_with_advantages(group, scalars) for group, scalars in zip(groups, advantages, strict=True)]


def _rewards_of(group: TrajectoryGroup) -> GroupRewards:
    lengths = tuple(sum(len(step.response_ids) for step in t.steps) for t in group.trajectories)
    # a trajectory that does not know its rollout counts as one of its own
    rollouts = tuple(
        -1 - index if t.rollout_idx == NO_ROLLOUT else t.rollout_idx for index, t in enumerate(group.trajectories)
    )
    return GroupRewards(group.rewards(), lengths, rollouts)


def _with_advantages(group: TrajectoryGroup, scalars: Sequence[float]) -> TrajectoryGroup:
    pairs = zip(group.trajectories, scalars, strict=True)
    return replace(
        group, trajectories=tuple(_with_advantage(trajectory, float(scalar)) for trajectory, scalar in pairs)
    )


def _with_advantage(trajectory: Trajectory, scalar: float) -> Trajectory:
    steps = tuple(altered(step, advantage=(scalar,) * len(step.response_ids)) for step in trajectory.steps)
    return altered(trajectory, steps=steps)


@cache  # once per process and estimator
def _warn_of_singletons(name: str) -> None:
    warnings.warn(
        f'a group of one rollout has advantage 0 under estimator "{name}", which compares within groups; '
        f'raise rollout.group_size, drop such groups with filters.min_trajectories = 2, or use estimator "reinforce"',
        stacklevel=4,
    )
