"""Every estimator: worked values, invariances, and how roles come to theirs."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes import examples, trajectory
from headrace.algorithms.advantages import assign
from headrace.algorithms.advantages.assign import assign_advantages
from headrace.algorithms.advantages.estimators import (
    Estimator,
    GroupRewards,
    constant,
    group_relative,
    grpo,
    maxrl,
    opo,
    pkpo,
    prpo,
    reinforce,
    reinforce_plus_plus_baseline,
    rloo,
)
from headrace.config import AlgorithmSection, RoleSection
from headrace.data.episode import Trajectory, TrajectoryGroup
from headrace.errors import DataError
from headrace.registry import facts, register

PLAIN = AlgorithmSection()


def dr_grpo(groups: Sequence[GroupRewards], algorithm: AlgorithmSection) -> list[list[float]]:
    return grpo(groups, algorithm.model_copy(update={"normalize_by_std": False}))


GROUP_RELATIVE = [grpo, dr_grpo, rloo, reinforce_plus_plus_baseline, maxrl, pkpo, opo]
BATCH_LEVEL = [reinforce_plus_plus_baseline, prpo]
EVERY = [*GROUP_RELATIVE, prpo, reinforce, constant]
BALANCED = [grpo, dr_grpo, rloo, reinforce_plus_plus_baseline, maxrl, pkpo]  # mean 0 in every group

# eighths: exact in binary, and no spread so small that epsilon is felt; not negative, for maxrl
eighths = st.integers(0, 64).map(lambda n: n / 8)
reward_lists = st.lists(eighths, min_size=1, max_size=8)
batches = st.lists(reward_lists, min_size=1, max_size=4)
sections = st.builds(AlgorithmSection, pass_k=st.integers(1, 4))


def seen(*rewards: Sequence[float]) -> list[GroupRewards]:
    """Groups with these rewards; lengths differ, and belong to a reward's value, so that they move with it."""
    return [GroupRewards(tuple(group), tuple(1 + int(8 * abs(r)) % 7 for r in group)) for group in rewards]


def near(expected: Any, tolerance: float = 1e-9) -> Any:
    return pytest.approx(expected, abs=tolerance, rel=tolerance)


def flat(advantages: list[list[float]]) -> list[float]:
    return [value for group in advantages for value in group]


# ---- worked values ---------------------------------------------------------------------------------------------------

TWO_GROUPS = seen([1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 0.0])
THIRD, ROOT = 1 / 3, math.sqrt(3)


@pytest.mark.parametrize(
    ("estimator", "first", "second"),
    [
        (grpo, [ROOT, -ROOT / 3, -ROOT / 3, -ROOT / 3], [ROOT / 3, ROOT / 3, ROOT / 3, -ROOT]),
        (dr_grpo, [0.75, -0.25, -0.25, -0.25], [0.25, 0.25, 0.25, -0.75]),
        (rloo, [1.0, -THIRD, -THIRD, -THIRD], [THIRD, THIRD, THIRD, -1.0]),
        (reinforce, [1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 0.0]),
        (
            reinforce_plus_plus_baseline,
            [ROOT, -ROOT / 3, -ROOT / 3, -ROOT / 3],
            [ROOT / 3, ROOT / 3, ROOT / 3, -ROOT],
        ),
        (prpo, [1.0, -1.0, -1.0, -1.0], [1.0, 1.0, 1.0, -1.0]),
        (maxrl, [3.0, -1.0, -1.0, -1.0], [THIRD, THIRD, THIRD, -1.0]),
        # k = 2: credits 3/6 and 1/6; in the second group every member is in three subsets, and each has a 1
        (pkpo, [0.25, -0.25 / 3, -0.25 / 3, -0.25 / 3], [0.0, 0.0, 0.0, 0.0]),
        (constant, [1.0] * 4, [1.0] * 4),
    ],
)
def test_worked_values(estimator: Estimator, first: list[float], second: list[float]) -> None:
    found = estimator(TWO_GROUPS, PLAIN)
    assert found[0] == near(first, 2e-5)
    assert found[1] == near(second, 2e-5)


def test_the_baseline_of_opo_is_weighted_by_length() -> None:
    assert opo([GroupRewards((1.0, 0.0), (3, 1))], PLAIN) == [[0.25, -0.75]]
    assert opo([GroupRewards((1.0, 0.0, 0.0), (2, 8, 0))], PLAIN) == [near([0.8, -0.2, -0.2])]


def test_the_spread_of_reinforce_plus_plus_is_that_of_the_batch() -> None:
    # centred: -2, 2 and -1, 1, so the standard deviation is sqrt(10 / 4)
    scale = math.sqrt(2.5)
    found = reinforce_plus_plus_baseline(seen([0.0, 4.0], [5.0, 7.0]), PLAIN)
    assert flat(found) == near([-2 / scale, 2 / scale, -1 / scale, 1 / scale], 1e-5)


def test_the_baseline_of_prpo_is_that_of_the_batch() -> None:
    found = prpo(seen([4.0], [0.0, 0.0, 0.0]), PLAIN)
    assert flat(found) == near([ROOT, -ROOT / 3, -ROOT / 3, -ROOT / 3], 1e-5)


# ---- rollouts with several trajectories ------------------------------------------------------------------------------


def of_rollouts(*rollouts: Sequence[float]) -> GroupRewards:
    """One group; each rollout has trajectories with these rewards, all of the same length."""
    rewards = tuple(reward for rollout in rollouts for reward in rollout)
    owners = tuple(place for place, rollout in enumerate(rollouts) for _ in rollout)
    return GroupRewards(rewards, (3,) * len(rewards), owners)


ONCE: list[tuple[Estimator, list[float]]] = [
    (grpo, [1, 1, 1, -1]),
    (dr_grpo, [0.5, 0.5, 0.5, -0.5]),
    (rloo, [1, 1, 1, -1]),
    (reinforce, [1, 1, 1, 0]),
    (reinforce_plus_plus_baseline, [1, 1, 1, -1]),
    (prpo, [1, 1, 1, -1]),
    (maxrl, [1, 1, 1, -1]),
    (pkpo, [0.25, 0.25, 0.25, -0.25]),
    (opo, [0.5, 0.5, 0.5, -0.5]),
    (constant, [1, 1, 1, 1]),
]


@pytest.mark.parametrize(("estimator", "expected"), ONCE, ids=lambda given: getattr(given, "__name__", ""))
def test_a_rollout_with_several_trajectories_counts_once(estimator: Estimator, expected: list[float]) -> None:
    found = estimator([of_rollouts([1, 1, 1], [0])], AlgorithmSection(pass_k=1))
    assert found == [near(expected, 1e-5)]


@given(batches, sections)
@examples
def test_trajectories_that_a_rollout_has_twice_change_nothing(rewards: list[list[float]], section: Any) -> None:
    once = [of_rollouts(*([reward] for reward in group)) for group in rewards]
    twice = [of_rollouts(*([reward] * (1 + place % 2) for place, reward in enumerate(group))) for group in rewards]
    for estimator in EVERY:
        alone, repeated = estimator(once, section), estimator(twice, section)
        for group, one, many in zip(twice, alone, repeated, strict=True):
            assert many == near([one[rollout] for rollout in group.rollouts], 1e-6)


def test_trajectories_of_one_rollout_differ_by_their_own_reward() -> None:
    # rollouts 0.5 and 0: mean 0.25, deviation 0.25
    group = of_rollouts([1, 0], [0])
    assert grpo([group], PLAIN) == [near([3, -1, -1], 1e-4)]
    assert dr_grpo([group], PLAIN) == [[0.75, -0.25, -0.25]]
    assert rloo([group], PLAIN) == [[1.5, -0.5, -0.5]]
    assert group.rollout_rewards == (0.5, 0.0)


def test_equal_rollouts_give_no_huge_advantages() -> None:
    alike = [of_rollouts([1, 0], [0, 1]), of_rollouts([0.1, 0.2, 0.3], [0.3, 0.1, 0.2])]
    for estimator in (grpo, reinforce_plus_plus_baseline):
        assert flat(estimator(alike, PLAIN)) == [0.0] * 10
    assert flat(prpo(alike[:1], PLAIN)) == [0.0] * 4


def test_a_single_rollout_has_nothing_to_compare_with() -> None:
    for estimator in GROUP_RELATIVE:
        assert estimator([of_rollouts([1.0, 0.0, 0.0])], PLAIN) == [[0.0, 0.0, 0.0]]


def test_groups_say_which_rollout_a_trajectory_is_of() -> None:
    told: list[GroupRewards] = []

    def listens(groups: Sequence[GroupRewards], algorithm: AlgorithmSection) -> list[list[float]]:
        told.extend(groups)
        return reinforce(groups, algorithm)

    register("estimator", "listens_to_rollouts", listens)
    members = [
        Trajectory(trajectory().steps, "solver", reward, idx)
        for reward, idx in ((1, 5), (0, 5), (1, 9), (0, -1), (1, -1))
    ]
    assign_advantages(
        [TrajectoryGroup("t", "solver", tuple(members))], AlgorithmSection(estimator="listens_to_rollouts")
    )
    assert told[0].rollouts == (0, 0, 1, 2, 3) and told[0].count == 4
    assert told[0].rollout_rewards == (0.5, 1.0, 0.0, 1.0)


@pytest.mark.parametrize("estimator", EVERY, ids=lambda given: given.__name__)
@pytest.mark.parametrize("large", [1e200, 1e300, 1.7e308])
def test_huge_rewards_give_finite_advantages(estimator: Estimator, large: float) -> None:
    least = 0.0 if estimator is maxrl else -large
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (found,) = estimator([GroupRewards((large, least, least, large), (1, 2, 3, 4))], AlgorithmSection(pass_k=2))
    assert all(math.isfinite(value) for value in found)
    assert estimator is constant or found[0] > found[1]
    if estimator in (grpo, reinforce_plus_plus_baseline, prpo, maxrl):
        assert found == near([1, -1, -1, 1], 1e-4)


# ---- groups of one, equal, empty -------------------------------------------------------------------------------------


@pytest.mark.parametrize("estimator", GROUP_RELATIVE)
@pytest.mark.parametrize("reward", [1.0, 0.0, -3.5])
def test_singleton_group_has_zero_advantage(estimator: Estimator, reward: float) -> None:
    assert estimator(seen([reward], [1.0, 0.0, 1.0]), PLAIN)[0] == [0.0]


@pytest.mark.parametrize("estimator", [*GROUP_RELATIVE, prpo])
@examples
@given(st.floats(0, 1e12), st.integers(1, 16), st.integers(1, 5))
def test_equal_rewards_have_exactly_zero_advantage(estimator: Estimator, reward: float, size: int, k: int) -> None:
    assert estimator(seen([reward] * size), AlgorithmSection(pass_k=k)) == [[0.0] * size]


@pytest.mark.parametrize("estimator", [*EVERY])
def test_an_empty_batch_and_an_empty_group_are_no_trouble(estimator: Estimator) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # numpy only warns about the mean of nothing
        assert estimator([], PLAIN) == []
        assert estimator(seen([]), PLAIN) == [[]]
        assert [len(group) for group in estimator(seen([], [1.0, 0.0]), PLAIN)] == [0, 2]


def test_a_group_without_any_response_token_has_zero_advantage_under_opo() -> None:
    assert opo([GroupRewards((1.0, 0.0), (0, 0))], PLAIN) == [[0.0, 0.0]]


def test_each_reward_has_a_length() -> None:
    with pytest.raises(DataError, match="2 rewards, but 1 lengths"):
        GroupRewards((1.0, 0.0), (3,))


def test_a_negative_mean_reward_is_an_error_under_maxrl() -> None:
    with pytest.raises(DataError, match=r"mean reward is not negative, got -0\.5; shift the rewards"):
        maxrl(seen([-1.0, -1.0, -1.0, 1.0]), PLAIN)
    assert maxrl(seen([-0.5, 1.5]), PLAIN) == [near([-2.0, 2.0], 1e-5)]


# ---- invariances -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("estimator", BALANCED)
@examples
@given(batches, sections)
def test_advantages_of_each_group_have_mean_zero(
    estimator: Estimator, rewards: list[list[float]], algorithm: AlgorithmSection
) -> None:
    for group in estimator(seen(*rewards), algorithm):
        assert sum(group) == near(0.0)


@examples
@given(batches)
def test_advantages_of_prpo_have_mean_zero_over_the_batch(rewards: list[list[float]]) -> None:
    assert sum(flat(prpo(seen(*rewards), PLAIN))) == near(0.0)


@examples
@given(batches)
def test_advantages_of_opo_have_mean_zero_over_the_tokens(rewards: list[list[float]]) -> None:
    groups = seen(*rewards)
    for group, found in zip(groups, opo(groups, PLAIN), strict=True):
        assert np.dot(group.lengths, found) == near(0.0)


@pytest.mark.parametrize("estimator", [grpo, dr_grpo, rloo, reinforce_plus_plus_baseline, prpo, pkpo])
@examples
@given(batches, eighths, sections)
def test_a_shift_of_all_rewards_changes_nothing(
    estimator: Estimator, rewards: list[list[float]], shift: float, algorithm: AlgorithmSection
) -> None:
    shifted = [[reward - shift for reward in group] for group in rewards]
    assert flat(estimator(seen(*shifted), algorithm)) == near(flat(estimator(seen(*rewards), algorithm)))


@examples
@given(reward_lists, eighths)
def test_a_shift_of_all_rewards_changes_nothing_under_opo(rewards: list[float], shift: float) -> None:
    (group,) = seen(rewards)
    shifted = GroupRewards(tuple(reward - shift for reward in rewards), group.lengths)
    assert flat(opo([shifted], PLAIN)) == near(flat(opo([group], PLAIN)))


@pytest.mark.parametrize("estimator", [grpo, reinforce_plus_plus_baseline, prpo, maxrl])
@examples
@given(batches, st.floats(0.5, 8.0))
def test_normalised_advantages_do_not_change_with_the_scale(
    estimator: Estimator, rewards: list[list[float]], scale: float
) -> None:
    scaled = [[reward * scale for reward in group] for group in rewards]
    # up to epsilon, against a spread of at least some hundredths
    assert flat(estimator(seen(*scaled), PLAIN)) == near(flat(estimator(seen(*rewards), PLAIN)), 1e-3)


@pytest.mark.parametrize("estimator", [dr_grpo, rloo, reinforce, pkpo])
@examples
@given(batches, st.floats(0.5, 8.0), sections)
def test_other_advantages_grow_with_the_scale(
    estimator: Estimator, rewards: list[list[float]], scale: float, algorithm: AlgorithmSection
) -> None:
    scaled = [[reward * scale for reward in group] for group in rewards]
    expected = [scale * value for value in flat(estimator(seen(*rewards), algorithm))]
    assert flat(estimator(seen(*scaled), algorithm)) == near(expected)


@pytest.mark.parametrize("estimator", EVERY)
@examples
@given(batches, st.randoms(use_true_random=False), sections)
def test_the_order_of_trajectories_and_groups_does_not_matter(
    estimator: Estimator, rewards: list[list[float]], random: Any, algorithm: AlgorithmSection
) -> None:
    before = dict(enumerate(estimator(seen(*rewards), algorithm)))
    groups = random.sample(range(len(rewards)), len(rewards))
    orders = [random.sample(range(len(rewards[g])), len(rewards[g])) for g in groups]
    mixed = [[rewards[g][i] for i in order] for g, order in zip(groups, orders, strict=True)]
    expected = [[before[g][i] for i in order] for g, order in zip(groups, orders, strict=True)]
    assert flat(estimator(seen(*mixed), algorithm)) == near(flat(expected))


@pytest.mark.parametrize("estimator", [*GROUP_RELATIVE, prpo])
@examples
@given(reward_lists, sections)
def test_a_better_reward_never_has_the_smaller_advantage(
    estimator: Estimator, rewards: list[float], algorithm: AlgorithmSection
) -> None:
    (found,) = estimator(seen(rewards), algorithm)
    order = sorted(range(len(rewards)), key=rewards.__getitem__)
    assert all(found[low] <= found[high] + 1e-12 for low, high in pairwise(order))


@examples
@given(reward_lists)
def test_rloo_is_the_reward_less_the_mean_of_the_others(rewards: list[float]) -> None:
    (found,) = rloo(seen(rewards), PLAIN)
    for place, reward in enumerate(rewards):
        others = rewards[:place] + rewards[place + 1 :]
        assert found[place] == near(reward - np.mean(others) if others else 0.0)


@examples
@given(reward_lists, st.integers(1, 9))
def test_opo_of_equal_lengths_is_dr_grpo(rewards: list[float], length: int) -> None:
    groups = [GroupRewards(tuple(rewards), (length,) * len(rewards))]
    assert flat(opo(groups, PLAIN)) == near(flat(dr_grpo(groups, PLAIN)))


# ---- pass@k ----------------------------------------------------------------------------------------------------------


def credits_by_enumeration(rewards: Sequence[float], k: int) -> np.ndarray:
    credit = np.zeros(len(rewards))
    for subset in combinations(range(len(rewards)), k):
        credit[list(subset)] += max(rewards[i] for i in subset)
    return credit / math.comb(len(rewards), k)


@examples
@given(st.lists(st.floats(-100, 100), min_size=2, max_size=8), st.integers(1, 8))
def test_pkpo_is_what_enumerating_all_subsets_gives(rewards: list[float], k: int) -> None:
    (found,) = pkpo(seen(rewards), AlgorithmSection(pass_k=k))
    if k > len(rewards):
        assert found == [0.0] * len(rewards)
        return
    credit = credits_by_enumeration(rewards, k)
    assert found == near(list(credit - credit.mean()), 1e-10)


@examples
@given(reward_lists.filter(lambda rewards: len(rewards) > 1))
def test_pkpo_of_one_is_dr_grpo_over_the_group_size(rewards: list[float]) -> None:
    (found,) = pkpo(seen(rewards), AlgorithmSection(pass_k=1))
    (expected,) = dr_grpo(seen(rewards), PLAIN)
    assert found == near([value / len(rewards) for value in expected])


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_a_group_of_no_more_than_k_has_zero_advantage_under_pkpo(size: int) -> None:
    assert pkpo(seen([1.0, 0.0, 0.5, 0.25][:size]), AlgorithmSection(pass_k=4)) == [[0.0] * size]


@pytest.mark.parametrize(("size", "k"), [(64, 32), (2000, 1000)])
def test_pkpo_of_large_groups_is_quick_and_exact(size: int, k: int) -> None:
    rewards = [1.0] * 3 + [0.0] * (size - 3)
    started = time.process_time()
    (found,) = pkpo(seen(rewards), AlgorithmSection(pass_k=k))
    assert time.process_time() - started < 5
    # a 1 is in k/n of the subsets; a 0 gains where one of the three others is there too
    ones = k / size
    zeros = ones - math.comb(size - 4, k - 1) / math.comb(size, k)
    mean = (3 * ones + (size - 3) * zeros) / size
    assert found == near([ones - mean] * 3 + [zeros - mean] * (size - 3), 1e-12)


# ---- what an estimator must see --------------------------------------------------------------------------------------


@pytest.mark.parametrize("estimator", [e for e in EVERY if e not in BATCH_LEVEL])
@examples
@given(batches, sections)
def test_a_group_level_estimator_looks_at_one_group_at_a_time(
    estimator: Estimator, rewards: list[list[float]], algorithm: AlgorithmSection
) -> None:
    groups = seen(*rewards)
    assert estimator(groups, algorithm) == [estimator([group], algorithm)[0] for group in groups]


@pytest.mark.parametrize("estimator", BATCH_LEVEL)
def test_a_batch_level_estimator_looks_at_other_groups(estimator: Estimator) -> None:
    alone, beside = seen([1.0, 0.0]), seen([1.0, 0.0], [9.0, 0.0])
    assert estimator(alone, PLAIN)[0] != estimator(beside, PLAIN)[0]


def test_the_function_of_a_user_is_not_group_relative_unless_marked() -> None:
    def own(groups: Sequence[GroupRewards], algorithm: AlgorithmSection) -> list[list[float]]:
        return [list(group.rewards) for group in groups]

    register("estimator", "unmarked", own)
    assert not facts("estimator", "unmarked").group_relative
    assert group_relative(own) is own and facts("estimator", "unmarked").group_relative


# ---- assigning: groups of one, roles, own estimators -----------------------------------------------------------------


def group(*rewards: float, role: str = "agent") -> TrajectoryGroup:
    return TrajectoryGroup("t", role, tuple(trajectory(reward, role) for reward in rewards))


def scalars(groups: Sequence[TrajectoryGroup]) -> list[list[float]]:
    """The advantage of each trajectory, which all of its tokens share."""
    found = []
    for one in groups:
        lists = [step.advantage for member in one.trajectories for step in member.steps]
        assert all(values is not None and len(set(values)) == 1 for values in lists)
        found.append([values[0] for values in lists if values])
    return found


def path_of(estimator: Callable[..., Any]) -> str:
    return f"{estimator.__module__}:{estimator.__name__}"


@pytest.fixture
def _nothing_said_yet() -> Iterator[None]:
    assign._warn_of_singletons.cache_clear()
    yield
    assign._warn_of_singletons.cache_clear()


@pytest.mark.usefixtures("_nothing_said_yet")
def test_groups_of_one_are_warned_of_once_per_estimator() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for estimator in (grpo, rloo, grpo, rloo):
            algorithm = AlgorithmSection(estimator=path_of(estimator))
            assigned = assign_advantages([group(1.0), group(1.0, 0.0), group(0.5)], algorithm)
            assert scalars(assigned)[0] == scalars(assigned)[2] == [0.0]
    assert [str(w.message).split(",")[0] for w in caught] == [
        f'a group of one rollout has advantage 0 under estimator "{path_of(estimator)}"' for estimator in (grpo, rloo)
    ]


@pytest.mark.usefixtures("_nothing_said_yet")
@pytest.mark.parametrize("estimator", [reinforce, prpo, constant])
def test_groups_of_one_are_nothing_to_warn_of_elsewhere(estimator: Estimator) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assign_advantages([group(1.0), group(0.0)], AlgorithmSection(estimator=path_of(estimator)))


def test_each_role_has_the_estimator_that_it_names() -> None:
    algorithm = AlgorithmSection(
        normalize_by_std=False,
        roles={"critic": RoleSection(estimator=path_of(reinforce)), "judge": RoleSection(loss="cross_entropy")},
    )
    batch = [group(1.0, 0.0), group(1.0, 0.0, role="critic"), group(3.0, 1.0), group(4.0, 2.0, role="judge")]
    assigned = assign_advantages(batch, algorithm)
    assert [one.name for one in assigned] == ["agent", "critic", "agent", "judge"]
    assert scalars(assigned) == [[0.5, -0.5], [1.0, 0.0], [1.0, -1.0], [1.0, -1.0]]


def test_a_batch_level_estimator_sees_all_groups_of_its_roles_and_no_others() -> None:
    algorithm = AlgorithmSection(estimator=path_of(prpo), roles={"critic": RoleSection(estimator=path_of(reinforce))})
    batch = [group(4.0), group(100.0, role="critic"), group(0.0, 0.0), group(0.0, role="solver")]
    assert flat(scalars(assign_advantages(batch, algorithm))) == near(
        [ROOT, 100.0, -ROOT / 3, -ROOT / 3, -ROOT / 3], 1e-5
    )


def test_a_role_that_is_not_trained_is_left_out_and_not_looked_at() -> None:
    algorithm = AlgorithmSection(estimator=path_of(prpo), roles={"tool": RoleSection(train=False)})
    unrewarded = TrajectoryGroup("t", "tool", (trajectory(None, "tool"),))
    assigned = assign_advantages([unrewarded, group(1.0, 0.0), group(50.0, role="tool")], algorithm)
    assert [one.name for one in assigned] == ["agent"]
    assert scalars(assigned) == [near([1.0, -1.0], 1e-5)]


def test_an_estimator_gets_the_response_tokens_of_each_trajectory() -> None:
    told: list[GroupRewards] = []

    def listens(groups: Sequence[GroupRewards], algorithm: AlgorithmSection) -> np.ndarray:
        told.extend(groups)
        return np.array([[2, 1]], dtype=np.float32)

    register("estimator", "listens", listens)
    two_steps = Trajectory(trajectory().steps * 2, reward=0.0)
    batch = [TrajectoryGroup("t", "agent", (trajectory(1.0), two_steps))]
    (assigned,) = assign_advantages(batch, AlgorithmSection(estimator="listens"))
    assert told == [GroupRewards((1.0, 0.0), (3, 6))]
    assert scalars([assigned]) == [[2.0, 1.0, 1.0]]
    assert assigned == TrajectoryGroup.from_json(assigned.to_json())  # numbers of numpy would not go into JSON


@pytest.mark.parametrize("returned", [[[1.0, 0.0]], [[1.0, 0.0], [1.0, 2.0]], []])
def test_an_estimator_that_returns_too_few_or_too_many_is_an_error_that_names_it(returned: list[list[float]]) -> None:
    register("estimator", "miscounts", lambda groups, algorithm: returned)
    with pytest.raises(DataError, match=r'estimator "miscounts" must return .* lists of lengths \[2, 1\], got'):
        assign_advantages([group(1.0, 0.0), group(1.0)], AlgorithmSection(estimator="miscounts"))
