"""Tools: described from their signatures, called with what the model wrote, their errors told to the model."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from pathlib import Path
from typing import Any, Literal

import pytest

from fakes import CharTokenizer, FakeEngine, char_chat
from headrace.data.episode import Episode, TerminationReason
from headrace.data.task import Task
from headrace.engines.base import SamplingParams
from headrace.errors import ConfigError, InfrastructureError
from headrace.judge.base import FunctionJudger
from headrace.rollout.agent_loop import AgentLoop, Limits, RolloutSpec, close_all
from headrace.rollout.model_client import Model
from headrace.rollout.tools import Tool, ToolAgent, answer_calls, as_text, as_tools, tool
from headrace.rollout.workflow import as_run_function

SAMPLING = SamplingParams(max_tokens=500)


def add(a: int, b: int = 2) -> int:
    """Add two numbers."""
    return a + b


async def pick(unit: Literal["m", "km"], names: list[str]) -> dict[str, Any]:
    return {unit: names}


def broken(text: str) -> str:
    raise ValueError(f"no {text}")


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


async def played(*replies: str, limits: Limits | None = None, **args: Any) -> Episode:
    """What an agent does that says this."""
    said = iter(replies)
    engine = FakeEngine(lambda seed: next(said), CharTokenizer())
    agent = ToolAgent(**{"tools": [add, pick, broken], **args})
    manager = AgentLoop(agent.run, engine, char_chat(), FunctionJudger(lambda task, text: text == "3"), limits)
    try:
        return await manager.roll_out(RolloutSpec(Task("t", instruction="1 + 2?"), 0, 0, 0), SAMPLING)
    finally:
        await close_all([manager])


def told(episode: Episode) -> list[str]:
    """What the tools answered, as the last call's messages have it."""
    return [m["content"] for m in episode.trajectories[0].steps[-1].messages if m["role"] == "tool"]


def test_a_schema_comes_from_the_signature() -> None:
    assert tool(add).schema["function"] == {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer", "default": 2}},
            "required": ["a"],
            "additionalProperties": False,
        },
    }
    assert tool(pick).parameters["properties"]["unit"]["enum"] == ["m", "km"]


def untyped(a) -> None: ...  # type: ignore[no-untyped-def]
def starred(*a: int) -> None: ...


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ([untyped], 'parameter "a" has no type'),
        ([starred], 'parameter "a" must be an ordinary one'),
        ([add, add], "two tools have the name 'add'"),
        (["no.such.module:f"], "no module"),
        (["nothing"], 'unknown tool "nothing"'),
    ],
)
def test_a_tool_that_cannot_be_offered_is_refused(given: list[Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        as_tools(given)


async def test_the_model_calls_a_tool_reads_its_answer_and_ends() -> None:
    episode = await played(call("add", a=1), "3")
    assert (episode.is_correct, episode.termination) == (True, TerminationReason.DONE)
    assert told(episode) == ["3"]
    assert len(episode.trajectories[0].steps) == 2 and not episode.metrics  # one row: nothing diverged


async def test_several_calls_of_one_reply_are_answered_in_order() -> None:
    episode = await played(call("add", a=1) + call("pick", unit="m", names=["x"]), "3")
    assert told(episode) == ["3", '{"m": ["x"]}']


@pytest.mark.parametrize(
    ("asked", "answer"),
    [
        (call("add", a="x"), "error: a: Input should be a valid integer"),
        (call("add"), "error: a: Field required"),
        (call("add", a=1, c=1), "error: c: Extra inputs are not permitted"),
        (call("pick", unit="mile", names=[]), "error: unit: Input should be 'm' or 'km'"),
        (call("broken", text="way"), "error: ValueError: no way"),
    ],
)
async def test_what_is_wrong_with_a_call_is_reported_to_the_model(asked: str, answer: str) -> None:
    episode = await played(asked, "3")
    assert told(episode)[0].startswith(answer)
    assert not episode.failed


async def test_an_unknown_tool_stays_text() -> None:
    episode = await played(call("fly", far=1))
    assert len(episode.trajectories[0].steps) == 1 and "fly" in episode.text


async def test_too_many_turns_end_the_episode_with_that_reason() -> None:
    episode = await played(*[call("add", a=1)] * 3, max_turns=3)
    assert (episode.termination, len(episode.trajectories[0].steps), episode.failed) == ("turns", 3, False)


async def test_a_budget_of_tool_calls_ends_the_episode() -> None:
    from headrace.rollout.budget import Budget

    episode = await played(*[call("add", a=1)] * 3, "3", limits=Limits(budget=Budget(tool_calls=2)))
    assert (episode.termination, len(episode.trajectories[0].steps)) == ("tools", 3)


async def test_infrastructure_that_fails_is_tried_again_and_then_fails_the_episode() -> None:
    tries = 0

    def flaky(a: int) -> str:
        nonlocal tries
        tries += 1
        if tries < 2:
            raise ConnectionError("reset")
        return "3"

    episode = await played(call("flaky", a=1), call("flaky", a=1), "3", tools=[flaky])
    assert (tries, episode.is_correct, episode.attempt) == (2, True, 0)  # without a ledger there are no attempts
    tries = -10
    episode = await played(*[call("flaky", a=1)] * 3, tools=[flaky], limits=Limits(retries=1))
    assert episode.failed and "reset" in str(episode.error)


async def test_a_slow_tool_does_not_hold_others_up() -> None:
    release = threading.Event()

    def wait(a: int) -> str:
        return str(release.wait(20))

    def quick(a: int) -> str:
        return "quick"

    model = Model(FakeEngine(), char_chat(), SAMPLING, seed=0)
    asked = [{"id": "1", "function": {"name": "wait", "arguments": '{"a": 1}'}}]
    waiting = [asyncio.create_task(answer_calls(model, asked, [tool(wait)])) for _ in range(40)]
    await asyncio.sleep(0.05)
    began = time.monotonic()
    other = [{"id": "1", "function": {"name": "quick", "arguments": '{"a": 1}'}}]
    (answer,) = await answer_calls(model, other, [tool(quick)])
    assert answer["content"] == "quick" and time.monotonic() - began < 5
    release.set()
    await asyncio.gather(*waiting)


def test_a_long_answer_is_cut() -> None:
    assert as_text("x" * 20_001).endswith("(1 more characters)")
    assert as_text({"a": "é"}) == '{"a": "é"}'


def test_an_agent_without_tools_is_refused() -> None:
    with pytest.raises(ConfigError, match="has no tools"):
        as_run_function(ToolAgent, {})


# ---- MCP -------------------------------------------------------------------------------------------------------------

SERVER = """
import os, sys
from mcp.server.mcpserver import MCPServer
server = MCPServer("sums")

@server.tool()
def add(a: int, b: int) -> str:
    "Add two numbers."
    return str(a + b)

@server.tool()
def fail(text: str) -> str:
    raise ValueError(text)

@server.tool()
def leave(code: int) -> str:
    os._exit(code)

if len(sys.argv) > 1:
    server.run("streamable-http", port=int(sys.argv[1]))
else:
    server.run()
"""


@pytest.fixture
def server(tmp_path: Path) -> Path:
    pytest.importorskip("mcp")
    (tmp_path / "server.py").write_text(SERVER)
    return tmp_path / "server.py"


async def test_tools_of_an_mcp_server_over_stdio(server: Path) -> None:
    import sys

    mcp = {"sums": [sys.executable, str(server)]}
    episode = await played(call("add", a=1, b=2), call("fail", text="no"), "3", tools=[], mcp=mcp)
    assert told(episode)[0] == "3" and told(episode)[1].startswith("error")
    assert episode.is_correct


async def test_an_mcp_server_that_dies_is_started_again(server: Path) -> None:
    import sys

    mcp = {"sums": [sys.executable, str(server)]}
    episode = await played(call("leave", code=1), call("add", a=1, b=2), "3", tools=[], mcp=mcp)
    assert episode.is_correct, episode.error


async def test_tools_of_an_mcp_server_over_http(server: Path) -> None:
    import socket
    import sys

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(server), str(port), stderr=asyncio.subprocess.DEVNULL
    )
    try:
        for _ in range(200):
            try:
                (await asyncio.open_connection("127.0.0.1", port))[1].close()
                break
            except OSError:
                await asyncio.sleep(0.05)
        mcp = {"sums": f"http://127.0.0.1:{port}/mcp"}
        episode = await played(call("add", a=1, b=2), "3", tools=[], mcp=mcp)
        assert told(episode) == ["3"] and episode.is_correct
    finally:
        process.kill()
        await process.wait()


async def test_an_mcp_server_that_cannot_be_started_fails_the_episode_and_says_which() -> None:
    pytest.importorskip("mcp")
    episode = await played("3", tools=[], mcp={"sums": ["/no/such/program"]}, limits=Limits(retries=0))
    assert episode.failed and 'MCP server "sums" cannot be reached' in str(episode.error)


def test_an_mcp_server_that_is_neither_url_nor_command_is_refused() -> None:
    pytest.importorskip("mcp")
    with pytest.raises(ConfigError, match='MCP server "x" must be a URL'):
        ToolAgent(mcp={"x": 3})


def test_a_tool_of_its_own_making_is_offered_as_it_is() -> None:
    async def call(given: dict[str, Any]) -> str:
        raise InfrastructureError("gone")

    own = Tool("own", "Mine.", {"type": "object", "properties": {}}, call)
    assert as_tools([own]) == [own]
