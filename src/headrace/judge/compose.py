"""Judgers made of judgers: a weighted sum, and a penalty for replies that are too long."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from typing import Any

from headrace.data.episode import Episode
from headrace.data.task import Task
from headrace.errors import ConfigError
from headrace.judge.base import Judger, Verdict, as_judger
from headrace.registry import resolve
from headrace.utils.threads import call_sync_or_async


def make_judger(given: Any, where: str) -> Judger:
    """A judger given as an object, a name, or a table `{name = ..., args = {...}}`."""
    if isinstance(given, str):
        return as_judger(resolve("judger", given), {})
    if not isinstance(given, dict):
        return as_judger(given, {})
    unknown = set(given) - {"name", "args", "weight"}
    if unknown or not isinstance(given.get("name"), str):
        raise ConfigError(f"{where}: a judger is a table with a name and args, got {given!r}")
    return as_judger(resolve("judger", given["name"]), given.get("args", {}))


class Holder(Judger):
    """A judger that holds others, and hands on to them what is not about judging."""

    @abstractmethod
    def held(self) -> list[Judger]:
        """The judgers inside."""

    _closed = False

    def check_task(self, task: Task) -> None:
        for judger in self.held():
            judger.check_task(task)

    @property
    def asks_policy(self) -> bool:
        return any(judger.asks_policy for judger in self.held())

    async def close(self) -> None:
        """Close those that hold something, once: training and evaluation share them."""
        held, self._closed = [] if self._closed else self.held(), True
        for judger in held:
            close = getattr(judger, "close", None)
            if callable(close):
                await call_sync_or_async(close)

    def use_policy(self, ask: Any) -> None:
        """A way to ask the run's own model, for those that want one."""
        for judger in self.held():
            use_policy = getattr(judger, "use_policy", None)
            if callable(use_policy):
                use_policy(ask)


class WeightedSum(Holder):
    """The sum of the parts' rewards, each times its weight; every part's own reward is the metric `reward_<part>`.

    `parts`: name of the part to `{name, args, weight}`. `correct` names the part that decides correctness; without it
    the first part does.
    """

    def __init__(self, parts: dict[str, Any], correct: str | None = None) -> None:
        if not parts:
            raise ConfigError('the judger "sum" needs parts; give each a name, as {answer = {name = "math"}}')
        self._parts = {name: make_judger(given, f'part "{name}"') for name, given in parts.items()}
        self._weights = {name: _weight(name, given) for name, given in parts.items()}
        self._correct = correct if correct is not None else next(iter(parts))
        if self._correct not in parts:
            raise ConfigError(f'correct names the part "{correct}", which is none of {", ".join(parts)}')

    async def judge(self, task: Task, episode: Episode) -> Verdict:
        async with asyncio.TaskGroup() as group:
            running = {name: group.create_task(_judged(part, task, episode)) for name, part in self._parts.items()}
        verdicts = {name: found.result() for name, found in running.items()}
        for verdict in verdicts.values():
            if isinstance(verdict, Exception):
                raise verdict
        found = {name: verdict for name, verdict in verdicts.items() if isinstance(verdict, Verdict)}
        metrics = {key: value for verdict in found.values() for key, value in verdict.metrics.items()}
        metrics |= {f"reward_{name}": verdict.reward for name, verdict in found.items()}
        reward = sum(self._weights[name] * verdict.reward for name, verdict in found.items())
        return Verdict(reward, is_correct=_is_correct(found[self._correct]), metrics=metrics)

    def held(self) -> list[Judger]:
        return list(self._parts.values())


async def _judged(judger: Judger, task: Task, episode: Episode) -> Verdict | Exception:
    """The exception as a value: from a TaskGroup it would come wrapped, and its kind decides whether to try again."""
    try:
        return await judger.judge(task, episode)
    except Exception as error:
        return error


def _is_correct(verdict: Verdict) -> bool:
    """By its own reward: what is added to that says nothing of it."""
    return verdict.is_correct if verdict.is_correct is not None else verdict.reward >= 1.0


def _weight(name: str, given: Any) -> float:
    weight = given.get("weight", 1.0) if isinstance(given, dict) else 1.0
    if isinstance(weight, bool) or not isinstance(weight, (int, float)):
        raise ConfigError(f'part "{name}": weight must be a number, got {weight!r}')
    return float(weight)


class OverlongPenalty(Holder):
    """0 up to `max_tokens` - `buffer` response tokens, from there in a straight line down to -`factor` at `max_tokens`.

    As in DAPO. With `judger`, that one's reward with the penalty added; alone, a part of a sum.
    """

    def __init__(self, max_tokens: int, buffer: int, factor: float = 1.0, judger: Any = None) -> None:
        if not 0 < buffer <= max_tokens:
            raise ConfigError(f"buffer must be above 0 and at most max_tokens, got {buffer} and {max_tokens}")
        if factor < 0:
            raise ConfigError(f"factor must not be negative, it is taken off the reward; got {factor}")
        self._start = max_tokens - buffer
        self._buffer = buffer
        self._factor = factor
        self._judger = make_judger(judger, "overlong") if judger is not None else None

    async def judge(self, task: Task, episode: Episode) -> Verdict:
        over = min(max(episode.response_tokens - self._start, 0), self._buffer)
        penalty = -self._factor * over / self._buffer if over else 0.0
        metrics = {"overlong": float(over > 0), "overlong_penalty": penalty}
        if self._judger is None:
            return Verdict(penalty, metrics=metrics)
        inner = await self._judger.judge(task, episode)
        return Verdict(inner.reward + penalty, is_correct=_is_correct(inner), metrics={**inner.metrics, **metrics})

    def held(self) -> list[Judger]:
        return [self._judger] if self._judger is not None else []
