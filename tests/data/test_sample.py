"""Merging Steps into training rows: every sampled token is trained once, in the context it was sampled in."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes import examples, step
from headrace.data.episode import Step, Trajectory
from headrace.data.sample import NO_VERSION, Sample, merge_steps
from headrace.errors import DataError

IMAGE = {"type": "image", "data": "aGVhZHJhY2U="}
PAD, EOS = 0, 2


def rows(*steps: Step) -> list[Sample]:
    return merge_steps(Trajectory(steps))


def trained(sample: Sample, values: tuple[Any, ...]) -> list[Any]:
    return [value for value, mask in zip(values, sample.loss_mask, strict=True) if mask]


def test_one_step_is_one_row() -> None:
    (row,) = rows(step([1, 2, 3], [4, 5]))
    assert row.tokens == (1, 2, 3, 4, 5)
    assert row.loss_mask == (0, 0, 1, 1)


def test_two_steps_by_prefix_are_one_row() -> None:
    (row,) = rows(step([1, 2], [3, 4]), step([1, 2, 3, 4, 5], [6, 7]))
    assert row.tokens == (1, 2, 3, 4, 5, 6, 7)
    assert row.loss_mask == (0, 1, 1, 0, 1, 1)


def test_everything_per_token_is_aligned_with_its_target() -> None:
    (row,) = rows(
        step([1, 2], [3, 4], logprobs=(-0.3, -0.4), versions=(5, 5), advantage=(0.5, 0.5)),
        step([1, 2, 3, 4, 5], [6], logprobs=(-0.6,), versions=(6,), advantage=(-1.0,)),
    )
    assert row.logprobs == (0.0, -0.3, -0.4, 0.0, -0.6)
    assert row.versions == (NO_VERSION, 5, 5, NO_VERSION, 6)
    assert row.advantages == (0.0, 0.5, 0.5, 0.0, -1.0)


@pytest.mark.parametrize("wrong", [(), (0.5,), (0.5, 0.5, 0.5)])
def test_advantages_of_another_length_than_the_response_cannot_become_a_row(wrong: tuple[float, ...]) -> None:
    with pytest.raises(DataError, match=f"a Step has {len(wrong)} advantages, but 2 response tokens"):
        rows(step([1, 2], [3, 4], advantage=wrong))


def test_a_broken_prefix_is_two_rows() -> None:
    first, second = rows(step([1, 2], [3, 4]), step([1, 2, 9, 4, 5], [6, 7]))
    assert first.tokens == (1, 2, 3, 4) and first.loss_mask == (0, 1, 1)
    assert second.tokens == (1, 2, 9, 4, 5, 6, 7) and second.loss_mask == (0, 0, 0, 0, 1, 1)


def test_a_prompt_shorter_than_the_row_begins_a_new_row() -> None:
    first, second = rows(step([1, 2], [3, 4]), step([1, 2, 3], [6]))
    assert (first.tokens, second.tokens) == ((1, 2, 3, 4), (1, 2, 3, 6))


def test_a_reply_in_the_prompt_of_a_new_row_is_not_trained_again() -> None:
    sampled = rows(step([1, 2], [3, 4]), step([9, 1, 2, 3, 4, 5], [6]))
    assert [row.trained_tokens for row in sampled] == [2, 1]


def test_a_step_that_goes_straight_on_extends_the_row() -> None:
    (row,) = rows(step([1], [2]), step([1, 2], [3]))
    assert row.tokens == (1, 2, 3) and row.loss_mask == (1, 1)


def test_sampled_end_and_padding_ids_are_real_tokens() -> None:
    (row,) = rows(step([1, PAD], [3, PAD, EOS]), step([1, PAD, 3, PAD, EOS, EOS], [PAD, EOS]))
    assert row.tokens == (1, PAD, 3, PAD, EOS, EOS, PAD, EOS)
    assert row.loss_mask == (0, 1, 1, 1, 0, 1, 1)


def test_image_blocks_are_tokens_of_the_prompt() -> None:
    (row,) = rows(step([1, IMAGE], [3]), step([1, dict(IMAGE), 3, 4, {**IMAGE, "data": "b"}], [5]))
    assert row.tokens == (1, IMAGE, 3, 4, {"type": "image", "data": "b"}, 5)
    assert row.loss_mask == (0, 1, 0, 0, 1)


def test_another_image_breaks_the_prefix() -> None:
    assert len(rows(step([1, IMAGE], [3]), step([1, {**IMAGE, "data": "b"}, 3], [5]))) == 2


def test_another_temperature_begins_a_new_row() -> None:
    first, second = rows(step([1], [2], temperature=1.0), step([1, 2], [3], temperature=0.5))
    assert (first.temperature, second.temperature) == (1.0, 0.5)
    assert (first.loss_mask, second.loss_mask) == ((1,), (0, 1))


def test_a_step_that_answered_nothing_trains_nothing() -> None:
    (row,) = rows(step([1, 2], []))
    assert row.trained_tokens == 0


def test_a_step_without_a_prompt_is_an_error() -> None:
    with pytest.raises(DataError, match="at least one prompt token"):
        rows(step([], [1, 2]))


def test_what_was_not_sampled_has_no_version_though_it_is_trained() -> None:
    (row,) = rows(Step((1, 2), (3, 4), advantage=(1.0, 1.0)), step([1, 2, 3, 4, 5], [6], versions=(7,)))
    assert row.loss_mask == (0, 1, 1, 0, 1)
    assert row.versions == (NO_VERSION, NO_VERSION, NO_VERSION, NO_VERSION, 7)
    assert row.logprobs[1:3] == (0.0, 0.0)


def test_rows_carry_role_reward_and_identity() -> None:
    sampled = merge_steps(
        Trajectory((step([1], [2]), step([3], [4])), "critic", 0.5),
        task_id="t",
        group_id=7,
    )
    assert [(row.role, row.reward, row.task_id, row.group_id) for row in sampled] == [("critic", 0.5, "t", 7)] * 2


def test_the_reward_of_a_row_may_stand_on_the_last_step() -> None:
    assert rows(step([1], [2], reward=0.0), step([1, 2], [3], reward=1.0))[0].reward == 1.0


# few different ids, so that prefixes also hold by accident
tokens = st.lists(st.integers(0, 2), max_size=4)


@st.composite
def conversations(draw: st.DrawFn) -> list[Step]:
    """Steps that mostly extend the one before, sometimes after a changed history or at another temperature."""
    steps: list[Step] = []
    for index in range(draw(st.integers(1, 6))):
        extends = bool(steps) and draw(st.integers(0, 3)) > 0
        before = [*steps[-1].prompt_ids, *steps[-1].response_ids] if extends else [draw(st.integers(0, 2))]
        response = draw(tokens)
        marks = tuple(float(100 * index + place) for place in range(len(response)))  # tells every sampled token apart
        steps.append(
            Step(
                (*before, *draw(tokens)),
                tuple(response),
                logprobs=marks,
                versions=(index,) * len(response),
                advantage=marks,
                temperature=draw(st.sampled_from([1.0, 1.0, 1.0, 0.5])),
            )
        )
    return steps


@examples
@given(conversations())
def test_every_sampled_token_is_trained_exactly_once(steps: list[Step]) -> None:
    kept = [
        entry
        for row in rows(*steps)
        for entry in zip(
            *(trained(row, values) for values in (row.logprobs, row.advantages, row.versions, row.tokens[1:])),
            strict=True,
        )
    ]
    sampled = [
        entry
        for s in steps
        for entry in zip(s.logprobs or (), s.advantage or (), s.versions or (), s.response_ids, strict=True)
    ]
    assert sorted(kept) == sampled  # their marks tell them apart, and rise
    for row in rows(*steps):
        assert list(trained(row, row.logprobs)) == sorted(trained(row, row.logprobs))


@examples
@given(conversations())
def test_every_sampled_token_stands_in_the_context_and_temperature_it_was_sampled_in(steps: list[Step]) -> None:
    for sampled in steps:
        start = len(sampled.prompt_ids)
        whole = (*sampled.prompt_ids, *sampled.response_ids)
        assert any(
            row.tokens[: len(whole)] == whole
            and row.temperature == sampled.temperature
            and row.logprobs[start - 1 : len(whole) - 1] == sampled.logprobs
            for row in rows(*steps)
        )


def test_conversations_that_take_turns_are_a_row_each() -> None:
    first, other = step([1], [2]), step([5], [6])
    again, more = step([1, 2, 3], [4]), step([5, 6, 7], [8])
    assert [row.tokens for row in rows(first, other, again, more)] == [(1, 2, 3, 4), (5, 6, 7, 8)]


def test_two_replies_to_the_same_prompt_are_a_row_each() -> None:
    assert [row.tokens for row in rows(step([1], [2]), step([1], [3]), step([1, 2, 4], [5]))] == [
        (1, 2, 4, 5),
        (1, 3),
    ]


@examples
@given(conversations())
def test_what_was_not_sampled_carries_nothing(steps: list[Step]) -> None:
    for row in rows(*steps):
        kept = zip(row.loss_mask, row.versions, row.logprobs, row.advantages, strict=True)
        assert all(entry[1:] == (NO_VERSION, 0.0, 0.0) for entry in kept if not entry[0])
