"""RayJudger without a cluster: actors of this process, which are lost as those of a node are."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from headrace.config import ClusterSection
from headrace.data.episode import Episode, Step, Trajectory
from headrace.data.task import Task
from headrace.errors import InfrastructureError
from headrace.judge.base import Judger, Verdict

ray = pytest.importorskip("ray")

from ray import cloudpickle  # noqa: E402
from ray.exceptions import RayActorError  # noqa: E402

from headrace.judge import actors  # noqa: E402
from headrace.judge.actors import RayJudger  # noqa: E402

EPISODE = Episode("t", (Trajectory((Step((1,), (2,), (-0.5,), (0,), text="yes"),)),))
TASK = Task("t", ({"role": "user", "content": "?"},), answer="yes")


class Exact(Judger):
    async def judge(self, task: Task, episode: Episode) -> Verdict:
        return Verdict(float(episode.text == task.answer))


class Nodes:
    """In place of Ray: an actor judges for `seconds`, and the first `losses` calls end with the loss of their actor."""

    def __init__(self, seconds: float, losses: int) -> None:
        self._seconds, self._losses = seconds, losses

    def remote(self, kind: Callable[..., Any]) -> Any:
        nodes = self

        class Actor:
            def __init__(self, recipe: Callable[[], Judger]) -> None:
                self._held = kind(recipe)
                self.judge = self.ready = self.close = self

            def remote(self, *sent: Any) -> Awaitable[Any]:
                task, episode = cloudpickle.loads(cloudpickle.dumps(sent)) if sent else (None, None)
                return self._judge(task, episode)

            async def _judge(self, task: Any, episode: Any) -> Any:
                if task is None:
                    return True
                await asyncio.sleep(nodes._seconds)
                nodes._losses -= 1
                if nodes._losses >= 0:
                    raise RayActorError(error_msg="the node is lost")
                return await self._held.judge(task, episode)

        class Kind:
            def options(self, **_: Any) -> Any:
                return self

            def remote(self, recipe: Callable[[], Judger]) -> Actor:
                return Actor(recipe)

        return Kind()

    @staticmethod
    def get(references: list[Any], timeout: float) -> None:
        for one in references:
            one.close()

    @staticmethod
    def is_initialized() -> bool:
        return True


class Placed:
    def options(self, index: int) -> dict[str, Any]:
        return {}

    def close(self) -> None: ...


def judged(monkeypatch: pytest.MonkeyPatch, nodes: Nodes, task: Task = TASK, patience_s: float = 60.0) -> Verdict:
    monkeypatch.setattr(actors, "ray", nodes)
    monkeypatch.setattr(actors, "connect", lambda cluster: None)
    monkeypatch.setattr(actors, "place", lambda *_: Placed())

    async def judge() -> Verdict:
        judger = RayJudger(Exact, 2, 4, ClusterSection(address="auto", patience_s=patience_s))
        try:
            return await judger.judge(task, EPISODE)
        finally:
            await judger.close()

    return asyncio.run(judge())


def test_a_long_call_is_made_again_though_it_took_longer_than_the_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    assert judged(monkeypatch, Nodes(seconds=0.4, losses=1), patience_s=0.2).reward == 1.0


def test_patience_ends_where_actors_are_lost_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InfrastructureError, match="no judger actor answered: the node is lost"):
        judged(monkeypatch, Nodes(seconds=0.05, losses=100), patience_s=0.2)


def test_a_task_is_judged_without_what_cannot_be_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    task = Task("t", TASK.messages, answer="yes", metadata={"seen": weakref.ref(Exact), "n": 1})
    assert judged(monkeypatch, Nodes(seconds=0.0, losses=0), task).reward == 1.0
