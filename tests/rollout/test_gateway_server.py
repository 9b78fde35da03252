"""The gateway's server: hostile requests, dropped connections, sessions that end and leave nothing behind."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import openai
import pytest
from test_resumed_episodes import live

from fakes import FakeEngine, char_chat
from headrace.config import GatewaySection
from headrace.config.loading import build_config
from headrace.data.task import Task
from headrace.engines.base import SamplingParams
from headrace.errors import ConfigError
from headrace.rollout import gateway
from headrace.rollout.gateway import ModelSession, close_gateway, model_session
from headrace.rollout.gateway.server import running
from headrace.rollout.model_client import Model

SAMPLING = SamplingParams(temperature=1.0, max_tokens=16)
ASKED: list[Any] = [{"role": "user", "content": "Say a word."}]
CHAT, COMPLETE, RESPOND, MESSAGES = "/chat/completions", "/completions", "/responses", "/messages"
TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.fixture(autouse=True)
async def _closed() -> AsyncIterator[None]:
    yield
    await close_gateway()


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets what the server goes by."""

    def use(**given: Any) -> GatewaySection:
        section = GatewaySection(**given)
        monkeypatch.setattr(gateway, "_settings", section)
        return section

    return use


def new_model(**options: Any) -> Model:
    return Model(FakeEngine(**options), char_chat(), SAMPLING, seed=1)


def steps(model: Model) -> int:
    return sum(len(trajectory.steps) for trajectory in model.trajectories())


async def post(session: ModelSession, path: str, body: Any, **headers: str) -> httpx2.Response:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    named = {"content-type": "application/json"} | {name.replace("_", "-"): value for name, value in headers.items()}
    async with httpx2.AsyncClient(verify=False, trust_env=False, timeout=10) as client:
        return await client.post(session.base_url + path, content=raw, headers=named)


def sentence(response: httpx2.Response) -> str:
    return response.json()["error"]["message"]


# ---- hostile requests ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [CHAT, COMPLETE, RESPOND, MESSAGES])
@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "the body is not valid JSON"), (b"{", "the body is not valid JSON"), (b"\xff\xfe", "not valid JSON"),
        (b"[1]", "must be a JSON object"), (b"null", "must be a JSON object"), (b'{"a": NaN}', "NaN is no JSON"),
        (b'{"a": "\\ud800"}', "not valid JSON"), (b"[" * 100_000, "not valid JSON"), (b"{}", "is missing"),
        (b"9" * 5000, "not valid JSON"),
    ],
)  # fmt: skip
async def test_a_body_that_is_no_request_is_refused(path: str, body: bytes, said: str) -> None:
    model = new_model()
    async with model_session(model) as session:
        answer = await post(session, path, body)
        assert answer.status_code == 400 and said in sentence(answer)
        assert answer.headers["x-should-retry"] == "false"
    assert steps(model) == 0


WRONG: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"messages": []}, "at least one message"),
    (CHAT, {"messages": "hi"}, '"messages" must be a list, got "hi"'),
    (CHAT, {"messages": [1]}, "messages[0] must be a JSON object"),
    (CHAT, {"messages": [{"content": "x"}]}, '"messages[0].role" is missing'),
    (CHAT, {"messages": [{"role": "wizard", "content": "x"}]}, "wizard"),
    (CHAT, {"messages": [{"role": "user", "content": 3}]}, "must be text or a list"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "may only hold text"),
    (CHAT, {"messages": [{"role": "assistant", "tool_calls": [{"function": 1}]}]}, "must be an object"),
    (CHAT, {"n": 2}, '"n" is not supported with the value 2; make several requests'),
    (CHAT, {"n": True}, '"n" must be an integer'),
    (CHAT, {"model": "headrace/a b"}, "names no role"),
    (CHAT, {"model": "headrace/"}, "names no role"),
    (CHAT, {"temperature": "hot"}, '"temperature" must be an integer or a number, got "hot"'),
    (CHAT, {"temperature": True}, '"temperature" must be'),
    (CHAT, {"max_tokens": 0}, '"max_tokens" must be at least 1, got 0'),
    (CHAT, {"max_tokens": 1.5}, "must be an integer"),
    (CHAT, {"stop": [""]}, "texts that are not empty"),
    (CHAT, {"stop": ["x"] * 17}, "up to 16 texts"),
    (CHAT, {"stream": "yes"}, "must be true or false"),
    (CHAT, {"logit_bias": {"5": 100}}, "the learner could not reproduce it"),
    (CHAT, {"presence_penalty": 0.5}, "leave it at 0"),
    (CHAT, {"response_format": {"type": "json_object"}}, "ask for the form in the prompt"),
    (CHAT, {"tools": [TOOL], "tool_choice": "required"}, "decoding cannot be forced"),
    (CHAT, {"tools": [TOOL], "tool_choice": {"type": "function"}}, "decoding cannot be forced"),
    (CHAT, {"tools": [{"type": "custom"}]}, "only functions can be called"),
    (CHAT, {"tools": [{"type": "function", "function": {}}]}, '"tools[0].function.name" is missing'),
    (CHAT, {"top_logprobs": 5}, "must be 0 or 1"),
    (CHAT, {"made_up": 1}, '"made_up" is not supported; leave it out'),
    (CHAT, {"x" * 5000: 1}, "is not supported"),
    (COMPLETE, {"prompt": ["a", "b"]}, "must be one text"),
    (COMPLETE, {"prompt": [-1]}, "must be one text"),
    (COMPLETE, {"prompt": "a", "echo": True}, '"echo" is not supported'),
    (RESPOND, {"input": []}, "at least one item"),
    (RESPOND, {"input": "x", "previous_response_id": "resp_0"}, "is not a response of this session"),
    (RESPOND, {"input": [{"type": "computer_call"}]}, "is not supported"),
    (RESPOND, {"input": "x", "tools": [{"type": "web_search"}]}, "server-side tools"),
    (MESSAGES, {"messages": [{"role": "system", "content": "x"}]}, 'must be "user" or "assistant"'),
    (MESSAGES, {"tool_choice": {"type": "any"}}, "decoding cannot be forced"),
    (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "only text and tools are"),
    (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 9}}, "up to its chat template"),
]


@pytest.mark.parametrize(("path", "body", "said"), WRONG, ids=[f"{path} {str(b)[:40]}" for path, b, _ in WRONG])
async def test_a_wrong_field_is_refused_with_its_name(path: str, body: dict[str, Any], said: str) -> None:
    given = {"messages": ASKED, **body} if path in (CHAT, MESSAGES) else body
    model = new_model()
    async with model_session(model) as session:
        answer = await post(session, path, given)
        assert answer.status_code == 400 and said in sentence(answer) and len(sentence(answer)) < 600
    assert steps(model) == 0


async def test_what_cannot_be_honoured_may_be_left_out_with_a_warning(settings: Any, caplog: Any) -> None:
    settings(unsupported="warn")
    body = {"messages": ASKED, "tools": [TOOL], "tool_choice": "required", "made_up": 1, "presence_penalty": 1.5}
    model = new_model()
    async with model_session(model) as session:
        for _ in range(2):
            assert (await post(session, CHAT, body)).status_code == 200
        assert (await post(session, CHAT, {**body, "n": 2})).status_code == 400
    warned = [record.getMessage() for record in caplog.records if "a client's" in record.getMessage()]
    assert sorted(line.split('"')[1] for line in warned) == ["made_up", "presence_penalty", "tool_choice"]
    assert steps(model) == 2


@pytest.mark.parametrize("declared", [True, False])
async def test_a_body_that_is_too_large_is_refused(declared: bool, settings: Any) -> None:
    settings(max_body_mb=0.05)
    body = json.dumps({"messages": [{"role": "user", "content": "x" * 100_000}]}).encode()

    async def pieces() -> AsyncIterator[bytes]:
        yield body

    async with model_session(new_model()) as session, httpx2.AsyncClient(verify=False, trust_env=False) as client:
        head = {"content-type": "application/json"}
        answer = await client.post(session.base_url + CHAT, content=body if declared else pieces(), headers=head)
    assert answer.status_code == 413 and "larger than 0.05 MB" in sentence(answer)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", CHAT, 405), ("POST", "/models", 405), ("POST", "/embeddings", 404), ("GET", "/../../etc/passwd", 404),
     ("DELETE", "/models/x", 404), ("POST", "/chat/completions/", 404)],
)  # fmt: skip
async def test_an_unknown_route_is_refused_with_those_that_there_are(method: str, path: str, status: int) -> None:
    async with model_session(new_model()) as session, httpx2.AsyncClient(verify=False, trust_env=False) as client:
        answer = await client.request(method, session.base_url + path, follow_redirects=False)
    assert answer.status_code == status and "POST to /v1/chat/completions" in sentence(answer)


@pytest.mark.parametrize(
    "head",
    [
        "Bad Header: 1", "X: a\rEvil: 1", "X: a\x00b", "Content-Length: -1", "Content-Length: 1\r\nContent-Length: 2",
        "Transfer-Encoding: gzip", "X: " + "a" * 66_000,
    ],
)  # fmt: skip
async def test_headers_that_are_none_are_refused(head: str) -> None:
    async with model_session(new_model()) as session:
        url = httpx2.URL(session.base_url)
        reader, writer = await asyncio.open_connection(url.host, url.port)
        request = f"POST {url.path}{CHAT} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{head}\r\n\r\n"
        writer.write(request.encode("latin-1"))
        answer = await asyncio.wait_for(reader.read(), 5)
        writer.close()
    status, _, body = answer.partition(b"\r\n")
    assert b" 4" in status[:14] or b" 501 " in status
    assert body.strip()


async def test_what_clients_send_is_never_part_of_an_answers_head() -> None:
    async with model_session(new_model()) as session:
        answer = await post(session, CHAT, {"messages": ASKED, "model": "a\r\nSet-Cookie: b"})
    assert answer.status_code == 200 and "set-cookie" not in answer.headers


# ---- sessions --------------------------------------------------------------------------------------------------------


async def test_a_session_is_found_by_url_or_key_and_closed_ones_by_neither() -> None:
    model = new_model()
    async with model_session(model) as session:
        root = session.root_url.partition("/s/")[0]
        async with openai.AsyncOpenAI(base_url=f"{root}/v1", api_key=session.session.id) as client:
            await client.chat.completions.create(model="m", messages=ASKED)
        async with anthropic.AsyncAnthropic(base_url=root, api_key=session.session.id) as client:
            await client.messages.create(model="m", messages=ASKED, max_tokens=5)
        assert steps(model) == 2
    async with openai.AsyncOpenAI(base_url=session.base_url, api_key="x") as client:
        with pytest.raises(openai.NotFoundError, match="a session ends with its episode"):
            await client.chat.completions.create(model="m", messages=ASKED)
    for key in (session.session.id, "guess"):
        async with openai.AsyncOpenAI(base_url=f"{root}/v1", api_key=key) as client:
            with pytest.raises(openai.AuthenticationError, match="names no open session"):
                await client.chat.completions.create(model="m", messages=ASKED)
    assert steps(model) == 2


async def test_ids_of_sessions_cannot_be_guessed() -> None:
    ids: set[str] = set()
    for _ in range(100):
        async with model_session(new_model()) as session:
            ids.add(session.session.id)
    assert len(ids) == 100 and all(len(name) == 32 for name in ids)


async def test_sessions_side_by_side_are_kept_apart() -> None:
    async def one(number: int) -> tuple[str, ...]:
        model = Model(FakeEngine(lambda seed: f"reply {number}", takes_s=0.01), char_chat(), SAMPLING, seed=number)
        async with model_session(model) as session:
            await asyncio.gather(*(post(session, CHAT, {"messages": ASKED}) for _ in range(3)))
        return tuple(step.text for step in model.trajectories()[0].steps)

    found = await asyncio.gather(*(one(number) for number in range(20)))
    assert found == [(f"reply {number}",) * 3 for number in range(20)]


async def test_beyond_loopback_the_token_is_required(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUR_TOKEN", "secret")
    settings(host="0.0.0.0", token="$OUR_TOKEN")
    model = new_model()
    async with model_session(model) as session:
        assert session.api_key == "secret" and session.root_url.startswith("http://127.0.0.1:")
        root = session.root_url.partition("/s/")[0]
        keys = {(session.base_url, "secret"): 200, (session.base_url, "guess"): 401, (session.base_url, ""): 401}
        keys |= {(f"{root}/v1", f"secret:{session.session.id}"): 200, (f"{root}/v1", session.session.id): 401}
        keys |= {(f"{root}/v1", f"guess:{session.session.id}"): 401}
        async with httpx2.AsyncClient(verify=False, trust_env=False) as client:
            for (url, key), status in keys.items():
                answer = await client.post(url + CHAT, json={"messages": ASKED}, headers={"x-api-key": key})
                assert answer.status_code == status, (url, key)
    assert steps(model) == 2


def test_listening_beyond_loopback_without_a_token_is_refused() -> None:
    for host in ("0.0.0.0", "::", "192.168.0.7", "example.org"):
        with pytest.raises(ConfigError, match=r"set gateway\.token"):
            build_config({"gateway": {"host": host}})
        build_config({"gateway": {"host": host, "token": "$SECRET"}})
    for host in ("127.0.0.1", "localhost", "::1"):
        build_config({"gateway": {"host": host}})


async def test_a_token_that_is_not_in_the_environment_and_a_port_in_use_are_reported(settings: Any) -> None:
    settings(token="$NOT_THERE")
    with pytest.raises(ConfigError, match="no such variable"):
        async with model_session(new_model()):
            pass
    settings()
    async with model_session(new_model()) as session:
        port = httpx2.URL(session.base_url).port
        with pytest.raises(ConfigError, match="cannot listen"):
            await gateway.server.Gateway(GatewaySection(port=port)).start()  # type: ignore[attr-defined]


# ---- dropped connections ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_hangs_up_cancels_its_generation(stream: bool, settings: Any) -> None:
    settings(keep_alive_s=0.02)
    engine = FakeEngine(takes_s=30)
    model = Model(engine, char_chat(), SAMPLING, seed=1)
    async with model_session(model) as session:
        async with httpx2.AsyncClient(verify=False, trust_env=False) as client:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    body = {"messages": ASKED, "stream": stream}
                    async with client.stream("POST", session.base_url + CHAT, json=body) as answer:
                        assert stream  # or there would be no head before the reply
                        async for line in answer.aiter_lines():
                            assert line in ("", ": sampling")
        for _ in range(100):
            await asyncio.sleep(0.01)
            if not engine.busy:
                break
        assert engine.busy == 0 and len(engine.requests) == 1
    assert steps(model) == 0


async def test_a_retry_after_a_time_out_makes_one_step() -> None:
    engine = FakeEngine(takes_s=[30, 0])
    model = Model(engine, char_chat(), SAMPLING, seed=1)
    async with model_session(model) as session:
        url = session.base_url
        async with openai.AsyncOpenAI(base_url=url, api_key="x", timeout=0.3, max_retries=1) as client:
            await client.chat.completions.create(model="m", messages=ASKED)
    assert (len(engine.requests), engine.busy, steps(model)) == (2, 0, 1)


async def test_of_equal_calls_side_by_side_the_one_that_is_made_again_disturbs_no_other() -> None:
    engine = FakeEngine(takes_s=[0.5, 30, 0])
    model = Model(engine, char_chat(), SAMPLING, seed=1)
    async with model_session(model) as session:
        url = session.base_url
        async with openai.AsyncOpenAI(base_url=url, api_key="x", max_retries=1) as client:
            first = asyncio.create_task(client.chat.completions.create(model="m", messages=ASKED))
            await asyncio.sleep(0.1)
            await client.chat.completions.create(model="m", messages=ASKED, timeout=0.1)
            await first
    assert (len(engine.requests), steps(model)) == (3, 2)


class LosesFirstAnswer:
    """A proxy that closes its first connection instead of handing the answer on."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.lost: list[bytes] = []

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream, up = await asyncio.open_connection("127.0.0.1", self._port)

        async def forward() -> None:
            while data := await reader.read(65536):
                up.write(data)

        forwarding = asyncio.create_task(forward())
        answer = await upstream.read(65536)
        if self.lost:
            writer.write(answer)
            await writer.drain()
        self.lost.append(answer)
        forwarding.cancel()
        up.close()
        writer.close()


@pytest.mark.parametrize("kind", ["openai", "anthropic"])
async def test_an_answer_that_was_lost_on_the_way_is_given_again(kind: str) -> None:
    engine = FakeEngine()
    model = Model(engine, char_chat(), SAMPLING, seed=1)
    async with model_session(model) as session:
        url = httpx2.URL(session.root_url)
        proxy = LosesFirstAnswer(url.port or 0)
        server = await asyncio.start_server(proxy, "127.0.0.1", 0)
        root = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}{url.path}"
        if kind == "openai":
            async with openai.AsyncOpenAI(base_url=f"{root}/v1", api_key="x") as client:
                reply: Any = await client.chat.completions.create(model="m", messages=ASKED)
                text = reply.choices[0].message.content
        else:
            async with anthropic.AsyncAnthropic(base_url=root, api_key="x") as client:
                reply = await client.messages.create(model="m", messages=ASKED, max_tokens=9)
                text = reply.content[0].text
        server.close()
    assert len(proxy.lost) == 2 and reply.id.encode() in proxy.lost[0]
    assert len(engine.requests) == steps(model) == 1 and model.trajectories()[0].steps[0].text == text


async def test_the_same_question_twice_is_two_steps_unless_it_has_the_same_key() -> None:
    model = new_model()
    async with model_session(model) as session:
        for _ in range(2):
            await post(session, CHAT, {"messages": ASKED})
        assert steps(model) == 2
        for _ in range(2):
            await post(session, CHAT, {"messages": ASKED}, idempotency_key="one")
        assert steps(model) == 3


# ---- nothing is left -------------------------------------------------------------------------------------------------


async def test_a_call_under_way_is_reported_that_its_session_has_ended() -> None:
    async with model_session(new_model(takes_s=30)) as session:
        asking = asyncio.create_task(post(session, CHAT, {"messages": ASKED}))
        await asyncio.sleep(0.2)
    answer = await asyncio.wait_for(asking, 5)
    assert answer.status_code == 404 and "the session has ended" in sentence(answer)


async def test_sessions_leave_nothing_behind() -> None:
    async def one() -> None:
        async with model_session(new_model()) as session:
            await post(session, CHAT, {"messages": ASKED})

    before = _listening()  # other tests' servers
    await one()
    server = await running(GatewaySection())
    for _ in range(20):
        await asyncio.gather(*(one() for _ in range(10)))
    await asyncio.sleep(0.2)
    assert server.sessions == 0
    await close_gateway()
    await asyncio.sleep(0.05)
    assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []
    assert _listening() == before


def _listening() -> list[str]:
    return [fd for fd in os.listdir("/proc/self/fd") if _is_listening(fd)]


def _is_listening(fd: str) -> bool:
    try:
        with socket.socket(fileno=os.dup(int(fd))) as found:
            family = found.family in (socket.AF_INET, socket.AF_INET6)
            return family and bool(found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    except OSError:
        return False


def test_a_server_that_nobody_closed_ends_with_its_event_loop() -> None:
    async def life() -> str:
        async with model_session(new_model()) as session:
            await post(session, CHAT, {"messages": ASKED})
            return session.base_url

    url = asyncio.run(life())
    with pytest.raises(httpx2.ConnectError):
        httpx2.post(url + CHAT, json={"messages": ASKED}, trust_env=False, verify=False)
    assert asyncio.run(life()) != url


# ---- after a crash ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("answers", [0, 1, 2])
async def test_after_a_crash_a_program_gets_the_recorded_replies_again(
    tmp_path: Path, answers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "any")

    async def three_turns(task: Task, model: Model) -> float:
        messages: list[Any] = [*task.messages]
        async with model_session(model) as session, openai.AsyncOpenAI(base_url=session.base_url) as client:
            for _ in range(3):
                reply = await client.chat.completions.create(model="m", messages=messages)
                messages += [reply.choices[0].message.model_dump(), {"role": "user", "content": "Again!"}]
        return float(len(messages))

    whole, _ = await live(tmp_path / "whole", three_turns, 3)
    assert await live(tmp_path / "cut", three_turns, answers) == (None, answers)
    assert await live(tmp_path / "cut", three_turns, 3) == (whole, 3 - answers)


async def test_a_program_that_asks_for_something_else_after_a_crash_is_started_again(tmp_path: Path) -> None:
    lives = 0

    async def moody(task: Task, model: Model) -> float:
        nonlocal lives
        lives += 1
        async with model_session(model) as session:
            for place in range(2):
                asked = [{"role": "user", "content": f"life {min(lives, 2)}, {place}"}]
                await post(session, CHAT, {"messages": asked})
        return 1.0

    assert await live(tmp_path, moody, 1) == (None, 1)
    episode, _ = await live(tmp_path, moody, 9)
    assert episode is not None and episode.attempt == 1 and not episode.failed and lives == 3
