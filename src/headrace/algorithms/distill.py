"""Distillation: the teacher's log-probabilities become advantages of the tokens that the student sampled."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from headrace.algorithms.advantages.estimators import GroupRewards
from headrace.config import AlgorithmSection, DistillSection
from headrace.data.episode import Step, TrajectoryGroup
from headrace.errors import DataError
from headrace.registry import facts


def from_teacher(groups: Sequence[GroupRewards], algorithm: AlgorithmSection) -> list[list[float]]:
    """coef (log teacher - log student) on the sampled tokens; needs no reward."""
    raise AssertionError("distilled groups get their advantages from the teacher, token by token")


def is_distilled(group: TrajectoryGroup, algorithm: AlgorithmSection) -> bool:
    """Whether the group's role is distilled, or a workflow gave its Steps a teacher's prompt."""
    return facts("estimator", algorithm.for_role(group.name).estimator).needs_teacher or any(
        step.teacher_messages is not None for trajectory in group.trajectories for step in trajectory.steps
    )


def distilled_advantages(
    teacher: Sequence[float], student: Sequence[float], section: DistillSection
) -> tuple[float, ...]:
    """coef (log teacher - log student) of each token, plus the discounted ones that follow, then clipped."""
    if len(teacher) != len(student):
        raise DataError(f"the teacher scored {len(teacher)} tokens, but the student sampled {len(student)}")
    unscored = [index for index, value in enumerate(teacher) if not math.isfinite(value)]
    if unscored:
        index = unscored[0]
        raise DataError(
            f"the teacher gave {len(unscored)} of {len(teacher)} tokens no finite log-probability: "
            f"token {index} has {teacher[index]}; use a teacher that knows all of the student's tokens"
        )
    total, found = 0.0, []
    for theirs, ours in zip(reversed(teacher), reversed(student), strict=True):
        total = section.coef * (theirs - ours) + section.discount * total
        found.append(total)
    if section.clip is not None:
        found = [max(-section.clip, min(section.clip, value)) for value in found]
    return tuple(reversed(found))


def with_teacher(
    group: TrajectoryGroup, scores: Mapping[int, Sequence[float]], section: DistillSection
) -> TrajectoryGroup:
    """The group with advantages from the teacher's scores, by the `id` of their Step."""

    def taught(step: Step) -> Step:
        if step.logprobs is None:
            raise DataError(f'task "{group.task_id}": a distilled Step needs the log-probabilities it was sampled with')
        return replace(step, advantage=distilled_advantages(scores[id(step)], step.logprobs, section))

    return replace(
        group,
        trajectories=tuple(replace(t, steps=tuple(taught(step) for step in t.steps)) for t in group.trajectories),
    )
