"""Rows of verl and Steps: nothing is trained that no call has sampled, and nothing is changed on the way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes import examples
from headrace.config.loading import build_config
from headrace.config.names import name_problems
from headrace.data.episode import FinishReason, ModelOutput, Step, Trajectory
from headrace.data.sample import merge_steps
from headrace.errors import ConfigError, WorkflowError
from headrace.registry import resolve
from headrace.verl.rows import row_of_steps, steps_of


def call(prompt: Sequence[int], reply: Sequence[int], number: int = 0, version: int = 0) -> ModelOutput:
    logprobs = tuple(-0.5 - index / 16 for index in range(len(reply)))
    return ModelOutput(
        "text", tuple(prompt), tuple(reply), logprobs, (), (version,) * len(reply), FinishReason.STOP, 0.7, call=number
    )


def decode(ids: Sequence[int]) -> str:
    return " ".join(map(str, ids))


def steps(prompt: list[int], response: list[int], mask: list[int], calls: list[ModelOutput], **given: Any) -> Any:
    return steps_of(prompt, response, mask, given.get("logprobs"), calls, decode)


TURNS = [call([1, 2], [3, 4], 0, version=5), call([1, 2, 3, 4, 9, 9], [6, 7], 1, version=6)]


def test_two_turns_become_one_row_with_the_same_mask() -> None:
    made = steps([1, 2], [3, 4, 9, 9, 6, 7], [1, 1, 0, 0, 1, 1], TURNS)
    (row,) = merge_steps(Trajectory(made))
    assert row.tokens == (1, 2, 3, 4, 9, 9, 6, 7)
    assert row.loss_mask == (0, 1, 1, 0, 0, 1, 1)
    assert [step.versions for step in made] == [(5, 5), (6, 6)]
    assert [step.temperature for step in made] == [0.7, 0.7]


def test_the_loops_own_logprobs_are_kept() -> None:
    (step,) = steps([1, 2], [3, 4], [1, 1], TURNS, logprobs=[-0.25, -0.125])
    assert step.logprobs == (-0.25, -0.125)
    (step,) = steps([1, 2], [3, 4], [1, 1], TURNS)
    assert step.logprobs == TURNS[0].logprobs


def test_a_row_that_was_cut_ends_by_length() -> None:
    made = steps([1, 2], [3, 4, 9, 9, 6], [1, 1, 0, 0, 1], TURNS)
    assert made[-1].response_ids == (6,) and made[-1].finish_reason == FinishReason.LENGTH
    assert made[-1].text == "6" and made[0].finish_reason == FinishReason.STOP


def test_masked_tokens_of_a_reply_are_not_trained() -> None:
    made = steps([1, 2], [3, 4, 5], [1, 0, 1], [call([1, 2], [3, 4, 5])])
    (row,) = merge_steps(Trajectory(made))
    assert row.loss_mask == (0, 1, 0, 1)


@pytest.mark.parametrize(
    ("prompt", "response", "mask"),
    [
        ([1, 2], [3, 8], [1, 1]),  # another token than was sampled
        ([1, 5], [3, 4], [1, 1]),  # after another prompt
        ([1, 2], [3, 4, 9, 9], [1, 1, 0, 1]),  # a tool's token
    ],
)
def test_a_token_that_no_call_sampled_is_refused(prompt: list[int], response: list[int], mask: list[int]) -> None:
    with pytest.raises(WorkflowError, match="which no model call has sampled there"):
        steps(prompt, response, mask, TURNS)


def test_lists_of_different_lengths_are_refused() -> None:
    with pytest.raises(WorkflowError, match="equally many"):
        steps([1, 2], [3, 4], [1], TURNS)


@examples
@given(
    st.lists(st.tuples(st.lists(st.integers(0, 9), min_size=1), st.lists(st.integers(0, 9), min_size=1)), min_size=1)
)
def test_steps_become_a_row_and_come_back(turns: list[tuple[list[int], list[int]]]) -> None:
    so_far: tuple[int, ...] = ()
    calls: list[ModelOutput] = []
    for number, (new, reply) in enumerate(turns):
        calls.append(call((*so_far, *new), reply, number, version=number))
        so_far = (*so_far, *new, *reply)
    sampled = Trajectory(tuple(Step.from_model_output(one) for one in calls))
    row = row_of_steps(sampled)
    back = steps(row.prompt_ids, row.response_ids, row.mask, calls, logprobs=row.logprobs)
    assert [(s.prompt_ids, s.response_ids, s.logprobs, s.versions) for s in back] == [
        (s.prompt_ids, s.response_ids, s.logprobs, s.versions) for s in sampled.steps
    ]


def test_a_rewritten_conversation_is_no_single_row() -> None:
    broken = Trajectory((Step((1, 2), (3,), (-0.1,), (0,)), Step((1, 9), (4,), (-0.1,), (0,))))
    with pytest.raises(WorkflowError, match="2 rows"):
        row_of_steps(broken)
    with pytest.raises(WorkflowError, match="no model call"):
        row_of_steps(Trajectory(()))


def test_without_verl_the_name_of_an_agent_loop_says_what_is_missing() -> None:
    try:
        import verl  # noqa: F401  # pyright: ignore[reportMissingImports, reportUnusedImport]
    except ImportError:
        config = build_config({"workflow": {"name": "verl:my_loops:MyLoop"}})
        (problem,) = name_problems(config, objects=("tasks",))
        assert "workflow.name" in problem and "verl_agent_loops.md" in problem
    else:
        with pytest.raises(ConfigError, match="no class derived from"):
            resolve("workflow", "verl:verl:DataProto")
