"""Environments in text, budgets, retries, and what episodes remember for each other."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from fakes import FakeEngine, char_chat
from headrace.data.episode import Episode
from headrace.data.task import Task
from headrace.engines.base import SamplingParams
from headrace.errors import ConfigError, InfrastructureError
from headrace.judge.base import Judger, Verdict
from headrace.ledger import Ledger
from headrace.rollout.agent_loop import AgentLoop, Limits, RolloutSpec
from headrace.rollout.budget import Budget
from headrace.rollout.chat_loop import ChatLoop
from headrace.rollout.environment import EnvironmentLoop
from headrace.rollout.model_client import Model
from headrace.rollout.store import StoredValues
from headrace.run.ledger_journal import LedgerJournal

TASK = Task("t", instruction="Guess.", metadata={"secret": 5})
SPEC = RolloutSpec(TASK, 0, 0, 7)
SAMPLING = SamplingParams(max_tokens=50)


class Guess:
    """Higher or lower."""

    def __init__(self, low: int = 1) -> None:
        self.low = low

    def reset(self, task: Task) -> str:
        self.secret = task.metadata["secret"]
        return f"Guess a number from {self.low} to 9."

    def step(self, action: str) -> tuple[Any, ...]:
        number = int(action)
        if number == self.secret:
            return "Right.", 1.0, True, {"is_correct": True, "metrics": {"guess": number}}
        return ("Higher." if number < self.secret else "Lower."), -0.1, False


async def played(env: Any, *replies: str, limits: Limits | None = None, **args: Any) -> Episode:
    said = iter(replies)
    engine = FakeEngine(lambda seed: next(said))
    loop = EnvironmentLoop(env, **args)
    manager = AgentLoop(loop.run, engine, char_chat(), None, limits)
    return await manager.roll_out(SPEC, SAMPLING)


async def test_an_episode_is_played_to_its_end() -> None:
    episode = await played(Guess, "3", "7", "5", system="Play.", args={"low": 2})
    (trajectory,) = episode.trajectories
    assert trajectory.reward == pytest.approx(0.8) and [s.reward for s in trajectory.steps] == [-0.1, -0.1, 1.0]
    assert (episode.is_correct, episode.termination) == (True, "done")
    assert episode.metrics == {"turns": 3.0, "guess": 5}
    assert [m["content"] for m in trajectory.steps[-1].messages] == [
        "Play.", "Guess a number from 2 to 9.", "3", "Higher.", "7", "Lower.",
    ]  # fmt: skip


async def test_too_many_turns_end_it() -> None:
    episode = await played(Guess, *"1111", max_turns=2)
    assert (episode.termination, episode.failed, len(episode.trajectories[0].steps)) == ("turns", False, 2)


class Gymnasium(Guess):
    async def reset(self, task: Task) -> Any:  # type: ignore[override]
        return super().reset(task), {}

    async def step(self, action: str) -> Any:  # type: ignore[override]
        observation, reward, done, *_ = super().step(action)
        return observation, reward, done, False, {}


async def test_gymnasiums_five_and_async_methods_are_taken() -> None:
    assert (await played(Gymnasium, "3", "5")).trajectories[0].reward == pytest.approx(0.9)


@pytest.mark.parametrize(
    ("answer", "says"),
    [("text", "step must return"), (("a", 1.0), "step must return"), ((3, 1.0, True), "text, a number"),
     (("a", "b", True), "text, a number"), (("a", 1.0, {}), "text, a number")],
)  # fmt: skip
async def test_a_misshapen_step_fails_the_episode(answer: Any, says: str) -> None:
    class Odd(Guess):
        def step(self, action: str) -> Any:
            return answer

    assert says in str((await played(Odd, "1")).error)


async def test_an_environment_is_closed_even_if_it_fails() -> None:
    closed = []

    class Breaks(Guess):
        def close(self) -> None:
            closed.append(True)

    assert (await played(Breaks, "no number")).failed and closed == [True]


def test_bad_arguments_are_refused_before_the_run() -> None:
    with pytest.raises(ConfigError, match="max_turns must be at least 1"):
        EnvironmentLoop(Guess, max_turns=0)
    with pytest.raises(ConfigError, match='unknown environment "nope"'):
        EnvironmentLoop("nope")


# ---- budgets ---------------------------------------------------------------------------------------------------------


async def talk(task: Task, model: Model) -> float:
    messages = list(task.messages)
    for _ in range(5):
        reply = await model.chat(messages)
        messages += [reply.message, {"role": "user", "content": "Go on."}]
    return 1.0


def manager(run: Any, budget: Budget | None = None, values: Any = None, **limits: Any) -> AgentLoop:
    bounds = Limits(budget=budget or Budget(), **limits)
    return AgentLoop(run, FakeEngine(lambda seed: "0123456789"), char_chat(), Score(), bounds, values=values)


class Score(Judger):
    async def judge(self, task: Task, episode: Episode) -> Verdict:
        return Verdict(0.5, is_correct=False)


@pytest.mark.parametrize(
    ("budget", "ends", "tokens"),
    [
        (Budget(), "done", [11] * 5),
        (Budget(turns=3), "turns", [11] * 3),
        (Budget(tokens=22), "tokens", [11, 11]),
        (Budget(tokens=25), "tokens", [11, 11, 3]),
        (Budget(turns=2, tokens=5), "tokens", [5]),
    ],
)
async def test_a_budget_ends_the_episode_with_its_reason(budget: Budget, ends: str, tokens: list[int]) -> None:
    episode = await manager(talk, budget).roll_out(SPEC, SAMPLING)
    assert (episode.termination, episode.failed) == (ends, False)
    assert [len(step.response_ids) for step in episode.trajectories[0].steps] == tokens


async def test_calls_side_by_side_share_the_budget() -> None:
    async def both(task: Task, model: Model) -> float:
        await asyncio.gather(*(model.chat(task.messages, role=f"r{i}", max_tokens=10) for i in range(3)))
        return 1.0

    episode = await manager(both, Budget(tokens=15)).roll_out(SPEC, SAMPLING)
    assert episode.termination == "tokens"
    assert sum(len(s.response_ids) for t in episode.trajectories for s in t.steps) <= 15


# ---- retries ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [ConnectionError("reset"), TimeoutError("late"), InfrastructureError("gone")])
async def test_an_episode_whose_infrastructure_failed_is_tried_again(error: Exception) -> None:
    tries = []

    async def run(task: Task, model: Model) -> float:
        tries.append(1)
        await model.chat(task.messages)
        if len(tries) < 3:
            raise error
        return 1.0

    episode = await manager(run).roll_out(SPEC, SAMPLING)
    assert (len(tries), episode.failed, len(episode.trajectories[0].steps)) == (3, False, 1)


async def test_a_users_own_mistake_is_not_tried_again() -> None:
    tries = []

    async def run(task: Task, model: Model) -> float:
        tries.append(1)
        raise ValueError("mine")

    assert (await manager(run).roll_out(SPEC, SAMPLING)).failed and len(tries) == 1


async def test_retries_are_attempts_of_the_ledger(tmp_path: Path) -> None:
    tries = []

    async def run(task: Task, model: Model) -> float:
        tries.append((await model.chat(task.messages)).text)
        if len(tries) < 2:
            raise ConnectionError("reset")
        return 1.0

    with Ledger.open(tmp_path) as ledger:
        ledger.dispatched(0, (0, 0), "t", "default", 1, 0)
        journal = LedgerJournal(ledger)
        rolled = AgentLoop(run, FakeEngine(), char_chat(), None, journal=journal)
        episode = await rolled.roll_out(SPEC, SAMPLING)
        assert (episode.attempt, journal.restarted) == (1, 1)


# ---- the store -------------------------------------------------------------------------------------------------------


async def test_episodes_remember_for_each_other(tmp_path: Path) -> None:
    async def run(task: Task, model: Model) -> float:
        await model.chat(task.messages)
        seen = await model.store.get("seen", 0)
        await model.store.put("seen", seen + 1)
        return float(await model.store.append("said", f"at {seen}", keep=2))

    rolled = manager(run, values=StoredValues(tmp_path / "store.sqlite"))
    rewards = [(await rolled.roll_out(SPEC, SAMPLING)).trajectories[0].reward for _ in range(3)]
    assert rewards == [1.0, 2.0, 2.0]
    assert StoredValues(tmp_path / "store.sqlite").get("said") == ["at 1", "at 2"]


async def test_evaluation_reads_the_store_and_leaves_it_alone(tmp_path: Path) -> None:
    async def run(task: Task, model: Model) -> float:
        await model.chat(task.messages)
        await model.store.put("best", 2)
        return float(await model.store.get("best") + await model.store.get("other"))

    values = StoredValues(tmp_path / "store.sqlite")
    values.put("best", 1)
    values.put("other", 10)
    evaluating = AgentLoop(run, FakeEngine(), char_chat(), None, training=False, values=values)
    assert (await evaluating.roll_out(SPEC, SAMPLING)).trajectories[0].reward == 12.0
    assert values.get("best") == 1


async def test_an_unused_store_leaves_no_file(tmp_path: Path) -> None:
    values = StoredValues(tmp_path / "store.sqlite")
    assert values.get("x") is None and not os.listdir(tmp_path)


@pytest.mark.parametrize("value", [object(), {1, 2}])
async def test_what_json_cannot_hold_is_refused(value: Any) -> None:
    async def run(task: Task, model: Model) -> float:
        await model.chat(task.messages)
        await model.store.put("x", value)
        return 1.0

    assert "must be data that JSON can hold" in str((await manager(run).roll_out(SPEC, SAMPLING)).error)


# ---- the chat loop ---------------------------------------------------------------------------------------------------


async def talked(respond: Any, **args: Any) -> Episode:
    return await manager(ChatLoop(respond, **args).run).roll_out(SPEC, SAMPLING)


async def test_a_conversation_continues_until_the_user_has_nothing_more_to_say() -> None:
    async def respond(task: Task, messages: list[dict[str, Any]]) -> Any:
        turns = sum(m["role"] == "assistant" for m in messages)
        return {1: "Go on.", 2: {"role": "user", "content": "And?"}}.get(turns)

    episode = await talked(respond, system="Talk.")
    (trajectory,) = episode.trajectories
    assert [m["content"] for m in trajectory.steps[-1].messages if m["role"] != "assistant"] == [
        "Talk.", "Guess.", "Go on.", "And?",
    ]  # fmt: skip
    assert (episode.termination, trajectory.reward, len(trajectory.steps)) == ("done", 0.5, 3)


async def test_a_user_who_never_ends_is_ended() -> None:
    episode = await talked(lambda task, messages: "More.", max_turns=2)
    assert (episode.termination, len(episode.trajectories[0].steps)) == ("turns", 2)


async def test_a_user_who_says_something_else_fails_the_episode() -> None:
    assert "must return text, a message or None, got 3" in str((await talked(lambda task, messages: 3)).error)
    with pytest.raises(ConfigError, match="respond is called with"):
        ChatLoop(lambda task: None)
