"""A recorded episode replayed: workflow and judger run, the model and the tools answer as they did."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from headrace.data.episode import ModelOutput
from headrace.data.task import Task
from headrace.errors import DataError
from headrace.ledger.episode_record import DivergedReplay, tool_digest
from headrace.rollout.replayed import replay_episode

AGENT = """
def price(name):
    raise RuntimeError("a tool is not called again")

async def shop(task, model):
    said = await model.chat(task.messages)
    found = await model.tool(price, said.text)
    await model.chat([*task.messages, said.message, {"role": "tool", "content": str(found)}])
"""
TASK = Task("t", instruction="what does it cost?", answer="7")


def output(text: str, call: int) -> dict[str, Any]:
    return ModelOutput(text, (1, 2), (3,), (-0.1,), (-0.1,), (0,), content=text, call=call).to_dict()


@pytest.fixture
def record(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "shop_agent.py").write_text(AGENT)
    asked = [{"role": "user", "content": "what does it cost?"}]
    later = [*asked, {"role": "assistant", "content": "apple"}, {"role": "tool", "content": "7"}]
    tool = {
        "number": 0,
        "kind": "tool",
        "name": "price",
        "digest": tool_digest("price", [("apple",), {}]),
        "payload": 7,
    }
    verdict = {"number": 1, "kind": "judger", "name": "ExactJudger", "digest": "", "payload": [0.0, False, {}]}
    return {
        "config": {"workflow": {"name": f"{tmp_path}/shop_agent.py:shop", "judger": "exact"}},
        "task_id": "t",
        "place": [3, 1, 5],
        "calls": [
            {"role": "agent", "messages": asked, "output": output("apple", 0)},
            {"role": "agent", "messages": later, "output": output("7", 1)},
        ],
        "results": [tool, verdict],
    }


def test_the_workflow_gets_its_recorded_answers_and_is_judged_anew(record: dict[str, Any]) -> None:
    episode = replay_episode(json.loads(json.dumps(record)), TASK)
    assert (episode.reward, episode.is_correct, episode.error) == (1.0, True, None)
    assert [step.text for step in episode.trajectories[0].steps] == ["apple", "7"]
    assert (episode.group_id, episode.rollout_idx, episode.seed) == (3, 1, 5)


def test_a_judger_that_changed_its_mind_is_noticed(record: dict[str, Any]) -> None:
    other = Task("t", instruction="what does it cost?", answer="8")
    assert replay_episode(record, other).reward == 0.0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda record: record["calls"][1]["messages"].pop(), "model call 1 has other messages"),
        (lambda record: record["calls"].pop(), "model call 1 is not on record"),
        (lambda record: record["calls"][0].update(role="judge"), 'was of role "judge"'),
        (lambda record: record["results"][0].update(digest="x"), 'tool "price"'),
        (lambda record: record["calls"].append({**record["calls"][1], "output": output("more", 2)}), "ended before"),
    ],
)
def test_a_workflow_that_asks_for_something_else_is_told_what(record: dict[str, Any], change: Any, said: str) -> None:
    changed = copy.deepcopy(record)
    change(changed)
    with pytest.raises(DivergedReplay, match=said):
        replay_episode(changed, TASK)


def test_a_task_that_is_not_in_the_data_has_to_be_given(record: dict[str, Any]) -> None:
    record["config"]["data"] = {"tasks": "countdown", "args": {"split": "train", "count": 3}}
    with pytest.raises(DataError, match="replay_episode"):
        replay_episode(record)
