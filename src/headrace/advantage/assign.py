"""The one place where groups get their advantages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from headrace.config import AlgorithmSection
from headrace.data.episode import Trajectory, TrajectoryGroup
from headrace.registry import resolve


def assign_advantages(groups: Sequence[TrajectoryGroup], algorithm: AlgorithmSection) -> list[TrajectoryGroup]:
    """The groups of a whole training batch with an advantage on every response token."""
    estimator = resolve("estimator", algorithm.estimator)
    advantages = estimator([group.rewards() for group in groups], algorithm)
    return [
        replace(
            group,
            trajectories=tuple(
                _with_advantage(trajectory, scalar)
                for trajectory, scalar in zip(group.trajectories, scalars, strict=True)
            ),
        )
        for group, scalars in zip(groups, advantages, strict=True)
    ]


def _with_advantage(trajectory: Trajectory, scalar: float) -> Trajectory:
    steps = tuple(replace(step, advantage=(scalar,) * len(step.response_ids)) for step in trajectory.steps)
    return replace(trajectory, steps=steps)
