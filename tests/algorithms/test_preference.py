"""Preference pairs: best against worst, and every reason to form none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from fakes import step
from headrace.algorithms.preference import SKIP_REASONS, PreferencePair, form_pairs
from headrace.config import DpoSection
from headrace.data.episode import Trajectory, TrajectoryGroup
from headrace.errors import DataError

PLAIN = DpoSection()
PROMPT = (1, 2)


def member(reward: float | None, response: Sequence[int] = (3,), prompt: Sequence[Any] = PROMPT) -> Trajectory:
    return Trajectory((step(prompt, response),), reward=reward)


def group(*members: Trajectory) -> TrajectoryGroup:
    return TrajectoryGroup("task 7", "agent", members, group_id=5)


def group_of(*rewards: float) -> TrajectoryGroup:
    """The trajectory at place i answers with the token 100 + i."""
    return group(*(member(reward, (100 + place,)) for place, reward in enumerate(rewards)))


def answers(pair: PreferencePair) -> tuple[int, int]:
    return pair.chosen.tokens[-1] - 100, pair.rejected.tokens[-1] - 100


def only_pair(group: TrajectoryGroup, dpo: DpoSection = PLAIN) -> PreferencePair:
    (pair,), skipped = form_pairs([group], dpo)
    assert set(skipped.values()) == {0}
    return pair


def reason(group: TrajectoryGroup, dpo: DpoSection = PLAIN) -> str:
    """Why there is no pair."""
    pairs, skipped = form_pairs([group], dpo)
    assert pairs == []
    (found,) = [name for name, count in skipped.items() if count]
    return found


TWO_STEPS = Trajectory((step([1], [2]), step([1, 2], [3])), reward=0.0)


# ---- pairs -----------------------------------------------------------------------------------------------------------


def test_the_best_is_chosen_and_the_worst_rejected() -> None:
    pair = only_pair(group_of(0.25, 0.0, 1.0, 0.5))
    assert answers(pair) == (2, 1)
    assert (pair.task_id, pair.chosen_reward, pair.rejected_reward) == ("task 7", 1.0, 0.0)


def test_the_samples_are_the_rows_of_the_two_trajectories() -> None:
    pair = only_pair(group(member(1.0, (3, 4)), member(0.0, (5,))))
    assert (pair.chosen.tokens, pair.chosen.loss_mask) == ((1, 2, 3, 4), (0, 1, 1))
    assert (pair.rejected.tokens, pair.rejected.loss_mask) == ((1, 2, 5), (0, 1))
    assert pair.chosen.logprobs == (0.0, -1.0, -2.0)
    for sample, reward in ((pair.chosen, 1.0), (pair.rejected, 0.0)):
        assert (sample.task_id, sample.group_id, sample.role, sample.reward) == ("task 7", 5, "agent", reward)


def test_missing_rewards_are_those_of_the_last_steps() -> None:
    members = [Trajectory((step(PROMPT, (100 + i,), reward=float(i)),)) for i in range(2)]
    pair = only_pair(group(*members))
    assert answers(pair) == (1, 0)
    assert (pair.chosen_reward, pair.rejected_reward) == (1.0, 0.0)


def test_only_the_two_that_are_paired_must_have_the_same_prompt() -> None:
    odd = member(0.5, prompt=(8, 9))
    assert only_pair(group(member(1.0), odd, member(0.0))).rejected_reward == 0.0


def test_images_in_the_prompt_are_compared_by_value() -> None:
    pictures = [(1, {"type": "image", "data": data}, 2) for data in ("a", "a", "b")]
    assert only_pair(group(member(1.0, prompt=pictures[0]), member(0.0, prompt=pictures[1])))
    assert reason(group(member(1.0, prompt=pictures[0]), member(0.0, prompt=pictures[2]))) == "different_prompts"


def test_a_tie_takes_the_first_against_the_last_when_ties_are_kept() -> None:
    pair = only_pair(group_of(0.5, 0.5, 0.5), DpoSection(drop_ties=False))
    assert answers(pair) == (0, 2)


def test_a_gap_of_exactly_the_least_is_enough() -> None:
    assert answers(only_pair(group_of(0.25, 0.75), DpoSection(min_reward_gap=0.5))) == (1, 0)


def test_json_gives_the_same_pair_back() -> None:
    prompt = (1, {"type": "image", "data": "a"})
    pair = only_pair(group(member(1.0, prompt=prompt), member(0.0, (3, 4), prompt)))
    text = pair.to_json()
    assert "\n" not in text
    again = PreferencePair.from_json(text)
    assert again == pair and again.to_json() == text


# ---- none ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("skipped", "why"),
    [
        (group(), "fewer_than_two"),
        (group_of(1.0), "fewer_than_two"),
        (group(member(1.0), TWO_STEPS), "multi_step"),
        (group(member(1.0), Trajectory((), reward=0.0)), "multi_step"),
        (group_of(1.0, 1.0, 1.0), "tie"),
        (group_of(1.0, 0.75), "small_gap"),
        (group(member(1.0), member(0.0, prompt=(1,))), "different_prompts"),
    ],
)
def test_a_group_is_skipped_for_a_reason(skipped: TrajectoryGroup, why: str) -> None:
    assert reason(skipped, DpoSection(min_reward_gap=0.5)) == why


@pytest.mark.parametrize(
    ("skipped", "why"),
    [
        # each has all the faults from its reason on; of a group of one only the first two can be asked
        (group(TWO_STEPS), "fewer_than_two"),
        (group(TWO_STEPS, Trajectory((step([9], [2]), step([9], [3])), reward=0.0)), "multi_step"),
        (group(Trajectory(TWO_STEPS.steps), member(None)), "multi_step"),
        (group(member(1.0), member(1.0, prompt=(9,))), "tie"),
        (group(member(1.0), member(0.75, prompt=(9,))), "small_gap"),
    ],
)
def test_the_first_reason_in_order_counts(skipped: TrajectoryGroup, why: str) -> None:
    assert reason(skipped, DpoSection(min_reward_gap=0.5)) == why


def test_a_kept_tie_is_still_below_a_least_gap() -> None:
    assert reason(group_of(1.0, 1.0), DpoSection(drop_ties=False, min_reward_gap=0.5)) == "small_gap"


def test_the_group_of_one_needs_no_reward() -> None:
    assert reason(group(member(None))) == "fewer_than_two"


@pytest.mark.parametrize("members", [(member(1.0), member(None)), (member(None), member(None))])
def test_a_missing_reward_is_an_error_that_names_the_group(members: tuple[Trajectory, ...]) -> None:
    with pytest.raises(DataError, match="task 7"):
        form_pairs([group_of(1.0, 0.0), group(*members)], PLAIN)


def test_a_missing_reward_is_an_error_before_different_prompts_are_seen() -> None:
    with pytest.raises(DataError, match="task 7"):
        form_pairs([group(member(1.0), member(None, prompt=(9,)))], PLAIN)


def test_pairs_and_skipped_groups_are_counted_in_order() -> None:
    batch = [group_of(1.0, 0.0), group_of(1.0), group_of(0.0, 0.0), group_of(0.0, 2.0), group_of(3.0, 3.0)]
    pairs, skipped = form_pairs(batch, PLAIN)
    assert [pair.chosen_reward for pair in pairs] == [1.0, 2.0]
    assert skipped == {"fewer_than_two": 1, "multi_step": 0, "tie": 2, "small_gap": 0, "different_prompts": 0}
    assert tuple(skipped) == SKIP_REASONS


def test_no_groups_give_no_pairs() -> None:
    assert form_pairs([], PLAIN) == ([], dict.fromkeys(SKIP_REASONS, 0))
