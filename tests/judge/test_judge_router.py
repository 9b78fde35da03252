"""Routing by source, and what becomes of a judger's failure."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from fakes import FakeEngine, char_chat, step
from headrace.config import JudgeSection
from headrace.config.loading import build_config
from headrace.data.episode import Episode, TerminationReason, Trajectory
from headrace.data.task import Task
from headrace.engines.base import SamplingParams
from headrace.errors import ConfigError, EngineError, InfrastructureError, PromptTooLongError
from headrace.judge import router
from headrace.judge.base import JudgeError, Judger, Verdict, as_judger
from headrace.judge.router import GuardedJudger, Router, configured_judger
from headrace.rollout.agent_loop import AgentLoop, Limits, RolloutSpec
from headrace.rollout.workflow import single_turn


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router, "_PAUSE_S", 0.001)


def task(source: str = "default", answer: Any = "a") -> Task:
    return Task("t", instruction="?", answer=answer, source=source)


def said(text: str) -> Episode:
    return Episode("t", (Trajectory((step([1], [2], text=text),)),))


class Moody(Judger):
    """Raises what it is given, one after the other, then gives 1."""

    def __init__(self, *errors: Exception, takes_s: float = 0.0) -> None:
        self.errors = list(errors)
        self.takes_s = takes_s
        self.asked = self.at_once = self.most_at_once = 0
        self.closed = False
        self.policy: Any = None

    async def judge(self, task: Task, episode: Episode) -> Verdict:
        self.asked += 1
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            await asyncio.sleep(self.takes_s)
        finally:
            self.at_once -= 1
        if self.errors:
            raise self.errors.pop(0)
        return Verdict(1.0, is_correct=True)

    async def close(self) -> None:
        self.closed = True

    def use_policy(self, ask: Any) -> None:
        self.policy = ask


async def roll_out(judger: Judger) -> Episode:
    manager = AgentLoop(single_turn, FakeEngine(), char_chat(), judger, Limits())
    return await manager.roll_out(RolloutSpec(task(), 0, 0, 0), SamplingParams(max_tokens=4))


# ---- routes ----------------------------------------------------------------------------------------------------------


async def test_a_task_goes_to_the_judger_of_its_source() -> None:
    routed = Router({"maths": {"name": "numeric"}, "*": {"name": "exact", "args": {"ignore_case": True}}})
    assert (await routed.judge(task("maths", "7"), said("it is 7.0"))).reward == 1.0
    assert (await routed.judge(task("other", "A"), said("a"))).reward == 1.0
    assert (await routed.judge(task("other", "7"), said("it is 7.0"))).reward == 0.0


async def test_a_source_without_a_judger_ends_the_run_and_says_what_to_add() -> None:
    judger = GuardedJudger(Router({"gsm8k": {"name": "numeric"}}), JudgeSection())
    with pytest.raises(JudgeError, match=r'source "gsm8", .*did you mean "gsm8k".*add a route for it, or one for "\*"'):
        await judger.judge(task("gsm8"), said("7"))
    with pytest.raises(JudgeError, match='has the source "default"'):
        await roll_out(judger)


@pytest.mark.parametrize(
    ("routes", "problem"),
    [
        ({}, "is empty"),
        ({"*": {"name": "nosuch"}}, 'unknown judger "nosuch"'),
        ({"*": {"args": {}}}, "a table with a name"),
        ({"*": {"name": "exact", "arg": {}}}, "a table with a name"),
        ({"*": {"name": "exact", "args": {"wrong": 1}}}, "cannot be called with"),
    ],
)
def test_routes_are_checked_at_the_start(routes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        Router(routes)


def judger_of(sections: dict[str, Any]) -> Judger | None:
    config = build_config(sections)
    return configured_judger(config)


def test_a_run_has_either_routes_or_one_judger() -> None:
    routes = {"routes": {"*": {"name": "exact"}}}
    found = judger_of({"judge": routes})
    assert isinstance(found, GuardedJudger) and isinstance(found.judger, Router)
    one = judger_of({"workflow": {"judger": "countdown"}})
    assert isinstance(one, GuardedJudger) and one.label == "CountdownJudger"
    assert judger_of({}) is None
    with pytest.raises(ConfigError, match="keep one of them"):
        judger_of({"judge": routes, "workflow": {"judger": "countdown"}})


# ---- failures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [ConnectionError("x"), TimeoutError("x"), InfrastructureError("x")])
async def test_judging_is_tried_again_when_infrastructure_failed(error: Exception) -> None:
    judger = Moody(error, error)
    assert (await GuardedJudger(judger, JudgeSection(retries=2)).judge(task(), said(""))).reward == 1.0
    assert judger.asked == 3
    judger = Moody(error, error)
    with pytest.raises(JudgeError):
        await GuardedJudger(judger, JudgeSection(retries=1)).judge(task(), said(""))
    assert judger.asked == 2


async def test_a_bug_is_not_tried_again() -> None:
    judger = Moody(ValueError("bug"))
    with pytest.raises(JudgeError, match="ValueError: bug"):
        await GuardedJudger(judger, JudgeSection(retries=5)).judge(task(), said(""))
    assert judger.asked == 1


@pytest.mark.parametrize("error", [ValueError("bug"), ConnectionError("gone")])
async def test_a_judger_that_fails_marks_the_episode_failed_and_not_wrong(error: Exception) -> None:
    judger = Moody(*[error] * 9)
    guarded = GuardedJudger(judger, JudgeSection(retries=1))
    episode = await roll_out(guarded)
    assert episode.failed and episode.termination == TerminationReason.JUDGE
    assert episode.error == f"{type(error).__name__}: {error}"
    assert (guarded.failed, guarded.judged) == (1, 0) and guarded.time_s > 0
    assert judger.asked == 1 + isinstance(error, ConnectionError), "the episode itself is not rolled out again"


async def test_a_judger_without_rules_marks_the_episode_too() -> None:
    episode = await roll_out(Moody(ValueError("bug")))
    assert episode.termination == TerminationReason.JUDGE and episode.error == "ValueError: bug"


async def test_a_failure_ends_the_run_only_if_asked_to() -> None:
    with pytest.raises(JudgeError, match=r'ValueError: bug; the run ends because judge\.on_failure is "stop"'):
        await roll_out(GuardedJudger(Moody(ValueError("bug")), JudgeSection(on_failure="stop")))


@pytest.mark.parametrize("guard", [True, False])
async def test_a_failure_of_the_engine_that_a_judger_asked_ends_the_run(guard: bool) -> None:
    judger = Moody(EngineError("broken"))
    with pytest.raises(EngineError, match="broken"):
        await roll_out(GuardedJudger(judger, JudgeSection()) if guard else judger)
    judger = Moody(PromptTooLongError("long"))
    episode = await roll_out(GuardedJudger(judger, JudgeSection()) if guard else judger)
    assert episode.termination == TerminationReason.JUDGE


async def test_a_judger_that_takes_too_long_fails() -> None:
    guarded = GuardedJudger(Moody(takes_s=30), JudgeSection(timeout_s=0.02, retries=1))
    with pytest.raises(JudgeError, match=r"took longer than 0\.02 s; raise judge\.timeout_s"):
        await guarded.judge(task(), said(""))


async def test_no_more_are_judged_at_once_than_allowed() -> None:
    judger = Moody(takes_s=0.01)
    guarded = GuardedJudger(judger, JudgeSection(concurrency=3))
    await asyncio.gather(*(guarded.judge(task(), said("")) for _ in range(10)))
    assert judger.most_at_once == 3 and judger.asked == 10


async def test_what_is_not_about_judging_reaches_the_judger_inside() -> None:
    judger = Moody()
    guarded = GuardedJudger(judger, JudgeSection())
    guarded.use_policy("ask")
    await guarded.close()
    assert judger.closed and judger.policy == "ask" and guarded.label == "Moody"


def test_rules_hold_under_one_event_loop_after_the_other() -> None:
    guarded = GuardedJudger(as_judger(lambda task, text: 1.0, {}), JudgeSection(concurrency=1))

    async def judge_two() -> None:
        await asyncio.gather(*(guarded.judge(task(), said("")) for _ in range(2)))

    asyncio.run(judge_two())
    asyncio.run(judge_two())
