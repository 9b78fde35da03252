"""Workflow "external_agent": programs in processes of their own."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from fakes import ROOT, FakeEngine, char_chat
from headrace.data.episode import Episode, TerminationReason
from headrace.data.task import Task
from headrace.engines.base import SamplingParams
from headrace.errors import ConfigError, EngineError
from headrace.judge.base import FunctionJudger
from headrace.registry import resolve
from headrace.rollout.agent_loop import AgentLoop, Limits, RolloutSpec
from headrace.rollout.budget import Budget
from headrace.rollout.gateway import close_gateway
from headrace.rollout.gateway.external import ExternalAgent

TASK = Task("t", instruction="Say a word.", answer=7, metadata={"hint": "é"})
SAMPLING = SamplingParams(temperature=1.0, max_tokens=16)
# no SDK: what a program in any language would do, and fast to start
ASK = """
import json, os, sys, urllib.request

def ask(text="Say a word.", path="/chat/completions"):
    body = json.dumps({"messages": [{"role": "user", "content": text}], "return_token_ids": True}).encode()
    url = os.environ["OPENAI_BASE_URL"] + path
    head = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, body, head)) as answer:
        return json.load(answer)
"""


@pytest.fixture(autouse=True)
async def _closed() -> AsyncIterator[None]:
    yield
    await close_gateway()


async def roll_out(
    tmp_path: Path, code: str, engine: FakeEngine | None = None, judger: Any = None, **limits: Any
) -> Episode:
    program = tmp_path / "agent.py"
    program.write_text(ASK + code)
    run = ExternalAgent(["python", "-S", str(program)], environment={"OUT": str(tmp_path)}).run
    limits = {"retries": 0, **limits}
    manager = AgentLoop(run, engine or FakeEngine(), char_chat(), judger, Limits(**limits))
    return await manager.roll_out(RolloutSpec(TASK, 0, 0, 5), SAMPLING)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "zombie" not in Path(f"/proc/{pid}/status").read_text()


async def test_the_last_line_may_be_the_reward(tmp_path: Path) -> None:
    code = """
task = json.load(sys.stdin)
assert task == json.loads(os.environ["HEADRACE_TASK"]) and task["metadata"] == {"hint": "é"}
reply = ask(task["messages"][0]["content"])
print("some talk")
print(json.dumps({"reward": task["answer"] + reply["usage"]["completion_tokens"]}))
"""
    episode = await roll_out(tmp_path, code, FakeEngine(lambda seed: "abc"))
    assert episode.error is None and episode.reward == 11.0
    assert [step.text for step in episode.trajectories[0].steps] == ["abc"]


async def test_recorded_ids_are_those_that_the_program_got(tmp_path: Path) -> None:
    code = """
found = [ask()["headrace"], ask("And?")["headrace"]]
open(os.environ["OUT"] + "/ids", "w").write(json.dumps(found))
"""
    episode = await roll_out(tmp_path, code, judger=FunctionJudger(lambda task, text: len(text)))
    told = json.loads((tmp_path / "ids").read_text())
    steps = episode.trajectories[0].steps
    assert [(tuple(t["prompt_token_ids"]), tuple(t["completion_token_ids"])) for t in told] == [
        (step.prompt_ids, step.response_ids) for step in steps
    ]
    assert episode.reward == len(steps[-1].text)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("ask(); sys.exit('the tool is broken')", "ended with code 1: the tool is broken"),
        ("ask(); os.kill(os.getpid(), 9)", "ended by signal 9: it wrote nothing to stderr"),
        ("ask(); print(json.dumps({'reward': 'high'}))", "the program's last line has the reward 'high'"),
        ("ask(); print('[' * 100000)", "returned no reward and the run has no judger"),
        ("pass", "the workflow made no model call"),
        ("sys.stderr.write('x' * 10**6 + 'the end'); sys.exit(3)", "xxxthe end"),
    ],
)
async def test_a_program_that_fails_fails_its_episode_and_says_why(tmp_path: Path, code: str, said: str) -> None:
    episode = await roll_out(tmp_path, code)
    assert episode.termination == TerminationReason.ERROR
    assert episode.error is not None and said in episode.error and len(episode.error) < 3000


LEAVES_A_CHILD = """
import subprocess
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])
open(os.environ["OUT"] + "/pids", "w").write(f"{os.getpid()} {child.pid}")
ask()
"""


async def _gone(tmp_path: Path) -> None:
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    for _ in range(200):
        if not any(map(alive, pids)):
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"of {pids} some are still alive")


async def test_at_the_time_out_the_process_group_is_killed(tmp_path: Path) -> None:
    began = time.monotonic()
    episode = await roll_out(tmp_path, LEAVES_A_CHILD + "import time; time.sleep(60)", timeout_s=2.0)
    assert episode.termination == TerminationReason.TIMEOUT and time.monotonic() - began < 20
    await _gone(tmp_path)


async def test_at_a_cancellation_it_is_killed_too(tmp_path: Path) -> None:
    running = asyncio.create_task(roll_out(tmp_path, LEAVES_A_CHILD + "import time; time.sleep(60)"))
    for _ in range(500):
        await asyncio.sleep(0.02)
        if (tmp_path / "pids").exists() and (tmp_path / "pids").read_text():
            break
    running.cancel()
    began = time.monotonic()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert time.monotonic() - began < 10
    await _gone(tmp_path)


async def test_what_a_program_leaves_behind_does_not_hold_its_episode_up(tmp_path: Path) -> None:
    began = time.monotonic()
    episode = await roll_out(tmp_path, LEAVES_A_CHILD + "print(json.dumps({'reward': 1}))")
    assert episode.reward == 1.0 and time.monotonic() - began < 10
    await _gone(tmp_path)


async def test_an_engine_that_fails_ends_the_program_and_the_run(tmp_path: Path) -> None:
    code = "\ntry:\n    ask()\nexcept Exception:\n    import time; time.sleep(60)\n"
    began = time.monotonic()
    with pytest.raises(EngineError, match="out of memory"):
        await roll_out(tmp_path, code, FakeEngine(breaks="out of memory"))
    assert time.monotonic() - began < 10


async def test_a_budget_ends_the_episode_by_its_reason(tmp_path: Path) -> None:
    judger = FunctionJudger(lambda task, text: 0.5)
    episode = await roll_out(tmp_path, "while True: ask()", judger=judger, budget=Budget(turns=3))
    assert (episode.termination, episode.error, episode.reward) == (TerminationReason.TURNS, None, 0.5)
    assert len(episode.trajectories[0].steps) == 3


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"command": "python agent.py"}, "must be a list of words"),
        ({"command": []}, "must be a list of words"),
        ({"command": ["no-such-program"]}, 'there is no program "no-such-program"'),
        ({"command": ["python"], "folder": "/no/such/folder"}, "does not exist"),
    ],
)
def test_a_command_that_cannot_be_started_is_reported_at_once(args: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        resolve("workflow", "external_agent")(**args)


def test_the_example_is_a_program_of_its_own() -> None:
    assert "headrace" not in (ROOT / "examples" / "openai_agent.py").read_text().replace("headrace train", "")
