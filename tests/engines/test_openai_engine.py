"""A model behind a URL: what is asked and answered, what is tried again, and what a workflow sees of it."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import time
from collections.abc import Callable
from email.utils import formatdate
from typing import Any

import pytest

from fake_server import Answer, Received, completion, serving
from headrace.data.episode import Episode, TerminationReason
from headrace.data.task import Task
from headrace.engines import http
from headrace.engines.base import SamplingParams
from headrace.engines.openai import OpenAIClient
from headrace.errors import (
    ConfigError,
    EngineError,
    InfrastructureError,
    RefusedError,
    UnreachableError,
    is_infrastructure,
)
from headrace.judge.base import FunctionJudger
from headrace.rollout.agent_loop import AgentLoop, Limits
from headrace.rollout.budget import Budget
from headrace.rollout.model_client import Model
from headrace.rollout.remote_model import NoEngine, remote_model

HELLO = [{"role": "user", "content": "Hello?"}]
SAMPLING = SamplingParams(temperature=0.5, top_p=0.9, top_k=0, max_tokens=11, stop=("END",))
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "_FIRST_PAUSE_S", 0.01)


def in_turn(*answers: Answer) -> Callable[[Received], Answer]:
    """One answer after the other; the last one for ever."""
    rest = list(answers)
    return lambda asked: rest.pop(0) if len(rest) > 1 else rest[0]


# ---- the client ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1", "/v1/", "/v1/chat/completions"])
async def test_a_reply_has_text_reasoning_finish_reason_and_usage(path: str) -> None:
    said = completion("Good day.", "length", tokens=5, reasoning_content="be polite")
    with serving(lambda asked: said) as server:
        client = OpenAIClient(server.url + path, "parrot")
        reply = await client.chat(HELLO, SAMPLING, seed=2**62 + 5)
        await client.close()
    assert (reply.text, reply.reasoning, reply.finish_reason) == ("Good day.", "be polite", "length")
    assert (reply.prompt_tokens, reply.completion_tokens, reply.tool_calls) == (7, 5, ())
    (asked,) = server.asked
    assert asked.path == "/v1/chat/completions"
    assert asked.body == {
        "model": "parrot", "messages": HELLO, "temperature": 0.5, "top_p": 0.9, "max_tokens": 11, "stop": ["END"],
        "seed": 5,
    }  # fmt: skip
    assert "authorization" not in asked.headers


async def test_tools_are_offered_and_their_calls_come_back() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"at": "Rome"}'}}
    with serving(lambda asked: completion(None, "tool_calls", tool_calls=[call])) as server:
        reply = await OpenAIClient(server.url, "parrot").chat(HELLO, SAMPLING, [WEATHER])
    assert server.asked[0].body["tools"] == [WEATHER]
    assert (reply.text, reply.finish_reason, reply.tool_calls) == ("", "stop", (call,))


@pytest.mark.parametrize(
    "trouble",
    [
        Answer({"error": {"message": "slow down"}}, 429),
        Answer("oops", 500),
        Answer({}, 503),
        Answer("", hangs_up=True),
    ],
    ids=["429", "500", "503", "hangs up"],
)
async def test_failures_of_the_server_are_tried_again(trouble: Answer) -> None:
    with serving(in_turn(trouble, trouble, completion("there"))) as server:
        reply = await OpenAIClient(server.url, "parrot").chat(HELLO, SAMPLING)
    assert reply.text == "there" and len(server.asked) == 3


async def test_failures_that_stay_name_url_status_and_what_the_server_said() -> None:
    with (
        serving(lambda asked: Answer({"error": {"message": "out of memory"}}, 500)) as server,
        pytest.raises(InfrastructureError, match=r"127.0.0.1.*500: out of memory; given up after 3") as caught,
    ):
        await OpenAIClient(server.url, "parrot", retries=2).chat(HELLO, SAMPLING)
    assert len(server.asked) == 3 and is_infrastructure(caught.value)


@pytest.mark.parametrize("status", [400, 401, 403, 404, 422])
@pytest.mark.parametrize(
    "body", [{"error": {"message": "no such model"}}, {"detail": "no such model"}, "no such model"]
)
async def test_what_the_server_refuses_is_not_tried_again(status: int, body: Any) -> None:
    with (
        serving(lambda asked: Answer(body, status)) as server,
        pytest.raises(RefusedError, match=rf"/chat/completions answered {status}: no such model") as caught,
    ):
        await OpenAIClient(server.url, "parrot").chat(HELLO, SAMPLING)
    assert len(server.asked) == 1 and caught.value.status == status


@pytest.mark.parametrize("as_date", [False, True])
async def test_the_server_says_when_to_come_back(as_date: bool) -> None:
    after = formatdate(time.time() + 2, usegmt=True) if as_date else "0.4"
    with serving(in_turn(Answer({}, 429, {"Retry-After": after}), completion("now"))) as server:
        await OpenAIClient(server.url, "parrot").chat(HELLO, SAMPLING)
    first, second = server.asked
    assert second.at_s - first.at_s >= (0.9 if as_date else 0.38)


async def test_nobody_there_is_distinguished() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(UnreachableError, match=rf"cannot reach {url}/chat/completions.*2 attempts"):
        await OpenAIClient(url, "parrot", retries=1).chat(HELLO, SAMPLING)


async def test_an_answer_that_takes_too_long_is_given_up() -> None:
    with (
        serving(lambda asked: Answer({}, takes_s=0.5)) as server,
        pytest.raises(InfrastructureError, match=r"no answer within 0\.1 s"),
    ):
        await OpenAIClient(server.url, "parrot", timeout_s=0.1, retries=0).chat(HELLO, SAMPLING)


@pytest.mark.parametrize("body", ["<html>", {"choices": []}, {"choices": [{"message": None}]}, ["no"]])
async def test_an_answer_of_another_form_is_quoted(body: Any) -> None:
    with (
        serving(lambda asked: Answer(body)) as server,
        pytest.raises(RefusedError, match="something else than"),
    ):
        await OpenAIClient(server.url, "parrot").chat(HELLO, SAMPLING)


async def test_so_many_requests_at_once_and_no_more() -> None:
    with serving(lambda asked: Answer(completion("x").body, takes_s=0.03)) as server:
        client = OpenAIClient(server.url, "parrot", max_concurrent=3)
        await asyncio.gather(*(client.chat(HELLO, SAMPLING) for _ in range(12)))
        await client.close()
    assert server.most_busy == 3


async def test_the_key_comes_from_the_environment_and_is_never_shown(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("PARROT_KEY", "sk-secret")
    with serving(lambda asked: Answer({"error": "bad key"}, 401)) as server:
        client = OpenAIClient(server.url, "parrot", api_key_env="PARROT_KEY")
        with pytest.raises(RefusedError) as caught:
            await client.chat(HELLO, SAMPLING)
    assert server.asked[0].headers["authorization"] == "Bearer sk-secret"
    assert "sk-secret" not in f"{caught.value} {caplog.text} {vars(client)}"
    monkeypatch.delenv("PARROT_KEY")
    with pytest.raises(ConfigError, match=r"PARROT_KEY.* is not set"):
        OpenAIClient(server.url, "parrot", api_key_env="PARROT_KEY")


# ---- what a workflow sees --------------------------------------------------------------------------------------------


def manager(url: str, run: Any, budget: Budget | None = None, retries: int = 0) -> AgentLoop:
    client: Any = OpenAIClient(url, "parrot", retries=retries)
    no_template: Any = None
    judger = FunctionJudger(lambda task, text: text == task.answer)
    limits = Limits(budget=budget or Budget(), retries=0)
    return AgentLoop(run, NoEngine(), no_template, judger, limits, training=False, new_model=remote_model(client))


async def rolled_out(url: str, run: Any, budget: Budget | None = None) -> Episode:
    task = Task("1", instruction="Say hello.", answer="hello")
    (episode,) = await manager(url, run, budget).roll_out_group(task, 0, 1, 5, SAMPLING)
    return episode


async def test_a_workflow_talks_to_a_url_as_to_any_model() -> None:
    async def run(task: Task, model: Model) -> None:
        assert not model.training
        messages = list(task.messages)
        first = await model.chat(messages, temperature=0.0)
        await model.chat([*messages, first.message, {"role": "user", "content": "Again."}])

    with serving(in_turn(completion("<think>hm</think>\nhi", tokens=4), completion("hello", tokens=2))) as server:
        episode = await rolled_out(server.url, run)
    first, second = server.asked
    assert (first.body["temperature"], second.body["temperature"]) == (0.0, 0.5)
    assert [message["content"] for message in second.body["messages"]] == ["Say hello.", "hi", "Again."]
    assert second.body["messages"][1]["reasoning_content"] == "hm"
    assert first.body["seed"] != second.body["seed"]
    (trajectory,) = episode.trajectories
    assert [step.text for step in trajectory.steps] == ["<think>hm</think>\nhi", "hello"]
    assert all(step.prompt_ids == step.response_ids == () for step in trajectory.steps)
    assert episode.is_correct and episode.reward == 1.0 and episode.metrics["response_tokens"] == 6


async def test_tool_calls_that_a_server_leaves_in_the_text_are_found() -> None:
    outputs: list[Any] = []

    async def run(task: Task, model: Model) -> float:
        outputs.append(await model.chat(task.messages, tools=[WEATHER]))
        return 1.0

    text = 'Let me see. <tool_call>{"name": "weather", "arguments": {"at": "Rome"}}</tool_call>'
    with serving(lambda asked: completion(text)) as server:
        await rolled_out(server.url, run)
    (call,) = outputs[0].tool_calls
    assert outputs[0].content == "Let me see." and json.loads(call["function"]["arguments"]) == {"at": "Rome"}


async def ask_once(task: Task, model: Model) -> None:
    await model.chat(task.messages)


@pytest.mark.parametrize(
    ("answer", "termination", "error"),
    [
        (Answer({"error": {"message": "maximum context length is 9"}}, 400), "length", "maximum context length"),
        (Answer({"error": {"message": "bad temperature"}}, 400), "error", "bad temperature"),
        (Answer({"error": {"message": "crashed"}}, 500), "error", "crashed"),
    ],
    ids=["too long", "refused", "broken"],
)
async def test_a_request_that_fails_fails_its_episode(answer: Answer, termination: str, error: str) -> None:
    with serving(lambda asked: answer) as server:
        episode = await rolled_out(server.url, ask_once)
    assert episode.failed and episode.termination == termination and error in str(episode.error)


async def test_a_server_that_lets_nobody_in_ends_the_evaluation() -> None:
    async def hides_it(task: Task, model: Model) -> float:
        try:
            await model.chat(task.messages)
        except Exception:
            return 1.0
        return 0.0

    with (
        serving(lambda asked: Answer({"error": "bad key"}, 401)) as server,
        pytest.raises(BaseExceptionGroup) as caught,
    ):
        await rolled_out(server.url, hides_it)
    assert caught.group_contains(EngineError, match="401: bad key")


async def test_the_budget_counts_what_the_server_counts() -> None:
    async def talks(task: Task, model: Model) -> None:
        while True:
            await model.chat(task.messages)

    with serving(lambda asked: completion("blah", tokens=4)) as server:
        episode = await rolled_out(server.url, talks, Budget(tokens=10))
    assert [asked.body["max_tokens"] for asked in server.asked] == [10, 6, 2]
    assert episode.termination == TerminationReason.TOKENS and not episode.failed


async def test_a_model_behind_a_url_is_not_trained() -> None:
    new_model = remote_model(OpenAIClient("http://localhost:1", "parrot"))
    no_template: Any = None
    with pytest.raises(ConfigError, match="cannot be trained"):
        new_model(NoEngine(), no_template, SAMPLING, 0, True)
