"""Programs that a run starts get the variables that are named, and none of the run's keys."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from fakes import FakeEngine, char_chat
from headrace.data.task import Task
from headrace.engines.base import SamplingParams
from headrace.errors import ConfigError
from headrace.judge.pool import WorkerPool
from headrace.rollout.gateway import close_gateway, model_session
from headrace.rollout.gateway.external import ExternalAgent
from headrace.rollout.mcp import McpServers
from headrace.rollout.model_client import Model
from headrace.utils.child_environment import child_environment

SERVER = """
import json, os
from mcp.server.mcpserver import MCPServer
server = MCPServer("variables")

@server.tool()
def variables() -> str:
    return json.dumps(dict(os.environ))

server.run()
"""


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "HTTPS_PROXY", "SEARCH_KEY"):
        monkeypatch.setenv(name, "secret")
    monkeypatch.setenv("LC_ALL", "C.UTF-8")


def test_what_a_program_needs_is_passed_on_and_the_rest_by_name() -> None:
    found = child_environment({"PLAIN": "a$b", "KEY": "$SEARCH_KEY", "COST": "$5", "COUNT": 3})  # type: ignore[dict-item]
    assert found["PATH"] == os.environ["PATH"] and found["LC_ALL"] == "C.UTF-8"
    assert [found[name] for name in ("PLAIN", "KEY", "COST", "COUNT")] == ["a$b", "secret", "$5", "3"]
    assert [name for name, value in found.items() if value == "secret"] == ["KEY"]


def test_a_variable_that_is_not_there_is_reported_with_the_setting() -> None:
    with pytest.raises(ConfigError, match=r'environment of the external agent gives KEY the value of "\$NOT_THERE"'):
        ExternalAgent(["python", "x.py"], environment={"KEY": "$NOT_THERE"})
    with pytest.raises(ConfigError, match='env of the MCP server "sums"'):
        McpServers({"sums": {"command": ["python"], "env": {"KEY": "$NOT_THERE"}}})


async def test_an_mcp_server_gets_no_keys(tmp_path: Path) -> None:
    (tmp_path / "server.py").write_text(SERVER)
    command = [sys.executable, str(tmp_path / "server.py")]
    servers = McpServers({"one": {"command": command, "env": {"KEY": "$SEARCH_KEY"}}})
    try:
        (tool,) = await servers.tools()
        told = await tool.call({})
    finally:
        await servers.close()
    assert told.count("secret") == 1 and '"KEY": "secret"' in told and '"PATH"' in told


async def test_an_external_agent_gets_no_keys(tmp_path: Path) -> None:
    model = Model(FakeEngine(), char_chat(), SamplingParams(max_tokens=4), seed=1)
    program = f"import os; open({str(tmp_path / 'found')!r}, 'w').write(repr(dict(os.environ)))"
    agent = ExternalAgent(["python", "-S", "-c", program], environment={"KEY": "$SEARCH_KEY"})
    async with model_session(model):
        await agent.run(Task("t", instruction="x"), model)
    await close_gateway()
    found = (tmp_path / "found").read_text()
    assert found.count("'secret'") == 1 and "'KEY': 'secret'" in found and "OPENAI_BASE_URL" in found


async def test_a_judgers_worker_gets_no_keys() -> None:
    pool = WorkerPool("headrace.judge.verify:serve", 1, 5.0, 2048)
    worker = await pool._start()
    try:
        assert b"secret" not in _environ(worker.pid)
    finally:
        await pool._end(worker)


def _environ(process: int) -> bytes:
    return Path(f"/proc/{process}/environ").read_bytes()
