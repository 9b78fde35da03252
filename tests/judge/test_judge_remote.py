"""A judger behind a URL, on a real server."""

from __future__ import annotations

from typing import Any

import pytest

from fake_server import Answer, Server, serving
from headrace.data.episode import Episode, Step, Trajectory
from headrace.data.task import Task
from headrace.engines import http
from headrace.errors import InfrastructureError, WorkflowError
from headrace.judge.base import Verdict, as_judger
from headrace.registry import resolve

TASK = Task("1", instruction="Capital of France?", answer="Paris", metadata={"level": 2})
EPISODE = Episode("1", (Trajectory((Step((1, 2), (3,), (-0.5,), (0,), text="Paris"),)),), rollout_idx=4)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "_FIRST_PAUSE_S", 0.01)


async def judged(server: Server, **args: Any) -> Verdict:
    judger = as_judger(resolve("judger", "remote"), {"url": f"{server.url}/judge", **args})
    try:
        return await judger.judge(TASK, EPISODE)
    finally:
        await judger.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [
        ({"reward": 0.5}, Verdict(0.5)),
        ({"reward": 1, "is_correct": True, "metrics": {"style": 2}}, Verdict(1.0, True, {"style": 2.0})),
        ({"reward": -1.5, "is_correct": False, "metrics": None, "note": "x"}, Verdict(-1.5, False)),
    ],
)
async def test_the_answer_is_the_verdict(answer: Any, verdict: Verdict) -> None:
    with serving(lambda asked: Answer(answer)) as server:
        assert await judged(server) == verdict


@pytest.mark.parametrize("tokens", [False, True])
async def test_the_server_gets_task_and_episode(tokens: bool) -> None:
    with serving(lambda asked: Answer({"reward": 0})) as server:
        await judged(server, tokens=tokens)
    (asked,) = server.asked
    assert asked.path == "/judge"
    assert asked.body["task"]["answer"] == "Paris" and asked.body["task"]["metadata"] == {"level": 2}
    episode = asked.body["episode"]
    assert (episode["text"], episode["task_id"], episode["rollout_idx"]) == ("Paris", "1", 4)
    (step,) = episode["trajectories"][0]["steps"]
    assert step["text"] == "Paris" and ("response_ids" in step) == tokens


async def test_failures_of_the_server_are_tried_again_and_then_the_episode_is() -> None:
    answers = [Answer("busy", 503), Answer("", hangs_up=True), Answer({"reward": 1})]
    with serving(lambda asked: answers.pop(0)) as server:
        assert (await judged(server)).reward == 1.0
    with serving(lambda asked: Answer("busy", 503)) as server:
        with pytest.raises(InfrastructureError, match="503: busy"):
            await judged(server, retries=1)
        assert len(server.asked) == 2


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (Answer("<html>" + "x" * 400), r"something else than JSON: '<html>x{194}'"),
        (Answer({"score": 1}), r"finite number \"reward\", got \{'score': 1\}"),
        (Answer([1]), "finite number"),
        (Answer('{"reward": NaN}'), "finite number"),
        (Answer({"reward": True}), "finite number"),
        (Answer({"reward": "1"}), "finite number"),
        (Answer({"reward": 1, "is_correct": 1}), '"is_correct" must be'),
        (Answer({"reward": 1, "is_correct": "yes"}), '"is_correct" must be'),
        (Answer({"reward": 1, "metrics": {"style": "good"}}), '"metrics" must be'),
        (Answer({"detail": "no such task"}, 422), "422: no such task"),
    ],
)
async def test_a_bad_answer_is_a_failure_that_quotes_it(answer: Answer, problem: str) -> None:
    with serving(lambda asked: answer) as server:
        with pytest.raises(WorkflowError, match=problem) as caught:
            await judged(server)
        assert len(server.asked) == 1 and len(str(caught.value)) < 700


async def test_the_key_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "sk-secret")
    with serving(lambda asked: Answer({"reward": 1})) as server:
        await judged(server, api_key_env="JUDGE_KEY")
    assert server.asked[0].headers["authorization"] == "Bearer sk-secret"
