"""`headrace serve openai`: the real client of OpenAI, requests of tokens, hostile ones, and how it starts and ends."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from fakes import CharTokenizer, FakeEngine, char_chat
from headrace import Model, Task
from headrace.cli.main import run
from headrace.config.loading import build_config
from headrace.engines.base import EngineHealth, Generation
from headrace.openai_server.answers import Answer
from headrace.openai_server.app import Routes
from headrace.openai_server.generate import spans
from headrace.openai_server.options import OpenAIOptions
from headrace.openai_server.pieces import TextPieces, may_think
from headrace.openai_server.run import running
from headrace.openai_server.sampling import read_request
from headrace.openai_server.served import Served
from headrace.rollout.gateway.chat import ChatCompletions
from headrace.trainer.trainer import UnifiedTrainer
from headrace.utils.http_server import HttpServer, listen
from tiny import saved_model

ASKED: list[Any] = [{"role": "user", "content": "Make 6 from 2 and 3."}]
GENERATE = "/inference/v1/generate"
LONG = {"max_tokens": 900, "ignore_eos": True}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running(OpenAIOptions("bundled", port=0, max_waiting=4, max_batch=4, max_body_mb=1)) as address:
        yield address


@pytest.fixture(scope="module")
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0)


def generate(url: str, **given: Any) -> Any:
    sampling = {"max_tokens": 8, "seed": 3, "logprobs": 0, **given.pop("sampling_params", {})}
    return httpx2.post(url + GENERATE, json={"token_ids": [5, 6, 7], "sampling_params": sampling, **given}, timeout=60)


def post(url: str, body: Any, path: str = "/v1/chat/completions", **headers: str) -> httpx2.Response:
    return httpx2.post(url + path, json=body, headers=headers, timeout=60)


# ---- chat and completions ------------------------------------------------------------------------------------------


def test_the_model_is_listed_with_its_length(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert (model.id, client.models.retrieve("bundled").id) == ("bundled", "bundled")
    assert model.model_extra and model.model_extra["max_model_len"] > 0


def test_the_same_seed_gives_the_same_reply_streamed_or_not(client: openai.OpenAI) -> None:
    given: Any = {"model": "bundled", "messages": ASKED, "max_tokens": 24, "seed": 5, "logprobs": True}
    whole = client.chat.completions.create(**given)
    chunks = list(client.chat.completions.create(**given, stream=True, stream_options={"include_usage": True}))
    said = [choice for chunk in chunks for choice in chunk.choices]
    assert "".join(choice.delta.content or "" for choice in said) == whole.choices[0].message.content
    streamed = [one.logprob for choice in said if choice.logprobs for one in choice.logprobs.content or ()]
    assert whole.choices[0].logprobs is not None and whole.choices[0].logprobs.content is not None
    assert streamed == [one.logprob for one in whole.choices[0].logprobs.content]
    assert [choice.delta.role for choice in said].count("assistant") == 1
    assert said[-1].finish_reason == whole.choices[0].finish_reason
    assert chunks[-1].usage == whole.usage and whole.usage is not None and whole.usage.completion_tokens > 0
    assert client.chat.completions.create(**{**given, "seed": 6}) != whole


def test_a_reply_comes_while_it_is_sampled(client: openai.OpenAI) -> None:
    given: Any = {"model": "bundled", "prompt": "2+3=", "seed": 1, "stream": True, "temperature": 2.0}
    texts = [chunk.choices[0].text for chunk in client.completions.create(**given, max_tokens=400)]
    assert len([text for text in texts if text]) > 4


def test_several_replies_keep_their_numbers(client: openai.OpenAI) -> None:
    given: Any = {"model": "bundled", "prompt": "2+3=", "max_tokens": 6, "n": 3, "seed": 1, "logprobs": 0}
    whole = client.completions.create(**given)
    texts = dict.fromkeys(range(3), "")
    offsets: dict[int, list[int]] = {index: [] for index in range(3)}
    for chunk in client.completions.create(**given, stream=True):
        (choice,) = chunk.choices
        texts[choice.index] += choice.text
        offsets[choice.index] += (choice.logprobs.text_offset or []) if choice.logprobs else []
    assert texts == {choice.index: choice.text for choice in whole.choices}
    assert offsets == {c.index: c.logprobs.text_offset for c in whole.choices if c.logprobs}
    assert len({*texts.values()}) > 1
    alone = client.completions.create(**{**given, "n": 1})
    assert alone.choices[0].text == whole.choices[0].text
    assert whole.usage is not None and alone.usage is not None
    assert whole.usage.prompt_tokens == alone.usage.prompt_tokens


def test_a_stop_string_ends_a_reply_and_is_not_streamed(client: openai.OpenAI) -> None:
    given: Any = {"model": "bundled", "messages": ASKED, "max_tokens": 200, "seed": 5, "temperature": 0}
    free = client.chat.completions.create(**given).choices[0].message.content or ""
    stop = free[len(free) // 2 :][:3]
    whole = client.chat.completions.create(**given, stop=[stop]).choices[0]
    assert whole.message.content == free[: free.index(stop)] and whole.finish_reason == "stop"
    chunks = client.chat.completions.create(**given, stop=[stop], stream=True)
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == whole.message.content


def test_greedy_replies_need_no_seed(client: openai.OpenAI) -> None:
    given: Any = {"model": "bundled", "messages": ASKED, "max_tokens": 8}
    greedy = [client.chat.completions.create(**given, temperature=0).choices[0].message.content for _ in range(2)]
    assert greedy[0] == greedy[1]
    free = {client.chat.completions.create(**given, temperature=3.0).choices[0].message.content for _ in range(4)}
    assert len(free) > 1


# ---- tokens --------------------------------------------------------------------------------------------------------


def test_tokens_come_with_the_log_probabilities_that_the_engine_scores(url: str) -> None:
    made = generate(url).json()["choices"][0]
    row = [5, 6, 7, *made["token_ids"]]
    scored = generate(url, token_ids=row, sampling_params={"prompt_logprobs": 0}).json()["prompt_logprobs"]
    assert scored[0] is None and len(scored) == len(row)
    found = [scored[at][str(token)]["logprob"] for at, token in enumerate(row) if at >= 3]
    assert [one["logprob"] for one in made["logprobs"]["content"]] == pytest.approx(found, abs=1e-4)
    assert made["weight_versions"] == [{"version": "0", "start": 0, "end": len(made["token_ids"])}]


def test_streamed_tokens_are_those_of_the_complete_answer(url: str) -> None:
    whole = generate(url, sampling_params=LONG).json()["choices"][0]
    lines = generate(url, sampling_params=LONG, stream=True).text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines[:-2]]
    assert [token for chunk in chunks for token in chunk["token_ids"]] == whole["token_ids"]
    assert len(chunks) > 4 and {chunk["finish_reason"] for chunk in chunks[:-1]} == {None}
    assert (chunks[-1]["finish_reason"], chunks[-1]["weight_versions"]) == ("length", whole["weight_versions"])


def test_spans_say_which_version_sampled_what() -> None:
    assert spans([3, 3, 4]) == [{"version": "3", "start": 0, "end": 2}, {"version": "4", "start": 2, "end": 3}]
    assert spans([]) == []


# ---- refused -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ({"model": "gpt-9"}, 404, 'there is no model "gpt-9" here; this server has "bundled"'),
        ({"presence_penalty": 1}, 400, "this engine samples from the model as it is"),
        ({"temperature": -1}, 400, "temperature must be 0 (greedy) or at least 0.0001"),
        ({"n": 0}, 400, '"n" must be between 1 and 128'),
        ({"n": 2, "return_token_ids": True}, 400, "use /inference/v1/generate"),
        ({"invented": 1}, 400, '"invented" is not supported'),
        ({"messages": [{"role": "user", "content": "a " * 4000}]}, 400, "leaves no room within max_model_length"),
        ({"messages": [{"role": "user", "content": "a " * 4000}], "stream": True}, 400, "leaves no room"),
        ({"messages": [{"role": "user", "content": "a" * 2**21}]}, 413, "raise --max-body-mb"),
    ],
)
def test_a_request_that_cannot_be_answered_is_explained(url: str, body: Any, status: int, said: str) -> None:
    answer = post(url, {"messages": ASKED, **body})
    assert answer.status_code == status and said in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"token_ids": []}, "at least one"),
        ({"token_ids": [10**9]}, "is not a token id of this model"),
        ({"sampling_params": {"min_p": 0.5}}, "samples from the model as it is"),
        ({"sampling_params": {"logprobs": 5}}, "must be 0 or 1"),
        ({"features": {}}, '"features" is not supported'),
    ],
)
def test_a_token_request_that_cannot_be_answered_is_explained(url: str, given: Any, said: str) -> None:
    answer = generate(url, **given)
    assert answer.status_code == 400 and said in answer.json()["error"]["message"]


def test_pages_and_other_paths_are_refused(url: str) -> None:
    assert post(url, {"messages": ASKED}, origin="https://example.org").status_code == 403
    assert post(url, {"messages": ASKED}, host="evil.example").status_code == 403
    missing = post(url, {}, "/v1/embeddings")
    assert missing.status_code == 404 and "/v1/chat/completions" in missing.json()["error"]["message"]


def test_a_key_is_needed_where_one_is_set() -> None:
    with running(OpenAIOptions("bundled", port=0, api_key="secret")) as url:
        assert post(url, {"messages": ASKED}).status_code == 401
        assert httpx2.get(f"{url}/v1/models", headers={"authorization": "Bearer secret"}).status_code == 200


class Slow(FakeEngine):
    """Takes its time, and may have more to do than it can."""

    waiting = 0

    def health(self) -> EngineHealth:
        return replace(super().health(), waiting=self.waiting)


@asynccontextmanager
async def slow_server() -> AsyncIterator[tuple[Slow, str]]:
    engine, options = Slow(takes_s=60.0), OpenAIOptions("m", port=0, max_waiting=4, keep_alive_s=0.05)
    routes = Routes(Served("m", engine, CharTokenizer(), char_chat(), 99, 0), options)
    server, listening = HttpServer(routes.app(), routes.rules()), listen("127.0.0.1", 0, "a test", "")
    port = listening.getsockname()[1]
    serving = await server.begin(listening)
    try:
        yield engine, f"http://127.0.0.1:{port}"
    finally:
        serving.cancel()
        await asyncio.wait({serving})


@pytest.mark.parametrize("streams", [False, True])
async def test_a_client_that_leaves_frees_its_slots(streams: bool) -> None:
    async with slow_server() as (engine, url), httpx2.AsyncClient(timeout=60) as http:
        body = {"messages": ASKED, "n": 3, "stream": streams}
        asked = asyncio.ensure_future(http.post(f"{url}/v1/chat/completions", json=body))
        while engine.busy < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.15)  # a stream has begun by then, with comments
        asked.cancel()
        async with asyncio.timeout(20):
            while engine.busy:  # noqa: ASYNC110
                await asyncio.sleep(0.005)


async def test_more_than_may_wait_are_refused_for_now() -> None:
    async with slow_server() as (engine, url), httpx2.AsyncClient(timeout=60) as http:
        engine.waiting = 4
        busy = await http.post(f"{url}/v1/chat/completions", json={"messages": ASKED})
        assert busy.status_code == 429 and "raise --max-waiting" in busy.json()["error"]["message"]
        assert "x-should-retry" not in busy.headers


# ---- what is served ------------------------------------------------------------------------------------------------


def test_a_model_without_a_chat_template_completes(tmp_path: Path) -> None:
    folder = saved_model("llama", tmp_path / "model")
    with running(OpenAIOptions(str(folder), name="tiny", port=0)) as url:
        refused = post(url, {"messages": ASKED})
        assert refused.status_code == 400 and "no chat template" in refused.json()["error"]["message"]
        answer = post(url, {"prompt": [5, 6], "max_tokens": 3, "model": "tiny"}, "/v1/completions")
        assert answer.json()["choices"][0]["text"]


def test_a_run_is_served_as_its_newest_checkpoint_has_it(tmp_path: Path) -> None:
    config = build_config(
        {
            "run": {"name": "r", "dir": str(tmp_path)},
            "rollout": {"group_size": 4, "max_tokens": 8},
            "trainer": {"steps": 2, "batch_size": 2, "save_every": 1},
            "optimizer": {"lr": 0.01},
            "algorithm": {"estimator": "reinforce"},
            "track": {"trackers": [], "plot": False},
        }
    )

    async def solve(task: Task, model: Model) -> float:
        await model.chat(task.messages)
        return 1.0

    UnifiedTrainer(config, workflow=solve).fit()
    made: dict[str, Any] = {}
    for target in ("bundled", str(tmp_path / "r"), str(tmp_path / "r" / "checkpoints" / "step_000001")):
        with running(OpenAIOptions(target, port=0)) as url:
            made[target] = generate(url).json()["choices"][0]
    versions = [one["weight_versions"][0]["version"] for one in made.values()]
    assert versions == ["0", "2", "1"]
    assert len({str(one["logprobs"]) for one in made.values()}) == 3


# ---- the command ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["/nosuch/model"], "/nosuch/model"),
        (["--port", "99999"], "--port"),
        (["--host", "0.0.0.0"], "--api-key"),
        (["--max-batch", "0"], "--max-batch"),
        (["bundled", "--trust"], "--trust"),
        (["bundled", "--max-model-length", "999999"], "max_model_length"),
    ],
)
def test_a_mistake_is_explained(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", "openai", *(["--port", "0"] if "--port" not in words else []), *words]) == 2
    assert said in capsys.readouterr().err


def test_a_run_without_a_checkpoint_is_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(build_config({}).model_dump_json())
    assert run(["serve", "openai", str(tmp_path), "--port", "0"]) == 2
    assert "has no checkpoint yet" in capsys.readouterr().err


def test_a_mistyped_run_is_not_taken_for_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "countdown").mkdir()
    (tmp_path / "countdown" / "ledger.sqlite").touch()
    assert run(["serve", "openai", str(tmp_path / "cuntdown"), "--port", "0"]) == 2
    assert 'cuntdown (did you mean "countdown"?)' in capsys.readouterr().err


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_in_good_order(stop: signal.Signals) -> None:
    command = [sys.executable, "-m", "headrace", "serve", "openai", "bundled", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ) as server:
        assert server.stdout is not None
        first = server.stdout.readline()
        assert first.startswith('serving "bundled" (version 0, 1024 tokens at most) at http://127.0.0.1:')
        try:
            assert httpx2.get(f"{first.rsplit(' at ')[-1].split(';')[0]}/health").status_code == 200
            server.send_signal(stop)
            rest, errors = server.communicate(timeout=30)
        finally:
            server.kill()
    assert (server.returncode, rest.splitlines()[-1]) == (0, "stopped"), errors
    assert "Traceback" not in errors


# ---- text while it is sampled --------------------------------------------------------------------------------------


def test_half_characters_and_beginnings_of_stop_strings_wait() -> None:
    def decode(ids: Any) -> str:
        return bytes(ids).decode(errors="replace")

    pieces = TextPieces(decode, ("END",))
    assert [pieces.feed([byte]) for byte in "é".encode()] == ["", "é"]
    assert [pieces.feed(list(text.encode())) for text in ("aE", "N", "x", "yEN", "D!", "z")] == [
        "a",
        "",
        "ENx",
        "y",
        "",
        "",
    ]


def test_a_reply_that_may_be_reasoning_is_recognised() -> None:
    assert [may_think(text) for text in ("", " <th", "<think>a", "<b", "a<think>")] == [True, True, True, False, False]


def test_reasoning_and_tool_calls_are_streamed_as_such() -> None:
    """A model cannot be made to say this; an engine that says what it is given can."""

    class Says:
        def __init__(self, text: str) -> None:
            self.text = text

        async def stream(self, prompt_ids: Any, params: Any, seed: int, on_tokens: Any) -> Generation:
            ids = tuple(map(ord, self.text))
            for token in ids:
                on_tokens([token], [-1.0])
            return Generation(
                tuple(prompt_ids), ids, (-1.0,) * len(ids), (-1.0,) * len(ids), (0,) * len(ids), "stop", 1.0
            )

    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'

    def deltas(text: str, **given: Any) -> list[dict[str, Any]]:
        async def streamed() -> list[bytes]:
            engine: Any = Says(text)
            served = Served("m", engine, CharTokenizer(), char_chat(), 99, 0)
            asked = read_request(ChatCompletions(), json.dumps({"messages": ASKED, **given}).encode(), served, 99)
            answer = Answer(ChatCompletions(), served, asked)
            await answer.stream()
            return [answer.frames.get_nowait() for _ in range(answer.frames.qsize())]

        frames = [frame.decode().removeprefix("data: ") for frame in asyncio.run(streamed())[:-1]]
        return [json.loads(frame)["choices"][0]["delta"] for frame in frames]

    def joined(found: list[dict[str, Any]], name: str) -> str:
        return "".join(delta.get(name) or "" for delta in found)

    thought = deltas("<think>so</think>yes")
    assert (joined(thought, "reasoning_content"), joined(thought, "content")) == ("so", "yes")
    asked = deltas(call, tools=[tool])
    (named, *_) = [delta["tool_calls"][0] for delta in asked if "tool_calls" in delta]
    assert named["function"]["name"] == "add" and not joined(asked, "content")
    assert joined(deltas("no tool", tools=[tool]), "content") == "no tool"
