"""Reward functions with verl's signature judge here."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.data.episode import Episode, Step, Trajectory
from headrace.data.task import Task
from headrace.errors import ConfigError, WorkflowError
from headrace.judge.verl_reward import VerlReward

_CODE = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, bonus=0.0):
    right = solution_str.strip() == ground_truth
    return {"score": right + bonus, "seen": extra_info["index"], "source": data_source}

def wrong(data_source, solution_str, ground_truth, extra_info):
    return "1.0"

def alien(task, text):
    return 1.0
"""
TASK = Task(id="1", instruction="?", answer="72", source="openai/gsm8k", metadata={"extra_info": {"index": 5}})
SAID = Episode("1", (Trajectory((Step((1,), (2,), text=" 72"),)),))


@pytest.fixture
def functions(tmp_path: Path) -> str:
    (tmp_path / "my_reward.py").write_text(_CODE)
    return str(tmp_path / "my_reward.py")


async def test_the_function_gets_what_verl_gives_it(functions: str) -> None:
    verdict = await VerlReward(f"{functions}:compute_score", bonus=0.5).judge(TASK, SAID)
    assert (verdict.reward, verdict.is_correct, verdict.metrics) == (1.5, True, {"seen": 5.0})


async def test_what_is_no_score_is_refused(functions: str) -> None:
    with pytest.raises(WorkflowError, match="must give a number"):
        await VerlReward(f"{functions}:wrong").judge(TASK, SAID)


def test_a_function_with_another_signature_is_refused_at_the_start(functions: str) -> None:
    with pytest.raises(ConfigError, match="alien"):
        VerlReward(f"{functions}:alien")
