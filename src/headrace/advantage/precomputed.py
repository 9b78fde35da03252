"""Advantages that a workflow computed itself and wrote into its Steps.

There is no list of the wrong length, and no scalar, to look for here: a Step refuses both when it is built (also from
JSON and by `replace`), so they fail the episode of the workflow that tried, with an error that says so.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from headrace.data.episode import Step, TrajectoryGroup


def use_precomputed(groups: Sequence[TrajectoryGroup]) -> dict[int, TrajectoryGroup]:
    """The groups, by their place, in which some Step has advantages: those are kept, Steps without any get zeros.

    A group in which no Step has any is not among them: it is for the estimator.
    """
    own = {place: group for place, group in enumerate(groups) if any(step.advantage for step in _steps([group]))}
    steps = list(_steps(own.values()))
    # a Step without response tokens lacks nothing
    missing = sum(bool(step.response_ids) and step.advantage is None for step in steps)
    if missing:
        warnings.warn(
            f"{missing} of {len(steps)} Steps have no advantage, though others of their group have: they get zeros; "
            f"set Step.advantage on all Steps of a group or on none",
            stacklevel=3,
        )
    return {place: _with_zeros(group) for place, group in own.items()}


def warn_of_overwriting(groups: Sequence[TrajectoryGroup]) -> None:
    """Say how many Steps bring advantages that the estimator's will replace."""
    overwritten = sum(bool(step.advantage) for step in _steps(groups))
    if overwritten:
        warnings.warn(
            f"the advantages of {overwritten} Steps, set by the workflow, are overwritten by the estimator; "
            f"turn algorithm.use_precomputed_advantage on to train with them",
            stacklevel=3,
        )


def _steps(groups: Iterable[TrajectoryGroup]) -> Iterator[Step]:
    return (step for group in groups for trajectory in group.trajectories for step in trajectory.steps)


def _with_zeros(group: TrajectoryGroup) -> TrajectoryGroup:
    trajectories = tuple(replace(t, steps=tuple(map(_or_zeros, t.steps))) for t in group.trajectories)
    return replace(group, trajectories=trajectories)


def _or_zeros(step: Step) -> Step:
    return step if step.advantage is not None else replace(step, advantage=(0.0,) * len(step.response_ids))
