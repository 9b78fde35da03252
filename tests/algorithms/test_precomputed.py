"""Advantages that a workflow wrote into its Steps: used, completed, or overwritten, and never silently."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from fakes import step
from headrace.algorithms.advantages.assign import assign_advantages
from headrace.config import AlgorithmSection, RoleSection
from headrace.data.episode import Step, Trajectory, TrajectoryGroup
from headrace.errors import DataError

ON = AlgorithmSection(use_precomputed_advantage=True, normalize_by_std=False)
OFF = AlgorithmSection(normalize_by_std=False)
Lists = Sequence[tuple[float, ...] | None]


def group(*members: Lists, rewards: Sequence[float | None] = (1.0, 0.0), role: str = "agent") -> TrajectoryGroup:
    """One trajectory per member, whose Steps have these advantages on two response tokens each."""
    trajectories = [
        Trajectory(tuple(step([1], [2, 3], advantage=values) for values in member), role, reward)
        for member, reward in zip(members, rewards, strict=True)
    ]
    return TrajectoryGroup("t", role, tuple(trajectories))


def advantages(groups: Sequence[TrajectoryGroup]) -> list[list[list[Any]]]:
    return [[[step.advantage for step in t.steps] for t in group.trajectories] for group in groups]


def assign(groups: Sequence[TrajectoryGroup], algorithm: AlgorithmSection) -> tuple[list[Any], list[str]]:
    """The advantages after assigning, and what was warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assigned = assign_advantages(groups, algorithm)
    return advantages(assigned), [str(warning.message) for warning in caught]


OWN = group([(0.5, -0.25)], [(7.0, 0.0), (1.0, 2.0)])
NONE = group([None], [None, None])
PARTLY = group([(0.5, -0.25), None], [None])
ESTIMATED = [[(0.5, 0.5)], [(-0.5, -0.5), (-0.5, -0.5)]]


def test_on_the_lists_are_used_as_they_are() -> None:
    assert assign([OWN], ON) == (advantages([OWN]), [])


def test_on_a_missing_list_among_others_becomes_zeros() -> None:
    found, said = assign([PARTLY], ON)
    assert found == [[[(0.5, -0.25), (0.0, 0.0)], [(0.0, 0.0)]]]
    assert len(said) == 1 and said[0].startswith("2 of 3 Steps get zeros as advantages: 2 have none")


@pytest.mark.parametrize("wrong", [(), (0.5,), (0.5, 0.5, 0.5)])
def test_on_a_list_of_the_wrong_length_becomes_zeros(wrong: tuple[float, ...]) -> None:
    found, said = assign([group([(0.5, -0.25), wrong], [wrong])], ON)
    assert found == [[[(0.5, -0.25), (0.0, 0.0)], [(0.0, 0.0)]]]
    assert len(said) == 1 and "0 have none" in said[0] and "2 have a list of the wrong length" in said[0]


def test_on_a_group_whose_only_list_has_the_wrong_length_does_not_fall_back() -> None:
    found, said = assign([group([(0.5,)], [None])], ON)
    assert found == [[[(0.0, 0.0)], [(0.0, 0.0)]]]
    assert len(said) == 1 and said[0].startswith("2 of 2 Steps get zeros as advantages: 1 have none")


def test_on_there_is_one_warning_per_batch_that_counts_all_missing_and_misfitting_lists() -> None:
    misfit = group([(0.5, -0.25)], [(0.5,)])
    _, said = assign([PARTLY, NONE, OWN, misfit, PARTLY], ON)
    assert [text.split(" get")[0] for text in said] == ["5 of 11 Steps"]
    assert "4 have none" in said[0] and "1 have a list" in said[0]
    assert assign([PARTLY], ON)[1] != []  # the next batch is warned of anew


def test_on_a_group_in_which_no_step_has_a_list_falls_back_to_the_estimator() -> None:
    assert assign([OWN, NONE], ON) == ([*advantages([OWN]), ESTIMATED], [])


def test_on_distilled_and_rewarded_roles_mix() -> None:
    distilled = group([(0.1, 0.2)], [(0.3, 0.4)], rewards=(None, None), role="student")
    algorithm = ON.model_copy(update={"roles": {"agent": RoleSection(estimator="reinforce")}})
    found, said = assign([NONE, distilled], algorithm)
    assert found == [[[(1.0, 1.0)], [(0.0, 0.0), (0.0, 0.0)]], *advantages([distilled])]
    assert said == []


def test_on_a_batch_level_estimator_sees_only_the_groups_that_fall_back() -> None:
    far = group([(0.5, -0.25)], [(7.0, 0.0)], rewards=(100.0, -100.0))
    algorithm = ON.model_copy(update={"estimator": "headrace.algorithms.advantages.estimators:prpo"})
    found, _ = assign([far, NONE], algorithm)
    assert found[1][0][0] == pytest.approx((1.0, 1.0), abs=1e-5)


def test_on_a_step_without_response_tokens_lacks_nothing_and_has_nothing() -> None:
    empty = step([1], [])
    own = replace(OWN, trajectories=(Trajectory((*OWN.trajectories[0].steps, empty), reward=1.0),))
    assert assign([own], ON) == ([[[(0.5, -0.25), ()]]], [])
    only_empty = replace(
        NONE, trajectories=(*NONE.trajectories, Trajectory((replace(empty, advantage=()),), reward=0.5))
    )
    assert assign([only_empty], ON) == ([[[(0.5, 0.5)], [(-0.5, -0.5)] * 2, [()]]], [])


def test_off_the_lists_are_overwritten_with_one_warning_per_batch_that_counts_them() -> None:
    found, said = assign([OWN, NONE, PARTLY], OFF)
    assert found == [ESTIMATED, ESTIMATED, [[(0.5, 0.5), (0.5, 0.5)], [(-0.5, -0.5)]]]
    assert len(said) == 1 and said[0].startswith("the advantages of 4 Steps, set by the workflow, are overwritten")
    assert "use_precomputed_advantage" in said[0]


def test_off_a_list_of_the_wrong_length_is_overwritten_like_any_other() -> None:
    found, said = assign([group([(0.5,)], [()])], OFF)
    assert found == [[[(0.5, 0.5)], [(-0.5, -0.5)]]]
    assert [text.split(",")[0] for text in said] == ["the advantages of 2 Steps"]


def test_off_nothing_is_said_when_there_is_nothing_to_overwrite() -> None:
    assert assign([NONE], OFF) == ([ESTIMATED], [])


@pytest.mark.parametrize("algorithm", [ON, OFF])
def test_a_role_that_is_not_trained_is_not_warned_of(algorithm: AlgorithmSection) -> None:
    untrained = algorithm.model_copy(update={"roles": {"agent": RoleSection(train=False)}})
    assert assign([OWN, PARTLY], untrained) == ([], [])


@pytest.mark.parametrize("algorithm", [ON, OFF])
def test_the_groups_handed_in_stay_as_they_were(algorithm: AlgorithmSection) -> None:
    before = PARTLY.to_json()
    assign([PARTLY], algorithm)
    assert PARTLY.to_json() == before


def test_a_scalar_never_gets_into_a_step() -> None:
    """So it fails the episode of the workflow that tried, and no group can hold one."""
    good = step([1], [2, 3], advantage=(0.5, -0.25))
    scalar: Any = 0.5
    values = {**good.to_dict(), "advantage": scalar}
    group = {"task_id": "t", "name": "agent", "trajectories": [{"steps": [values]}]}
    for make in (
        lambda: step([1], [2, 3], advantage=scalar),
        lambda: replace(good, advantage=scalar),
        lambda: Step.from_dict(values),
        lambda: TrajectoryGroup.from_json(json.dumps(group)),
    ):
        with pytest.raises(DataError, match="Step"):
            make()
