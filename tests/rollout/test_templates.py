"""Whatever the template and the conversation: what was sampled is what is trained, and is trained once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes import FakeEngine
from headrace.data.sample import Sample, merge_steps
from headrace.data.task import Message
from headrace.engines.base import SamplingParams
from headrace.rollout.chat import ChatTemplate
from headrace.rollout.model_client import Model
from templates import TEMPLATES, tokenizer_with

TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "Add.", "parameters": {"type": "object", "properties": {}}},
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2]}}\n</tool_call>'
USER: Message = {"role": "user", "content": "What is 1 + 2?"}


class Scripted:
    """Says the given replies, whose ids may be any, one after the other."""

    def __init__(self, tokenizer: Any, replies: Sequence[Sequence[int]]) -> None:
        self._replies = iter(replies)
        self.engine = FakeEngine(lambda seed: next(self._replies), tokenizer)
        self.model = Model(self.engine, ChatTemplate(tokenizer), SamplingParams(max_tokens=400), seed=1)


def split(tokenizer: Any, text: str, how: int) -> list[int]:
    """Ids of the text as a tokenizer splits it, letter by letter, or in odd pieces."""
    size = {0: len(text) or 1, 1: 1}.get(how, how)
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    return [i for piece in pieces for i in tokenizer.encode(piece, add_special_tokens=False)]


def rows_of(model: Model) -> list[Sample]:
    return [row for trajectory in model.trajectories(1.0) for row in merge_steps(trajectory)]


def check(scripted: Scripted) -> None:
    """Every sampled token is in one row, once, behind the very prompt that it was sampled after."""
    rows = rows_of(scripted.model)
    steps = [step for trajectory in scripted.model.trajectories() for step in trajectory.steps]
    assert sum(row.trained_tokens for row in rows) == sum(len(step.response_ids) for step in steps)
    for step, request in zip(steps, scripted.engine.requests, strict=True):
        assert step.prompt_ids == request.prompt_ids
        whole = (*step.prompt_ids, *step.response_ids)
        start, end = len(step.prompt_ids) - 1, len(whole) - 1
        held = [r for r in rows if r.tokens[: len(whole)] == whole and all(r.loss_mask[start:end])]
        assert held, "a sampled token is not trained where it was sampled"


def said(template: str, *texts: str, ends: bool = True, how: int = 1) -> Scripted:
    tokenizer = tokenizer_with(template)
    end = [tokenizer.eos_token_id] if ends else []
    return Scripted(tokenizer, [[*split(tokenizer, text, how), *end] for text in texts])


ODD = {
    "plain": "It is 3.",
    "empty": "",
    "spaces around": "  3 \n",
    "unicode": "drei: ３ é 漢 🙂",
    "tool call": f"I add.\n{CALL}",
    "tool call written oddly": '<tool_call>{"name":"add",  "arguments":{"b":[2],"a":1}}</tool_call>',
    "two tool calls": f"{CALL}\n{CALL}",
    "a broken tool call": '<tool_call>{"name": "add", </tool_call>',
    "thinking": "<think>\nhm\n</think>\n\n3",
    "thinking oddly": "<think>hm</think>3",
    "thinking, then a tool call": f"<think>\nadd!\n</think>\n\n{CALL}",
    "template text": "<|im_start|>user\nno<|im_end|>",
}


@pytest.mark.parametrize("ends", [True, False], ids=["ended", "cut"])
@pytest.mark.parametrize("reply", ODD)
@pytest.mark.parametrize("template", TEMPLATES)
async def test_a_second_turn_keeps_what_was_sampled(template: str, reply: str, ends: bool) -> None:
    scripted = said(template, ODD[reply], "done", ends=ends)
    first = await scripted.model.chat([USER], tools=[TOOL])
    answers = [{"role": "tool", "tool_call_id": c["id"], "content": "3"} for c in first.tool_calls]
    await scripted.model.chat([USER, first.message, *(answers or [USER])], tools=[TOOL])
    check(scripted)


@pytest.mark.parametrize("reply", ["plain", "spaces around", "unicode", "tool call", "tool call written oddly"])
@pytest.mark.parametrize("template", sorted(set(TEMPLATES) - {"thinking opened"}))
async def test_an_unchanged_history_is_one_row(template: str, reply: str) -> None:
    scripted = said(template, ODD[reply], "done")
    first = await scripted.model.chat([USER], tools=[TOOL])
    assert bool(first.tool_calls) == ("tool call" in reply)
    answers = [{"role": "tool", "tool_call_id": c["id"], "content": "3"} for c in first.tool_calls]
    await scripted.model.chat([USER, first.message, *(answers or [USER])], tools=[TOOL])
    assert scripted.model.diverged_prefixes == 0
    (row,) = rows_of(scripted.model)
    assert row.tokens[: len(first.prompt_ids) + len(first.completion_ids)] == (*first.prompt_ids, *first.completion_ids)


async def test_reasoning_that_the_template_strips_begins_a_new_row_and_is_counted() -> None:
    scripted = said("thinking stripped", ODD["thinking"], "done")
    first = await scripted.model.chat([USER])
    assert first.reasoning == "hm" and first.content == "3"
    await scripted.model.chat([USER, first.message, USER])
    assert scripted.model.diverged_prefixes == 1
    assert len(rows_of(scripted.model)) == 2
    assert "hm" not in tokenizer_with("chatml").decode(list(scripted.engine.requests[1].prompt_ids))


async def test_reasoning_is_kept_within_a_tool_loop() -> None:
    scripted = said("thinking stripped", ODD["thinking, then a tool call"], "done")
    first = await scripted.model.chat([USER], tools=[TOOL])
    answer = {"role": "tool", "tool_call_id": first.tool_calls[0]["id"], "content": "3"}
    await scripted.model.chat([USER, first.message, answer], tools=[TOOL])
    assert scripted.model.diverged_prefixes == 0 and len(rows_of(scripted.model)) == 1


async def test_reasoning_that_the_program_left_out_begins_a_new_row() -> None:
    scripted = said("thinking kept", ODD["thinking"], "done")
    first = await scripted.model.chat([USER])
    await scripted.model.chat([USER, {"role": "assistant", "content": first.content}, USER])
    assert scripted.model.diverged_prefixes == 1


async def test_arguments_that_a_program_wrote_again_are_the_same_call() -> None:
    scripted = said("tools", ODD["tool call written oddly"], "done")
    first = await scripted.model.chat([USER], tools=[TOOL])
    asked = first.tool_calls[0]
    again = {"id": "other", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": [2]}'}}
    answer = {"role": "tool", "tool_call_id": "other", "content": "3"}
    assert json.loads(asked["function"]["arguments"]) == {"a": 1, "b": [2]}
    await scripted.model.chat(
        [USER, {"role": "assistant", "content": None, "tool_calls": [again]}, answer], tools=[TOOL]
    )
    assert scripted.model.diverged_prefixes == 0


async def test_conversations_that_take_turns_are_distinguished() -> None:
    scripted = said("chatml", "one", "two", "three", "four")
    other: Message = {"role": "user", "content": "Another."}
    first = await scripted.model.chat([USER])
    second = await scripted.model.chat([other])
    await scripted.model.chat([USER, first.message, USER])
    await scripted.model.chat([other, second.message, USER])
    check(scripted)
    assert len(rows_of(scripted.model)) == 2


pieces = st.sampled_from([*ODD.values(), " ", "\n", "3", "é", "<think>", "</think>", "<tool_call>", "</tool_call>"])
moves = st.sampled_from(["reply", "stripped", "rewritten", "compacted", "fresh", "tool", "empty", "parts"])


@settings(deadline=None, max_examples=150)
@given(
    template=st.sampled_from(sorted(TEMPLATES)),
    turns=st.lists(
        st.tuples(st.lists(pieces, max_size=3), st.integers(0, 3), st.booleans(), moves), min_size=1, max_size=5
    ),
    tools=st.booleans(),
)
def test_every_sampled_token_is_trained_at_most_once_and_as_it_was_sampled(
    template: str, turns: list[tuple[list[str], int, bool, str]], tools: bool
) -> None:
    tokenizer = tokenizer_with(template)
    replies = [
        [*split(tokenizer, "".join(texts), how), *([tokenizer.eos_token_id] if ends else [])] or [65]
        for texts, how, ends, _ in turns
    ]
    scripted = Scripted(tokenizer, replies)
    asyncio.run(_converse(scripted.model, [move for *_, move in turns], [TOOL] if tools else []))
    check(scripted)


async def _converse(model: Model, plan: list[str], tools: list[Any]) -> None:
    messages: list[Message] = [USER]
    for move in plan:
        reply = await model.chat(messages, tools=tools)
        messages = _go_on(messages, reply, move)


def _go_on(messages: list[Message], reply: Any, move: str) -> list[Message]:
    message = dict(reply.message)
    if move == "stripped":
        message.pop("reasoning_content", None)
    elif move == "rewritten":
        message["content"] = f"{message['content']}!"
    elif move == "compacted":
        return [{"role": "system", "content": "It went on."}, USER]
    elif move == "fresh":
        return [{"role": "user", "content": "Something else."}]
    elif move == "empty":
        return [*messages, message, {"role": "user", "content": ""}]
    elif move == "parts":
        return [
            *messages,
            message,
            {"role": "user", "content": [{"type": "text", "text": "Go"}, {"type": "text", "text": " on"}]},
        ]
    elif move == "tool":
        answers = [{"role": "tool", "tool_call_id": c["id"], "content": "3"} for c in reply.tool_calls]
        return [*messages, message, *(answers or [USER])]
    return [*messages, message, USER]
