"""Text environments: `reset` returns the first observation, `step` takes the model's reply."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

from headrace.data.episode import Episode, TerminationReason, is_number
from headrace.data.task import Message, Task
from headrace.errors import BudgetExceededError, ConfigError, PromptTooLongError, WorkflowError
from headrace.registry import check_call, require_parameters, resolve
from headrace.rollout.model_client import Model
from headrace.utils.threads import call_sync_or_async


class Environment(Protocol):
    """One instance per episode. Methods may be plain (run in a thread) or async."""

    def reset(self, task: Task) -> Any:
        """The first observation: text, or (text, info) as gymnasium has it."""
        ...

    def step(self, action: str) -> Any:
        """What the action leads to: (observation, reward, done), (…, done, info) or gymnasium's five."""
        ...


class _Stepped(NamedTuple):
    observation: str
    reward: float
    done: bool
    info: dict[str, Any]


class EnvironmentLoop:
    """Workflow "environment": plays one episode, a model call per action.

    After a crash the environment is played again with the recorded actions; if it then returns something else, the
    episode starts over.

    `env` is "module:Class" with the keyword arguments `args`. The reward is the sum of the environment's, and each Step
    has its own. An `info` may hold `is_correct`, and `metrics` for the episode.
    """

    def __init__(
        self, env: str | Callable[..., Any], args: dict[str, Any] | None = None, system: str = "", max_turns: int = 16
    ) -> None:
        if max_turns < 1:
            raise ConfigError(f"max_turns must be at least 1, got {max_turns}")
        self._new: Callable[..., Any] = resolve("environment", env) if isinstance(env, str) else env
        self._args = args or {}
        self._called = f'the environment "{getattr(self._new, "__name__", self._new)}"'
        for method, names in (("reset", ("self", "task")), ("step", ("self", "action"))):
            if inspect.isclass(self._new) and not callable(getattr(self._new, method, None)):
                raise ConfigError(f"{self._called} has no method {method}({', '.join(names[1:])})")
            if inspect.isclass(self._new):
                require_parameters(getattr(self._new, method), names, f"{method} of {self._called}")
        check_call(self._new, self._args, self._called)
        self._system = system
        self._max_turns = max_turns

    async def run(self, task: Task, model: Model) -> Episode:
        """Play until the environment, or a budget, ends it."""
        env = await call_sync_or_async(self._new, **self._args)
        try:
            return await self._play(env, task, model)
        finally:
            if callable(getattr(env, "close", None)):
                await call_sync_or_async(env.close)

    async def _play(self, env: Environment, task: Task, model: Model) -> Episode:
        messages: list[Message] = [{"role": "system", "content": self._system}] if self._system else []
        messages.append({"role": "user", "content": _first(await call_sync_or_async(env.reset, task))})
        rewards: list[float] = []
        metrics: dict[str, float] = {}
        correct, ended = None, TerminationReason.TURNS
        for _ in range(self._max_turns):
            try:
                reply = await model.chat(messages)
            except (BudgetExceededError, PromptTooLongError) as error:
                ended = getattr(error, "reason", TerminationReason.LENGTH)
                break
            stepped = _stepped(await call_sync_or_async(env.step, reply.content))
            rewards.append(stepped.reward)
            correct = stepped.info.get("is_correct", correct)
            metrics.update(stepped.info.get("metrics", {}))
            if stepped.done:
                ended = TerminationReason.DONE
                break
            messages += [reply.message, {"role": "user", "content": stepped.observation}]
        if not rewards:
            raise PromptTooLongError("the first observation leaves no room for an action")
        (played,) = model.trajectories(sum(rewards))
        steps = tuple(replace(step, reward=reward) for step, reward in zip(played.steps, rewards, strict=True))
        return Episode(
            task.id,
            (replace(played, steps=steps),),
            termination=ended,
            is_correct=correct,
            metrics={**metrics, "turns": float(len(rewards))},
        )


def _first(answer: Any) -> str:
    observation = answer[0] if isinstance(answer, tuple) else answer
    if not isinstance(observation, str):
        raise WorkflowError(f"reset must return text, or (text, info), got {type(observation).__name__}")
    return observation


def _stepped(answer: Any) -> _Stepped:
    if not isinstance(answer, tuple) or len(answer) not in (3, 4, 5):
        raise WorkflowError(f"step must return (observation, reward, done) or (…, done, info), got {answer!r:.100}")
    observation, reward, *rest = answer
    info = rest.pop() if isinstance(rest[-1], dict) else {}
    if not isinstance(observation, str) or not is_number(reward) or not rest:
        raise WorkflowError(f"step must return text, a number and whether it is over, got {answer!r:.100}")
    return _Stepped(observation, float(reward), any(map(bool, rest)), info)
