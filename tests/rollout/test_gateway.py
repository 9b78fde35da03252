"""The gateway: real clients in front, exact tokens behind."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import anthropic
import openai
import pytest

from fakes import CharTokenizer, FakeEngine, char_chat
from headrace.data.episode import TerminationReason
from headrace.data.task import Task
from headrace.engines.base import SamplingParams
from headrace.errors import EngineError
from headrace.rollout.agent_loop import AgentLoop, Limits, RolloutSpec
from headrace.rollout.budget import Budget
from headrace.rollout.gateway import ModelSession, close_gateway, model_session
from headrace.rollout.model_client import Model

SAMPLING = SamplingParams(temperature=1.0, top_p=1.0, top_k=0, max_tokens=100)
ASKED: list[Any] = [{"role": "user", "content": "Say a word."}]
SEARCH = {"name": "search", "description": "Look it up.", "parameters": {"type": "object", "properties": {}}}
CALLS = '<tool_call>{"name": "search", "arguments": {"text": "é"}}</tool_call>'
IDS = {"return_token_ids": True}


@pytest.fixture(autouse=True)
async def _closed() -> AsyncIterator[None]:
    yield
    await close_gateway()


def in_turn(*replies: str) -> Callable[[int], str]:
    said = iter(replies)
    return lambda seed: next(said)


def model_of(*replies: str, **options: Any) -> Model:
    engine = FakeEngine(in_turn(*replies), **options) if replies else FakeEngine(**options)
    return Model(engine, char_chat(), SAMPLING, seed=1)


def open_ai(session: ModelSession, **options: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, **options)


def claude(session: ModelSession, **options: Any) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=session.root_url, api_key=session.api_key, **options)


def sampled(model: Model) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Prompt and response ids of the recorded Steps."""
    return [(step.prompt_ids, step.response_ids) for t in model.trajectories() for step in t.steps]


def told(answer: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The same, as a client was told."""
    ids = answer.headrace if hasattr(answer, "headrace") else answer["headrace"]
    return tuple(ids["prompt_token_ids"]), tuple(ids["completion_token_ids"])


# ---- chat completions ------------------------------------------------------------------------------------------------


async def test_a_conversation_over_http_is_one_row_of_exact_tokens() -> None:
    model = model_of("hello", "bye")
    async with model_session(model) as session, open_ai(session) as client:
        first = await client.chat.completions.create(model="any", messages=ASKED, extra_body=IDS)
        message = first.choices[0].message
        assert (message.content, first.choices[0].finish_reason) == ("hello", "stop")
        more: Any = [*ASKED, message.model_dump(), {"role": "user", "content": "More."}]
        second = await client.chat.completions.create(model="any", messages=more, extra_body=IDS)
    assert sampled(model) == [told(first), told(second)]
    (_, (prompt, _)) = sampled(model)
    assert prompt[: len(sum(told(first), ()))] == sum(told(first), ())
    assert first.usage is not None and first.usage.prompt_tokens == len(told(first)[0])
    assert first.usage.completion_tokens == len("hello") + 1 and model.diverged_prefixes == 0


async def test_a_stream_says_the_same_in_pieces() -> None:
    model = model_of("a longer reply")
    async with model_session(model) as session, open_ai(session) as client:
        stream = await client.chat.completions.create(
            model="any", messages=ASKED, stream=True, stream_options={"include_usage": True}, extra_body=IDS
        )
        chunks = [chunk async for chunk in stream]
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(pieces) == "a longer reply" and sum(map(bool, pieces)) > 1
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 15
    assert [told(chunk) for chunk in chunks if hasattr(chunk, "headrace")] == sampled(model)


async def test_tools_are_called_and_their_answers_extend_the_row() -> None:
    model = model_of(CALLS, "found it")
    tools: Any = [{"type": "function", "function": SEARCH}]
    async with model_session(model) as session, open_ai(session) as client:
        first = await client.chat.completions.create(model="any", messages=ASKED, tools=tools)
        choice = first.choices[0]
        assert choice.finish_reason == "tool_calls" and choice.message.content is None and choice.message.tool_calls
        asked: Any = choice.message.tool_calls[0]
        assert (asked.function.name, json.loads(asked.function.arguments)) == ("search", {"text": "é"})
        answer = {"role": "tool", "tool_call_id": asked.id, "content": "42"}
        more: Any = [*ASKED, choice.message.model_dump(exclude_none=True), answer]
        second = await client.chat.completions.create(model="any", messages=more, tools=tools)
    assert second.choices[0].message.content == "found it"
    (prompt, reply), (extended, _) = sampled(model)
    assert extended[: len(prompt + reply)] == prompt + reply


async def test_a_streamed_tool_call_is_put_together_by_the_client() -> None:
    model = model_of(CALLS)
    tools: Any = [{"type": "function", "function": SEARCH}]
    async with (
        model_session(model) as session,
        open_ai(session) as client,
        client.chat.completions.stream(model="any", messages=ASKED, tools=tools) as stream,
    ):
        final = await stream.get_final_completion()
    calls: Any = final.choices[0].message.tool_calls
    assert json.loads(calls[0].function.arguments) == {"text": "é"}


async def test_tools_that_must_not_be_chosen_are_not_shown() -> None:
    model = model_of(CALLS)
    tools: Any = [{"type": "function", "function": SEARCH}]
    async with model_session(model) as session, open_ai(session) as client:
        reply = await client.chat.completions.create(model="any", messages=ASKED, tools=tools, tool_choice="none")
    assert reply.choices[0].message.content == CALLS
    assert "search" not in CharTokenizer().decode(sampled(model)[0][0])


@pytest.mark.parametrize("top", [0, 1])
async def test_logprobs_are_those_that_were_sampled_with(top: int) -> None:
    model = model_of("hi")
    async with model_session(model) as session, open_ai(session) as client:
        reply = await client.chat.completions.create(model="any", messages=ASKED, logprobs=True, top_logprobs=top)
    content: Any = reply.choices[0].logprobs and reply.choices[0].logprobs.content
    (step,) = model.trajectories()[0].steps
    assert [entry.token for entry in content] == ["h", "i", ""]
    assert tuple(entry.logprob for entry in content) == step.logprobs
    assert [len(entry.top_logprobs) for entry in content] == [top] * 3


async def test_the_model_name_selects_the_role() -> None:
    model = model_of("a", "b", "c")
    async with model_session(model) as session, open_ai(session) as client:
        for name in ("headrace/critic", "gpt-5", "headrace/critic"):
            await client.chat.completions.create(model=name, messages=ASKED)
        assert [found.id async for found in client.models.list()] == ["headrace/agent"]
    assert [(t.name, len(t.steps)) for t in model.trajectories()] == [("critic", 2), ("agent", 1)]


async def test_a_reply_can_be_cut_shorter_but_not_longer_than_the_run_says() -> None:
    model = model_of("abcdef", "x" * 200, "one END two")
    async with model_session(model) as session, open_ai(session) as client:
        short = await client.chat.completions.create(model="m", messages=ASKED, max_completion_tokens=3)
        long = await client.chat.completions.create(model="m", messages=ASKED, max_tokens=10_000)
        stopped = await client.chat.completions.create(model="m", messages=ASKED, stop="END")
    assert (short.choices[0].message.content, short.choices[0].finish_reason) == ("abc", "length")
    assert len(long.choices[0].message.content or "") == 100
    assert stopped.choices[0].message.content == "one "


async def test_what_is_sampled_from_is_the_runs_to_say_and_a_client_is_warned_once(caplog: Any) -> None:
    model = model_of("a", "b")
    async with model_session(model) as session, open_ai(session) as client:
        for _ in range(2):
            await client.chat.completions.create(model="m", messages=ASKED, temperature=0.1, top_p=1.0, seed=7)
    assert {step.temperature for step in model.trajectories()[0].steps} == {1.0}
    ignored = [record.getMessage() for record in caplog.records if "ignored" in record.getMessage()]
    assert ignored == ["clients' temperature is ignored: the run file decides how replies are sampled"]


# ---- completions -----------------------------------------------------------------------------------------------------


async def test_plain_text_is_completed_and_continues_with_exact_ids() -> None:
    model = model_of("two", "four")
    async with model_session(model) as session, open_ai(session) as client:
        first = await client.completions.create(model="m", prompt="one ", logprobs=0, extra_body=IDS)
        second = await client.completions.create(model="m", prompt="one two three ", stream=True, extra_body=IDS)
        chunks = [chunk async for chunk in second]
    assert first.choices[0].text == "two" and "".join(chunk.choices[0].text for chunk in chunks) == "four"
    assert first.choices[0].logprobs is not None and first.choices[0].logprobs.tokens == ["t", "w", "o", ""]
    assert sampled(model) == [told(first), told(chunks[-1])]
    so_far = sum(told(first), ())
    assert sampled(model)[1][0] == (*so_far, *map(ord, " three "))


async def test_ids_are_completed_as_they_are() -> None:
    model = model_of("x")
    async with model_session(model) as session, open_ai(session) as client:
        await client.completions.create(model="m", prompt=[65, 66, 0])
    assert sampled(model)[0][0] == (65, 66, 0)


# ---- responses -------------------------------------------------------------------------------------------------------


async def test_responses_continue_from_the_one_before() -> None:
    model = model_of(CALLS, "found it")
    tools: Any = [{"type": "function", **SEARCH, "strict": False}]
    async with model_session(model) as session, open_ai(session) as client:
        first = await client.responses.create(model="m", input="Say a word.", tools=tools, extra_body=IDS)
        (asked,) = first.output
        assert asked.type == "function_call" and json.loads(asked.arguments) == {"text": "é"}
        output: Any = [{"type": "function_call_output", "call_id": asked.call_id, "output": "42"}]
        second = await client.responses.create(
            model="m", input=output, tools=tools, previous_response_id=first.id, extra_body=IDS
        )
    assert second.output_text == "found it" and second.status == "completed"
    assert sampled(model) == [told(first), told(second)] and model.diverged_prefixes == 0


async def test_a_response_given_back_as_items_extends_the_row() -> None:
    model = model_of(f"Let me see. {CALLS}", "found it")
    tools: Any = [{"type": "function", **SEARCH, "strict": False}]
    async with model_session(model) as session, open_ai(session) as client:
        first = await client.responses.create(model="m", input=ASKED, tools=tools)
        assert first.output_text == "Let me see." and first.output[1].type == "function_call"
        items: Any = [*ASKED, *(item.model_dump() for item in first.output)]
        items.append({"type": "function_call_output", "call_id": first.output[1].call_id, "output": "42"})
        await client.responses.create(model="m", input=items, tools=tools)
    assert model.diverged_prefixes == 0


async def test_a_streamed_response_reports_its_events_in_order() -> None:
    model = model_of(f"Let me see. {CALLS}")
    tools: Any = [{"type": "function", **SEARCH, "strict": False}]
    async with model_session(model) as session, open_ai(session) as client:
        stream = await client.responses.create(model="m", input=ASKED, tools=tools, stream=True)
        events: list[Any] = [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == "Let me see."
    assert events[-1].response.output[1].name == "search" and events[-1].response.usage.output_tokens > 0


# ---- messages --------------------------------------------------------------------------------------------------------


async def test_anthropics_client_holds_a_conversation_with_tools() -> None:
    model = model_of(CALLS, "found it")
    tools: Any = [{"name": "search", "description": "Look it up.", "input_schema": SEARCH["parameters"]}]
    given: dict[str, Any] = {"model": "m", "max_tokens": 99, "system": "Be brief.", "tools": tools, "extra_body": IDS}
    async with model_session(model) as session, claude(session) as client:
        first = await client.messages.create(messages=ASKED, **given)
        (block,) = first.content
        assert first.stop_reason == "tool_use" and block.type == "tool_use" and block.input == {"text": "é"}
        result = {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "42"}]}
        assistant = {"role": "assistant", "content": [found.model_dump() for found in first.content]}
        more: Any = [*ASKED, assistant, {"role": "user", "content": [result]}]
        second = await client.messages.create(messages=more, **given)
        count = await client.messages.count_tokens(model="m", messages=ASKED, system="Be brief.", tools=tools)
    text: Any = second.content[0]
    assert (text.text, second.stop_reason) == ("found it", "end_turn")
    assert sampled(model) == [told(first), told(second)] and model.diverged_prefixes == 0
    assert count.input_tokens == first.usage.input_tokens == len(sampled(model)[0][0])


async def test_anthropics_stream_is_put_together_by_its_client() -> None:
    model = model_of(f"Let me see. {CALLS}")
    tools: Any = [{"name": "search", "input_schema": SEARCH["parameters"]}]
    async with (
        model_session(model) as session,
        claude(session) as client,
        client.messages.stream(model="m", max_tokens=99, messages=ASKED, tools=tools) as stream,
    ):
        texts = [text async for text in stream.text_stream]
        final: Any = await stream.get_final_message()
    assert "".join(texts) == "Let me see." and final.content[1].input == {"text": "é"}
    assert final.usage.output_tokens == len(sampled(model)[0][1])


async def test_a_stop_sequence_is_named() -> None:
    model = model_of("one END two")
    async with model_session(model) as session, claude(session) as client:
        reply = await client.messages.create(model="m", max_tokens=99, messages=ASKED, stop_sequences=["END"])
    assert (reply.stop_reason, reply.stop_sequence) == ("stop_sequence", "END")


# ---- clients that block ----------------------------------------------------------------------------------------------


async def test_clients_without_async_work_from_a_thread() -> None:
    model = model_of("one", "two", "three", "four")

    def talk(session: ModelSession) -> list[str]:
        with openai.OpenAI(base_url=session.base_url, api_key="any") as client:
            one = client.chat.completions.create(model="m", messages=ASKED).choices[0].message.content or ""
            stream = client.chat.completions.create(model="m", messages=ASKED, stream=True)
            two = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        with anthropic.Anthropic(base_url=session.root_url, api_key="any") as client:
            block: Any = client.messages.create(model="m", messages=ASKED, max_tokens=9).content[0]
            with client.messages.stream(model="m", messages=ASKED, max_tokens=9) as stream:
                return [one, two, block.text, "".join(stream.text_stream)]

    async with model_session(model) as session:
        assert await asyncio.to_thread(talk, session) == ["one", "two", "three", "four"]


# ---- limits and failures ---------------------------------------------------------------------------------------------


async def test_a_prompt_that_is_too_long_is_reported_as_openai_reports_it() -> None:
    model = model_of(room=10)
    with pytest.raises(EngineError, match="more than 10"):
        async with model_session(model) as session, open_ai(session) as client:
            try:
                await client.chat.completions.create(model="m", messages=ASKED)
            except openai.BadRequestError as error:
                assert error.code == "context_length_exceeded"
                raise
    assert model.failure is None


async def roll_out(run: Any, engine: FakeEngine, **limits: Any) -> Any:
    manager = AgentLoop(run, engine, char_chat(), None, Limits(retries=0, **limits))
    return await manager.roll_out(RolloutSpec(Task("t", messages=tuple(ASKED)), 0, 0, 1), SAMPLING)


async def talk_on(task: Task, model: Model) -> float:
    """A conversation without an end."""
    async with model_session(model) as session, open_ai(session) as client:
        messages: Any = list(task.messages)
        while True:
            reply = await client.chat.completions.create(model="m", messages=messages)
            messages += [reply.choices[0].message.model_dump(), {"role": "user", "content": "Go on."}]


async def test_a_budget_that_is_used_up_ends_the_episode_without_a_failure() -> None:
    episode = await roll_out(talk_on, FakeEngine(), budget=Budget(turns=2))
    assert "the workflow returned no reward" in episode.error  # as without the gateway: there is no judger
    assert len(episode.trajectories[0].steps) == 2
    manager = AgentLoop(
        talk_on, FakeEngine(), char_chat(), None, Limits(budget=Budget(turns=2)), needs_reward=lambda role: False
    )
    episode = await manager.roll_out(RolloutSpec(Task("t", messages=tuple(ASKED)), 0, 0, 1), SAMPLING)
    assert (episode.termination, episode.error) == (TerminationReason.TURNS, None)


async def test_an_engine_failure_ends_the_run_whatever_the_client_makes_of_it() -> None:
    statuses: list[int] = []

    async def run(task: Task, model: Model) -> float:
        async with model_session(model) as session, open_ai(session) as client:
            try:
                await client.chat.completions.create(model="m", messages=ASKED)
            except openai.InternalServerError as error:
                statuses.append(error.status_code)
        return 1.0

    engine = FakeEngine(breaks="out of memory")
    with pytest.raises(EngineError, match="out of memory"):
        await roll_out(run, engine)
    assert statuses == [500] and len(engine.requests) == 1  # the client does not try again


async def test_the_time_of_an_episode_ends_its_calls() -> None:
    engine = FakeEngine(takes_s=30)
    episode = await roll_out(talk_on, engine, timeout_s=0.3)
    assert episode.termination == TerminationReason.TIMEOUT and engine.busy == 0


async def test_a_failure_while_a_stream_waits_is_reported_in_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace.config import GatewaySection
    from headrace.rollout import gateway

    monkeypatch.setattr(gateway, "_settings", GatewaySection(keep_alive_s=0.02))
    for client_of, error in ((open_ai, openai.APIError), (claude, anthropic.APIStatusError)):
        model = model_of(breaks="out of memory", takes_s=0.1)
        with pytest.raises(EngineError, match="out of memory"):
            async with model_session(model) as session, client_of(session) as client:
                with pytest.raises(error, match="out of memory"):
                    if isinstance(client, openai.AsyncOpenAI):
                        async for _ in await client.chat.completions.create(model="m", messages=ASKED, stream=True):
                            pass
                    else:
                        async with client.messages.stream(model="m", max_tokens=9, messages=ASKED) as stream:
                            await stream.get_final_message()
