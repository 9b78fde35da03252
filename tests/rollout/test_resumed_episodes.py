"""Episodes that were under way at a crash: told again what they were told, or started anew where that does not fit."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from crash_scenarios import RememberingNull
from fakes import FakeEngine, char_chat, random_word
from headrace.data.episode import Episode
from headrace.data.task import Task
from headrace.engines.base import SamplingParams
from headrace.errors import EngineError
from headrace.judge.base import Judger, Verdict
from headrace.ledger import Ledger, LedgerReader
from headrace.rollout.agent_loop import AgentLoop, Limits, RolloutSpec
from headrace.rollout.model_client import Model
from headrace.run.ledger_journal import LedgerJournal
from headrace.trainer.callbacks import Callback, Metrics
from null_backend import null_run, some_tasks

TASK = Task("task 7", instruction="Say a word.")
SPEC = RolloutSpec(TASK, group_id=0, rollout_idx=0, seed=11)
SAMPLING = SamplingParams(temperature=1.0, max_tokens=16)


class Length(Judger):
    """Rewards long replies; counts how often it was asked."""

    asked = 0

    async def judge(self, task: Task, episode: Episode) -> Verdict:
        self.asked += 1
        return Verdict(float(len(episode.text)), True, {"length": float(len(episode.text))})


def engine_for(answers: int) -> FakeEngine:
    """Answers so often; then the machine is gone."""
    left = answers

    def reply(seed: int) -> str:
        nonlocal left
        if not left:
            raise EngineError("the machine is gone")
        left -= 1
        return random_word(seed)

    return FakeEngine(reply)


async def live(folder: Path, run: Any, answers: int, judger: Judger | None = None) -> tuple[Episode | None, int]:
    """One life of an episode: what it came to, if it came to its end, and how many calls the engine answered."""
    engine = engine_for(answers)
    os.makedirs(folder, exist_ok=True)
    with Ledger.open(folder) as ledger:
        ledger.dispatched(0, (0, 0), TASK.id, TASK.source, 1, 0)
        journal = LedgerJournal(ledger)
        manager = AgentLoop(run, engine, char_chat(), judger, Limits(timeout_s=5.0), journal=journal)
        try:
            return await manager.roll_out(SPEC, SAMPLING), len(engine.requests)
        except EngineError:
            return None, len(engine.requests) - 1


async def three_turns(task: Task, model: Model) -> float:
    messages = [*task.messages]
    for _ in range(3):
        reply = await model.chat(messages)
        messages += [reply.message, {"role": "user", "content": "Again!"}]
    return float(len(messages))


@pytest.mark.parametrize("answers", [0, 1, 2])
async def test_calls_that_were_answered_are_not_made_again(tmp_path: Path, answers: int) -> None:
    whole, _ = await live(tmp_path / "whole", three_turns, 3)
    assert await live(tmp_path / "cut", three_turns, answers) == (None, answers)
    episode, asked = await live(tmp_path / "cut", three_turns, 3)
    assert episode == whole and asked == 3 - answers
    with LedgerReader.read(tmp_path / "cut") as reader:
        assert reader.group(0) == [whole] and reader.restarted() == 0


async def test_several_crashes_cost_no_call_twice(tmp_path: Path) -> None:
    assert [await live(tmp_path, three_turns, 1) for _ in range(2)] == [(None, 1), (None, 1)]
    episode, asked = await live(tmp_path, three_turns, 1)
    assert asked == 1 and episode is not None and len(episode.trajectories[0].steps) == 3


async def test_calls_side_by_side_come_back_to_whom_they_belong(tmp_path: Path) -> None:
    async def side_by_side(task: Task, model: Model) -> float:
        async with asyncio.TaskGroup() as group:
            said = [group.create_task(model.chat(task.messages, role=role)) for role in ("a", "b", "c")]
        assert [task.result().text for task in said] == [t.steps[0].text for t in model.trajectories()]
        return 1.0

    whole, _ = await live(tmp_path / "whole", side_by_side, 3)
    assert await live(tmp_path / "cut", side_by_side, 2) == (None, 2)
    assert await live(tmp_path / "cut", side_by_side, 3) == (whole, 1)


async def test_a_tool_that_has_answered_is_not_called_again(tmp_path: Path) -> None:
    called: list[str] = []

    def search(text: str, *, limit: int) -> dict[str, Any]:
        called.append(text)
        return {"found": [text, limit]}

    async def with_tool(task: Task, model: Model) -> float:
        first = await model.chat(task.messages)
        found = await model.tool(search, first.text, limit=3)
        assert found == {"found": [first.text, 3]}
        await model.chat([*task.messages, first.message, {"role": "user", "content": str(found)}])
        return 1.0

    assert await live(tmp_path, with_tool, 1) == (None, 1)
    episode, asked = await live(tmp_path, with_tool, 1)
    assert episode is not None and asked == 1 and len(called) == 1


async def test_a_judger_that_has_answered_is_not_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def once(task: Task, model: Model) -> None:
        await model.chat(task.messages)

    judger = Length()
    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "finished", lambda *_: pytest.fail("killed before this"))
        with pytest.raises(pytest.fail.Exception):
            await live(tmp_path, once, 1, judger)
    episode, asked = await live(tmp_path, once, 1, judger)
    assert episode is not None and (asked, judger.asked) == (0, 1)
    assert episode.reward == len(episode.text) == episode.metrics["length"] and episode.is_correct is True


# ---- workflows that do not do the same again ------------------------------------------------------------------------


def other_each_time(ask: Callable[[int, Task, Model], Any]) -> Any:
    """A workflow that knows which of its lives this is."""
    lives = -1

    async def run(task: Task, model: Model) -> float:
        nonlocal lives
        lives += 1
        await ask(lives, task, model)
        return 1.0

    return run


def asked(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


async def another_question(life: int, task: Task, model: Model) -> None:
    await model.chat(asked(f"life {min(life, 1)}"))
    await model.chat(asked("and?"))


async def another_temperature(life: int, task: Task, model: Model) -> None:
    await model.chat(asked("?"), temperature=1.0 if life else 0.5)
    await model.chat(asked("and?"))


async def another_tool(life: int, task: Task, model: Model) -> None:
    await model.tool(len, f"life {min(life, 1)}")
    await model.chat(asked("?"))
    await model.chat(asked("and?"))


async def fewer_questions(life: int, task: Task, model: Model) -> None:
    for _ in range(1 if life else 3):
        await model.chat(asked("?"))


async def everything_caught(life: int, task: Task, model: Model) -> None:
    for _ in range(2):
        try:
            await model.chat(asked(f"life {min(life, 1)}"))
        except Exception:  # as a careless workflow does
            await model.chat(asked("never mind"))


async def tried_for_ever(life: int, task: Task, model: Model) -> None:
    replies = 0
    while replies < 2:
        try:
            await model.chat(asked(f"life {min(life, 1)}"))
            replies += 1
        except Exception:
            continue


async def caught_in_a_task_group(life: int, task: Task, model: Model) -> None:
    await model.chat(asked("?"))
    try:
        async with asyncio.TaskGroup() as group:
            for place in range(2):
                group.create_task(model.chat(asked(f"life {min(life, 1)}, {place}"), role=str(place)))
    except* Exception:
        pass


@pytest.mark.parametrize(
    ("ask", "answers"),
    [(another_question, 1), (another_temperature, 1), (another_tool, 1), (fewer_questions, 2), (everything_caught, 1),
     (tried_for_ever, 1), (caught_in_a_task_group, 2)],
    ids=lambda given: getattr(given, "__name__", ""),
)  # fmt: skip
async def test_a_workflow_that_does_something_else_is_started_again_and_counted(
    tmp_path: Path, ask: Callable[[int, Task, Model], Any], answers: int
) -> None:
    run = other_each_time(ask)
    assert (await live(tmp_path, run, answers))[0] is None
    began = asyncio.get_running_loop().time()
    episode, _ = await live(tmp_path, run, 9)
    assert asyncio.get_running_loop().time() - began < 4.0  # at once, and not when its time is over
    assert episode is not None and not episode.failed and episode.attempt == 1
    with LedgerReader.read(tmp_path) as reader:
        assert reader.restarted() == 1 and reader.account().pending == 1
        assert reader.group(0) == [episode]
        assert len(reader.calls(0, 0, 0)) >= answers  # what was given up is there to be looked at


async def test_it_is_counted_in_the_journal_over_all_processes(tmp_path: Path) -> None:
    run = other_each_time(lambda life, task, model: model.chat(asked(f"life {life // 2}")))

    async def twice(task: Task, model: Model) -> float:
        await run(task, model)
        return await run(task, model)

    await live(tmp_path, twice, 1)
    await live(tmp_path, twice, 1)
    with Ledger.open(tmp_path) as ledger:
        assert LedgerJournal(ledger).restarted == ledger.restarted() == 1


# ---- in a run -------------------------------------------------------------------------------------------------------


class Crash(Callback):
    """As if the machine were gone."""

    def on_batch_end(self, step: int, metrics: Metrics) -> None:
        if step == 3:
            raise ConnectionError("the machine is gone")


def test_a_run_reports_how_many_episodes_it_started_again(tmp_path: Path) -> None:
    life = 0

    async def moody(task: Task, model: Model) -> float:
        await model.chat(asked(f"life {life}"))
        reply = await model.chat(asked("and?"))
        return float(sum(reply.completion_ids) % 5)

    given: dict[str, Any] = {
        "null": RememberingNull(lambda seed: 1.0 + seed % 7, 1.0),
        "trainer": {"steps": 8, "batch_size": 2, "max_staleness": 2, "placement": "separate", "save_every": 2},
        "ledger": {"enabled": True},
    }
    with pytest.raises(ConnectionError):
        null_run(tmp_path, moody, some_tasks(9), callbacks=[Crash()], **given)
    life = 1
    ran = null_run(tmp_path, moody, some_tasks(9), **given)
    with LedgerReader.read(ran.result.run_dir) as reader:
        restarted, account = reader.restarted(), reader.account()
    assert restarted > 0 and "episodes/restarted" not in ran.rows[1]
    assert ran.rows[-1]["episodes/restarted"] == restarted
    assert account.trained == 8 * 2 * 2 and account.failed == 0
