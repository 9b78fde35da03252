"""Advantages that a workflow computed itself and wrote into its Steps. A scalar is refused when the Step is built."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from headrace.data.episode import Step, TrajectoryGroup


def brings_advantages(group: TrajectoryGroup) -> bool:
    """Whether a workflow wrote a list of advantages into some Step of the group, be it of the wrong length."""
    return any(_has_list(step) for step in _steps([group]))


def use_precomputed(groups: Sequence[TrajectoryGroup]) -> dict[int, TrajectoryGroup]:
    """By index, the groups with advantages of the workflow. Steps with a list that fits keep it, the others get zeros.

    A group in which no Step has any is left to the estimator.
    """
    own = {index: group for index, group in enumerate(groups) if brings_advantages(group)}
    steps = list(_steps(own.values()))
    # a Step without response tokens needs none
    missing = sum(bool(step.response_ids) and step.advantage is None for step in steps)
    misfits = sum(step.advantage is not None and not _fits(step) for step in steps)
    if missing or misfits:
        warnings.warn(
            f"{missing + misfits} of {len(steps)} Steps get zeros as advantages: {missing} have none, though others of "
            f"their group have, and {misfits} have a list of the wrong length; give every Step of such a group one "
            f"number per response token",
            stacklevel=3,
        )
    return {index: _with_zeros(group) for index, group in own.items()}


def warn_of_overwriting(groups: Sequence[TrajectoryGroup]) -> None:
    """Warn how many Steps have advantages that the estimator will overwrite."""
    overwritten = sum(map(_has_list, _steps(groups)))
    if overwritten:
        warnings.warn(
            f"the advantages of {overwritten} Steps, set by the workflow, are overwritten by the estimator; "
            f"turn algorithm.use_precomputed_advantage on to train with them",
            stacklevel=3,
        )


def _steps(groups: Iterable[TrajectoryGroup]) -> Iterator[Step]:
    return (step for group in groups for trajectory in group.trajectories for step in trajectory.steps)


def _has_list(step: Step) -> bool:
    """An empty list on an empty response does not count."""
    return step.advantage is not None and bool(step.advantage or step.response_ids)


def _fits(step: Step) -> bool:
    return step.advantage is not None and len(step.advantage) == len(step.response_ids)


def _with_zeros(group: TrajectoryGroup) -> TrajectoryGroup:
    trajectories = tuple(replace(t, steps=tuple(map(_or_zeros, t.steps))) for t in group.trajectories)
    return replace(group, trajectories=trajectories)


def _or_zeros(step: Step) -> Step:
    return step if _fits(step) else replace(step, advantage=(0.0,) * len(step.response_ids))
