"""From rewards to advantages on tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes import examples, step
from headrace.algorithms.advantages.assign import assign_advantages
from headrace.algorithms.advantages.estimators import GroupRewards, constant, grpo, reinforce
from headrace.config import AlgorithmSection
from headrace.data.episode import Trajectory, TrajectoryGroup
from headrace.errors import ConfigError, DataError

GROUPS = [[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 0.0]]
PLAIN = AlgorithmSection()
WITHOUT_STD = AlgorithmSection(normalize_by_std=False)
rewards = st.floats(-1e6, 1e6)


def of(*groups: list[float]) -> list[GroupRewards]:
    return [GroupRewards(tuple(group), (1,) * len(group)) for group in groups]


def group(*rewards: float, task_id: str = "t") -> TrajectoryGroup:
    """Each trajectory has two Steps, of two and of three response tokens."""
    steps = (step([1], [2, 3]), step([1, 2, 3], [4, 5, 6]))
    return TrajectoryGroup(task_id, "agent", tuple(Trajectory(steps, reward=reward) for reward in rewards))


def test_grpo_worked() -> None:
    first, second = grpo(of(*GROUPS), PLAIN)
    assert first == pytest.approx([1.732, -0.577, -0.577, -0.577], abs=1e-3)
    assert second == pytest.approx([0.577, 0.577, 0.577, -1.732], abs=1e-3)


def test_grpo_without_the_standard_deviation_worked() -> None:
    assert grpo(of(*GROUPS), WITHOUT_STD) == [[0.75, -0.25, -0.25, -0.25], [0.25, 0.25, 0.25, -0.75]]


def test_reinforce_is_the_reward_itself() -> None:
    assert reinforce(of(*GROUPS), PLAIN) == GROUPS


def test_constant_is_1_for_everything() -> None:
    assert constant(of([0.0, -3.0], [7.0]), PLAIN) == [[1.0, 1.0], [1.0]]


@pytest.mark.parametrize("algorithm", [PLAIN, WITHOUT_STD])
@pytest.mark.parametrize("reward", [1.0, 0.0, -3.5])
def test_singleton_group_has_zero_advantage(algorithm: AlgorithmSection, reward: float) -> None:
    assert grpo(of([reward]), algorithm) == [[0.0]]


@examples
@given(st.floats(-1e12, 1e12), st.integers(1, 16), st.sampled_from([PLAIN, WITHOUT_STD]))
def test_uniform_group_has_exactly_zero_advantage(reward: float, size: int, algorithm: AlgorithmSection) -> None:
    assert grpo(of([reward] * size), algorithm) == [[0.0] * size]


@examples
@given(st.lists(rewards, min_size=1, max_size=8), st.sampled_from([PLAIN, WITHOUT_STD]))
def test_advantages_of_a_group_are_balanced_and_ordered_as_the_rewards(
    values: list[float], algorithm: AlgorithmSection
) -> None:
    (found,) = grpo(of(values), algorithm)
    assert sum(found) == pytest.approx(0.0, abs=1e-6 * (1.0 + max(map(abs, values))))
    order = sorted(range(len(values)), key=values.__getitem__)
    assert [found[i] for i in order] == sorted(found)


@examples
@given(st.lists(st.lists(rewards, min_size=1, max_size=4), min_size=1, max_size=4))
def test_grpo_looks_at_one_group_at_a_time(groups: list[list[float]]) -> None:
    assert grpo(of(*groups), PLAIN) == [grpo(of(one), PLAIN)[0] for one in groups]


def test_every_response_token_gets_the_advantage_of_its_trajectory() -> None:
    (assigned,) = assign_advantages([group(1.0, 0.0)], WITHOUT_STD)
    assert [[s.advantage for s in t.steps] for t in assigned.trajectories] == [
        [(0.5, 0.5), (0.5, 0.5, 0.5)],
        [(-0.5, -0.5), (-0.5, -0.5, -0.5)],
    ]


def test_the_groups_handed_in_stay_as_they_were_and_all_else_is_kept() -> None:
    before = group(1.0, 0.0)
    (assigned,) = assign_advantages([before], PLAIN)
    assert before == group(1.0, 0.0)
    assert (assigned.task_id, assigned.name, assigned.rewards()) == ("t", "agent", (1.0, 0.0))
    assert [s.response_ids for s in assigned.trajectories[0].steps] == [(2, 3), (4, 5, 6)]


def test_a_mixture_of_set_and_missing_rewards_names_the_group() -> None:
    mixed = TrajectoryGroup("task 7", "agent", (Trajectory((), reward=1.0), Trajectory(())))
    with pytest.raises(DataError, match="task 7"):
        assign_advantages([mixed], PLAIN)


OWN_ESTIMATOR = """
def against_the_batch(groups, algorithm):
    every = [reward for group in groups for reward in group.rewards]
    mean = sum(every) / len(every)
    return [[reward - mean for reward in group.rewards] for group in groups]


def one_too_few(groups, algorithm):
    return [list(group.rewards[1:]) for group in groups]
"""


@pytest.mark.parametrize("name", ["own_estimators:against_the_batch", "{folder}/own_estimators.py:against_the_batch"])
def test_an_own_estimator_is_found_by_name_and_sees_the_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / "own_estimators.py").write_text(OWN_ESTIMATOR)
    monkeypatch.syspath_prepend(tmp_path)
    algorithm = AlgorithmSection(estimator=name.format(folder=tmp_path))
    assigned = assign_advantages([group(3.0, 1.0), group(0.0, 0.0)], algorithm)
    assert [[t.steps[0].advantage for t in one.trajectories] for one in assigned] == [
        [(2.0, 2.0), (0.0, 0.0)],
        [(-1.0, -1.0), (-1.0, -1.0)],
    ]


def test_an_unknown_estimator_is_an_error_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r'unknown estimator "grop" \(did you mean "grpo"\?\); known: '):
        assign_advantages([group(1.0, 0.0)], AlgorithmSection(estimator="grop"))


def test_an_own_estimator_that_returns_the_wrong_shape_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "own_estimators.py").write_text(OWN_ESTIMATOR)
    algorithm = AlgorithmSection(estimator=f"{tmp_path}/own_estimators.py:one_too_few")
    with pytest.raises(DataError, match=r"one_too_few\" must return .* lengths \[2, 3\], got \[1, 2\]"):
        assign_advantages([group(1.0, 0.0), group(1.0, 0.0, 0.5)], algorithm)


def test_advantages_of_the_workflow_are_overwritten_with_a_warning() -> None:
    own = Trajectory((step([1], [2, 3], advantage=(9.0, 9.0)),), reward=1.0)
    with pytest.warns(UserWarning, match="advantages of 1 Steps, set by the workflow, are overwritten"):
        (assigned,) = assign_advantages([TrajectoryGroup("t", "agent", (own, group(0.0).trajectories[0]))], WITHOUT_STD)
    assert assigned.trajectories[0].steps[0].advantage == (0.5, 0.5)
