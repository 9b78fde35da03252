"""AgentLoopManager without a trainer: batch after batch of complete groups, and evaluation episodes."""

from __future__ import annotations

from typing import Any

import pytest

from fakes import CharTokenizer, FakeEngine
from headrace.config import AgentLoopConfig
from headrace.data.task import Task
from headrace.errors import DataError
from headrace.rollout.model_client import Model
from headrace.scheduling.manager import AgentLoopManager

TASKS = [Task(str(number), instruction=f"Say {number}.") for number in range(6)]
SECTIONS: dict[str, Any] = {"rollout": {"group_size": 2}, "trainer": {"batch_size": 2}, "data": {"shuffle": False}}


async def by_task(task: Task, model: Model) -> float:
    """Rewards differ within the groups of even tasks, and are equal in those of odd ones."""
    reply = await model.chat(task.messages)
    return float(sum(reply.completion_ids)) if int(task.id) % 2 == 0 else 1.0


def manager(engine: FakeEngine | None = None, workflow: Any = by_task, **given: Any) -> AgentLoopManager:
    sections = {key: value for key, value in given.items() if key != "training"}
    config = AgentLoopConfig.model_validate({**SECTIONS, **sections})
    training = given.get("training", True)
    found = engine or FakeEngine()
    return AgentLoopManager.from_config(
        config, found, CharTokenizer(), workflow=workflow, tasks=TASKS, training=training
    )


async def test_each_batch_holds_complete_groups_of_the_next_tasks() -> None:
    async with manager() as own:
        batches = [await own.produce() for _ in range(3)]
    assert [[group.episodes[0].task_id for group in batch] for batch in batches] == [["0", "1"], ["2", "3"], ["4", "5"]]
    assert {len(group.episodes) for batch in batches for group in batch} == {2}
    assert {len(group.groups[0].trajectories) for batch in batches for group in batch} == {2}


async def test_a_group_that_is_filtered_is_replaced_by_the_next_task() -> None:
    async with manager(filters={"drop_uniform": True}) as own:
        first, second = await own.produce(), await own.produce()
    assert {int(group.episodes[0].task_id) % 2 for group in (*first, *second)} == {0}


async def test_new_weights_start_the_next_version_and_old_ones_keep_the_same() -> None:
    engine = FakeEngine()
    async with manager(engine) as own:
        for version, synced in ((0, None), (0, 1), (1, 2)):
            groups = await own.produce()
            assert {group.oldest_version for group in groups} == {version}
            if synced is not None:
                await engine.end_update(synced)
                own.synced(synced)


async def test_running_ahead_is_bounded_by_max_staleness_without_a_trainer_too() -> None:
    asked: list[int] = []
    trainer = {"batch_size": 2, "max_staleness": 1, "staleness": "wait"}
    engine = FakeEngine()
    async with manager(engine, trainer=trainer) as own:
        for version in range(1, 4):
            groups = await own.produce()
            asked.append(len(engine.requests))
            assert len(groups) == 2 and all(version - 1 - (group.oldest_version or 0) <= 1 for group in groups)
            await engine.end_update(version)
            own.synced(version)
    assert asked[0] <= 2 * 2 * 2


async def test_a_workflow_that_always_fails_is_reported_with_its_error() -> None:
    async def broken(task: Task, model: Model) -> float:
        raise RuntimeError("no such tool")

    async with manager(workflow=broken, filters={"most_replacements": 3}) as own:
        with pytest.raises(DataError, match="no such tool"):
            await own.produce()


async def test_evaluation_episodes_are_of_every_task_failed_ones_included() -> None:
    async def run(task: Task, model: Model) -> float:
        assert not model.training
        if task.id == "1":
            raise RuntimeError("broke")
        await model.chat(task.messages)
        return 1.0

    async with manager(workflow=run, training=False) as own:
        episodes = await own.roll_out(TASKS[:3], count=2)
    assert [[episode.task_id for episode in task] for task in episodes] == [["0"] * 2, ["1"] * 2, ["2"] * 2]
    assert [episode.failed for task in episodes for episode in task] == [False, False, True, True, False, False]


async def test_a_workflow_is_started_and_closed_once() -> None:
    class Agent:
        calls: list[str] = []  # noqa: RUF012

        async def start(self) -> None:
            self.calls.append("start")

        async def close(self) -> None:
            self.calls.append("close")

        async def run(self, task: Task, model: Model) -> float:
            await model.chat(task.messages)
            return 1.0

    async with manager(workflow=Agent()) as own:
        await own.produce()
    assert Agent.calls == ["start", "close"]
