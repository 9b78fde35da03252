"""Judger: one method. A plain function `judge(task, text) -> float | bool` works too."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from headrace.data.episode import Episode, is_number
from headrace.data.task import Task
from headrace.errors import ConfigError, EngineError, LedgerError, PromptTooLongError, WorkflowError
from headrace.registry import call_with, require_parameters
from headrace.utils.threads import call_sync_or_async


class JudgeError(WorkflowError):
    """A judger gave no verdict. The episode fails, which is not the same as wrong; with `stop`, the run ends."""

    def __init__(self, message: str, stop: bool = False, tried_again: bool = False) -> None:
        super().__init__(message)
        self.stop = stop
        self.tried_again = tried_again
        """Whether judging was already tried as often as it may be."""


def ends_the_run(error: Exception) -> bool:
    """Whether a failure met while judging is not the judger's: of the run's own engine, which it asked, or ledger."""
    return isinstance(error, (EngineError, LedgerError)) and not isinstance(error, PromptTooLongError)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a judger says of an episode."""

    reward: float
    is_correct: bool | None = None
    metrics: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not is_number(self.reward):
            raise WorkflowError(f"a judger gives a number as reward, got {self.reward!r}")
        object.__setattr__(self, "reward", float(self.reward))


class Judger(ABC):
    """Scores an episode."""

    @property
    def label(self) -> str:
        """What its verdicts are recorded under."""
        return type(self).__name__

    @property
    def asks_policy(self) -> bool:
        """Whether it needs the run's own model (`use_policy`), which is in the trainer's process."""
        return False

    def check_task(self, task: Task) -> None:  # noqa: B027  # most judgers take any task
        """DataError for a task that cannot be judged; asked of every task before the run starts."""

    @abstractmethod
    async def judge(self, task: Task, episode: Episode) -> Verdict:
        """The reward of the episode, and whether it counts as correct."""


class FunctionJudger(Judger):
    """A function of (task, last assistant text), run off the event loop if it is synchronous."""

    def __init__(self, function: Callable[[Task, str], Any]) -> None:
        self._function = function

    async def judge(self, task: Task, episode: Episode) -> Verdict:
        score = await call_sync_or_async(self._function, task, episode.text)
        if isinstance(score, Verdict):
            return score
        verdict = Verdict(score)
        return replace(verdict, is_correct=verdict.reward >= 1.0)


def as_judger(target: Any, args: dict[str, Any]) -> Judger:
    """A judger given as class, instance or function."""
    if inspect.isclass(target):
        target = call_with(target, args, f'the judger "{target.__name__}"')
    elif args:
        raise ConfigError(f"workflow.judger_args {sorted(args)} are given, but the judger is not a class")
    if isinstance(target, Judger):
        return target
    if callable(target):
        require_parameters(target, ("task", "text"), "a judger")
        return FunctionJudger(target)
    raise ConfigError(f"a judger is a Judger or a function of (task, text), got {type(target).__name__}")
