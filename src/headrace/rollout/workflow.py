"""Workflows: what a user writes. An async function `run(task, model)`, or a class with that method.

It may return an Episode, a Trajectory, a list of Trajectories, a number (the reward of everything the model was
asked), or None (then the judger decides).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol, SupportsFloat

from headrace.config import WorkflowSection
from headrace.data.episode import Episode, Step, TerminationReason, Trajectory, is_number
from headrace.data.task import Message, Task
from headrace.errors import BudgetExceededError, ConfigError, DataError, PromptTooLongError
from headrace.registry import call_with, resolve
from headrace.rollout.model_client import Model

Outcome = Episode | Trajectory | list[Trajectory] | SupportsFloat | None
RunFunction = Callable[[Task, Model], Awaitable[Outcome]]
AnyRun = Callable[..., Awaitable[Outcome]]
"""A RunFunction, or such a method before it is bound."""


class Workflow(Protocol):
    """A workflow as a class; one instance serves all episodes.

    It may have `start()`, called once before the first episode, and `close()`, called once after the last; plain or
    async.
    """

    async def run(self, task: Task, model: Model) -> Outcome:
        """Do the task with the model."""
        ...


async def single_turn(task: Task, model: Model) -> None:
    """Ask once; the judger decides."""
    await model.chat(task.messages)


async def demonstration(task: Task, model: Model) -> Trajectory:
    """Learn from the task's own assistant turns; nothing is sampled."""
    return Trajectory(steps=tuple(model.demonstrate(task.messages)), reward=1.0)


async def preference(task: Task, model: Model) -> list[Trajectory]:
    """A given pair: metadata "chosen" and "rejected" are replies (text) to the task's messages; nothing is sampled."""
    missing = [key for key in ("chosen", "rejected") if not isinstance(task.metadata.get(key), str)]
    if missing:
        raise DataError(f'task "{task.id}": metadata needs the texts "chosen" and "rejected"; missing: {missing}')

    def answered(text: str) -> tuple[Step, ...]:
        return tuple(model.demonstrate([*task.messages, {"role": "assistant", "content": text}])[-1:])

    return [
        Trajectory(answered(task.metadata["chosen"]), reward=1.0),
        Trajectory(answered(task.metadata["rejected"]), reward=0.0),
    ]


def self_distill(teacher_messages: Callable[[Task, Step], Sequence[Message]]) -> Callable[[AnyRun], AnyRun]:
    """Decorate a workflow's `run` so that a teacher with a privileged prompt sets its tokens' advantages.

    `teacher_messages(task, step)` gives the conversation that the teacher sees in place of the step's own, such as
    the same question with the answer beside it. The teacher (`[distill]`) is one for the whole run. In evaluation
    the workflow runs alone: neither `teacher_messages` nor the teacher is asked.

        @self_distill(lambda task, step: [{"role": "user", "content": f"{task.instruction} Hint: {task.answer}"}])
        async def solve(task, model): ...
    """

    def decorate(run: AnyRun) -> AnyRun:
        @functools.wraps(run)
        async def distilled(*args: Any) -> Outcome:
            *owner, task, model = args  # a method has self before them
            if not model.training:
                return await run(*args)
            outcome = await until_no_room(functools.partial(run, *owner), task, model)
            return _with_teacher_prompts(outcome, task, model, teacher_messages)

        return distilled

    return decorate


def _with_teacher_prompts(outcome: Outcome, task: Task, model: Model, prompt: Any) -> Outcome:
    def prompted(trajectory: Trajectory) -> Trajectory:
        steps = tuple(replace(step, teacher_messages=tuple(prompt(task, step))) for step in trajectory.steps)
        return replace(trajectory, steps=steps)

    if isinstance(outcome, Episode):
        return replace(outcome, trajectories=tuple(prompted(t) for t in outcome.trajectories))
    if isinstance(outcome, Trajectory):
        return prompted(outcome)
    if isinstance(outcome, list):
        return [prompted(trajectory) for trajectory in outcome]
    if outcome is None or is_number(outcome):
        return [prompted(t) for t in model.trajectories(None if outcome is None else float(outcome))]
    return outcome  # nothing that a workflow may return: the loop says so


async def until_no_room(run: RunFunction, task: Task, model: Model) -> Outcome:
    """What `run` returns or, if a limit is met on the way, an episode of what was said until then."""
    try:
        return await run(task, model)
    except (PromptTooLongError, BudgetExceededError, BaseExceptionGroup) as error:
        said, limit = model.trajectories(), limit_met(error)
        if not said or limit is None:
            raise
        return Episode(task.id, tuple(said), termination=limit)


def limit_met(error: BaseException) -> TerminationReason | None:
    """Which limit ended the episode, if that is all that went wrong, also inside a TaskGroup of the workflow."""
    if isinstance(error, BaseExceptionGroup):
        limits = [limit_met(inner) for inner in error.exceptions]
        return None if None in limits else limits[0]
    if isinstance(error, BudgetExceededError):
        return TerminationReason(error.reason)
    return TerminationReason.LENGTH if isinstance(error, PromptTooLongError) else None


def as_run_function(workflow: Any, args: dict[str, Any]) -> RunFunction:
    """The `run` coroutine function of a workflow given as function, class or instance."""
    if inspect.isclass(workflow):
        workflow = call_with(workflow, args, f'the workflow "{workflow.__name__}"')
    elif args:
        raise ConfigError(f"workflow.args {sorted(args)} are given, but the workflow is a function, which takes none")
    run = getattr(workflow, "run", workflow)
    if not inspect.iscoroutinefunction(run):
        name = getattr(run, "__name__", repr(run))
        raise ConfigError(f'workflow "{name}" must be "async def run(task, model)"; it is not a coroutine function')
    return run


def run_function(section: WorkflowSection, given: Any = None) -> RunFunction:
    """The `run` of the workflow that is `given` or named."""
    return as_run_function(given if given is not None else resolve("workflow", section.name), section.args)
