"""Workflows: what a user writes. An async function `run(task, model)`, or a class with that method.

It may return an Episode, a Trajectory, a list of Trajectories, a number (the reward of everything the model was
asked), or None (then the judger decides).
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from headrace.agents.completer import Model
from headrace.data.episode import Episode, Trajectory
from headrace.data.task import Task
from headrace.errors import ConfigError

Outcome = Episode | Trajectory | list[Trajectory] | float | int | bool | None
RunFunction = Callable[[Task, Model], Awaitable[Outcome]]


class Workflow(Protocol):
    """A workflow as a class; one instance serves all episodes."""

    async def run(self, task: Task, model: Model) -> Outcome:
        """Do the task with the model."""
        ...


async def single_turn(task: Task, model: Model) -> None:
    """Ask once; the judger decides."""
    await model.chat(task.messages)


async def demonstration(task: Task, model: Model) -> Trajectory:
    """Learn from the task's own assistant turns; nothing is sampled."""
    return Trajectory(steps=tuple(model.demonstrate(task.messages)), reward=1.0)


def as_run_function(workflow: Any, args: dict[str, Any]) -> RunFunction:
    """The `run` coroutine function of a workflow given as function, class or instance."""
    if inspect.isclass(workflow):
        workflow = workflow(**args)
    elif args:
        raise ConfigError(f"workflow.args {sorted(args)} are given, but the workflow is a function, which takes none")
    run = getattr(workflow, "run", workflow)
    if not inspect.iscoroutinefunction(run):
        name = getattr(run, "__name__", repr(run))
        raise ConfigError(f'workflow "{name}" must be "async def run(task, model)"; it is not a coroutine function')
    return run
