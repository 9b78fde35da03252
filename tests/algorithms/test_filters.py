"""Which of the finished episodes are trained."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from fakes import episode, trajectory
from headrace.algorithms.filters import (
    drop_by_termination,
    drop_too_few,
    impute_names,
    is_uniform,
    reason_to_drop,
    too_few,
)
from headrace.config import FilterSection
from headrace.data.episode import TerminationReason, Trajectory, TrajectoryGroup
from headrace.errors import DataError


def group(*rewards: float, role: str = "agent") -> TrajectoryGroup:
    return TrajectoryGroup("t", role, tuple(trajectory(reward, role) for reward in rewards))


# ---- terminations ----------------------------------------------------------------------------------------------------


def test_episodes_that_ended_for_a_dropped_reason_are_left_out_in_order() -> None:
    reasons = ["done", "timeout", "length", "error", "done"]
    episodes = [episode(float(i), termination=reason) for i, reason in enumerate(reasons)]
    assert drop_by_termination(episodes, ("timeout", "error")) == [episodes[0], episodes[2], episodes[4]]
    assert drop_by_termination(episodes, ("length",)) == [episodes[i] for i in (0, 1, 3, 4)]
    assert drop_by_termination(episodes, ()) == episodes


def test_a_termination_is_the_same_as_its_name() -> None:
    cut = episode(1.0, termination=TerminationReason.LENGTH)
    assert drop_by_termination([cut], FilterSection(drop_terminations=("length",)).drop_terminations) == []
    assert drop_by_termination([cut], FilterSection().drop_terminations) == [cut]


def test_every_reason_without_a_failure_can_be_dropped_and_no_other() -> None:
    (choices, _) = get_args(FilterSection.model_fields["drop_terminations"].annotation)
    others = {TerminationReason.DONE, TerminationReason.ERROR, TerminationReason.JUDGE}
    assert set(get_args(choices)) == set(TerminationReason) - others


# ---- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "imputed"),
    [
        ([], []),
        ([""], ["agent"]),
        ([None], ["agent"]),
        (["", "", ""], ["agent", "agent_1", "agent_2"]),
        (["", "critic", ""], ["agent", "critic", "agent_1"]),
        (["solver", "critic"], ["solver", "critic"]),
        (["solver", "solver"], ["solver", "solver"]),
        (["agent", "agent"], ["agent", "agent"]),
        (["", "agent", ""], ["agent_1", "agent", "agent_2"]),
        (["agent_1", "", ""], ["agent_1", "agent", "agent_2"]),
    ],
)
def test_trajectories_without_a_name_get_one(names: list[Any], imputed: list[str]) -> None:
    before = [trajectory(float(i), name) for i, name in enumerate(names)]
    after = impute_names(before)
    assert [t.name for t in after] == imputed
    assert [(t.steps, t.reward) for t in after] == [(t.steps, t.reward) for t in before]


# ---- groups ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rewards", "uniform"),
    [((1.0, 1.0, 1.0), True), ((0.0, 0.0), True), ((0.5,), True), ((1.0, 0.0), False), ((1.0, 1.0, 1.0 + 1e-9), False)],
)
def test_a_group_is_uniform_when_all_rewards_are_equal(rewards: tuple[float, ...], uniform: bool) -> None:
    assert is_uniform(group(*rewards)) is uniform


def test_whether_a_group_with_a_missing_reward_is_uniform_is_an_error_that_names_it() -> None:
    with pytest.raises(DataError, match='group of task "t", role "agent"'):
        is_uniform(TrajectoryGroup("t", "agent", (trajectory(1.0), Trajectory(()))))


def test_too_few_is_fewer_than_the_minimum() -> None:
    assert [too_few(group(1.0, 0.0), minimum) for minimum in (1, 2, 3)] == [False, False, True]


def test_groups_with_too_few_are_left_out_in_order() -> None:
    groups = [group(1.0), group(1.0, 0.0), group(), group(0.0, 0.0, 1.0)]
    assert drop_too_few(groups, 2) == (groups[1], groups[3])
    assert drop_too_few(groups, 1) == (groups[0], groups[1], groups[3])


# ---- all groups of one task ------------------------------------------------------------------------------------------

UNIFORM = FilterSection(drop_uniform=True)
THREE = FilterSection(min_trajectories=3)
BOTH = FilterSection(drop_uniform=True, min_trajectories=3)


@pytest.mark.parametrize(
    ("groups", "filters", "reason"),
    [
        ([], FilterSection(), "every episode failed"),
        ([], BOTH, "every episode failed"),
        ([group(1.0, 1.0)], FilterSection(), None),
        ([group(1.0, 1.0)], UNIFORM, "uniform rewards"),
        ([group(1.0)], UNIFORM, "uniform rewards"),
        ([group(1.0, 0.0)], UNIFORM, None),
        ([group(1.0, 0.0)], THREE, "fewer than 3 trajectories"),
        ([group(1.0, 0.0, 0.0)], THREE, None),
        ([group(1.0, 1.0, 1.0)], THREE, None),
        ([group(1.0, 1.0)], BOTH, "fewer than 3 trajectories"),
        ([group(1.0, 1.0, 1.0)], BOTH, "uniform rewards"),
        # several roles: dropped when nothing is left of any
        ([group(1.0, 1.0), group(1.0, 0.0, role="critic")], UNIFORM, None),
        ([group(1.0, 1.0), group(0.0, 0.0, role="critic")], UNIFORM, "uniform rewards"),
        ([group(1.0), group(1.0, 0.0, 0.0, role="critic")], THREE, None),
        ([group(1.0), group(1.0, 0.0, role="critic")], THREE, "fewer than 3 trajectories"),
        ([group(1.0, 0.0), group(1.0, 1.0, 1.0, role="critic")], BOTH, "uniform rewards"),
    ],
)
def test_the_reason_to_drop_a_task(groups: list[TrajectoryGroup], filters: FilterSection, reason: str | None) -> None:
    assert reason_to_drop(groups, filters) == reason


def test_a_group_without_rewards_is_not_uniform() -> None:
    unrewarded = TrajectoryGroup("t", "agent", (Trajectory(()), Trajectory(())))
    assert reason_to_drop([unrewarded], FilterSection()) is None
    assert reason_to_drop([unrewarded], UNIFORM) is None
    assert reason_to_drop([unrewarded, group(1.0, 1.0, role="critic")], UNIFORM) is None
