"""Who judges which task, how many at once, for how long, and how a failure is handled."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from headrace.config import AgentConfig
from headrace.data.episode import Episode
from headrace.data.task import Task
from headrace.errors import ConfigError, DeadlineError, is_infrastructure
from headrace.judge.base import JudgeError, Judger, Verdict, as_judger, ends_the_run
from headrace.judge.compose import Holder, make_judger
from headrace.registry import load_object, nearest, resolve
from headrace.utils.deadline import Call
from headrace.utils.usercode import reason_of

log = logging.getLogger("headrace")

_PAUSE_S = 0.25  # doubled before each retry


class RouteError(ConfigError):
    """A source has no judger. It ends the run: no retry and no other episode would find one."""


class Rules(Protocol):
    """What `[judge]` says."""

    @property
    def concurrency(self) -> int: ...
    @property
    def timeout_s(self) -> float: ...
    @property
    def retries(self) -> int: ...
    @property
    def on_failure(self) -> str: ...


class Router(Holder):
    """Each task goes to the judger of its `source`, or to that of "*"."""

    def __init__(self, routes: dict[str, Any]) -> None:
        if not routes:
            raise ConfigError('judge.routes is empty; name a judger for each source, or for "*"')
        self._judgers = {source: make_judger(given, f'judge.routes."{source}"') for source, given in routes.items()}

    async def judge(self, task: Task, episode: Episode) -> Verdict:
        judger = self._judger_of(task)
        if judger is None:
            raise RouteError(
                f'task "{task.id}" has the source "{task.source}", for which judge.routes has no judger'
                f'{nearest(task.source, self._judgers)}; add a route for it, or one for "*"'
            )
        return await judger.judge(task, episode)

    def check_task(self, task: Task) -> None:
        judger = self._judger_of(task)
        if judger is not None:  # a route that is missing is reported when a task takes it
            judger.check_task(task)

    def _judger_of(self, task: Task) -> Judger | None:
        return self._judgers.get(task.source) or self._judgers.get("*")

    def held(self) -> list[Judger]:
        return list(self._judgers.values())


class GuardedJudger(Holder):
    """Another judger, under the rules of `[judge]`. A judge call that fails is a JudgeError."""

    def __init__(self, judger: Judger, rules: Rules) -> None:
        self.judger = judger
        self._rules = rules
        self._slots = asyncio.Semaphore(rules.concurrency)
        self._loop: asyncio.AbstractEventLoop | None = None
        self.failed = 0
        """Episodes without a verdict."""
        self.judged = 0
        """Episodes with one."""
        self.time_s = 0.0
        """Seconds spent on all of them, one after the other, waiting for a slot not counted."""

    async def judge(self, task: Task, episode: Episode) -> Verdict:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:  # of an earlier asyncio.run
            self._loop, self._slots = loop, asyncio.Semaphore(self._rules.concurrency)
        async with self._slots:
            start = loop.time()
            try:
                verdict = await self._tried(task, episode)
            except RouteError as error:
                raise JudgeError(str(error), stop=True, tried_again=True) from error
            except Exception as error:
                if ends_the_run(error):
                    raise
                self.failed += 1
                stop = self._rules.on_failure == "stop"
                hint = '; the run ends because judge.on_failure is "stop"' if stop else ""
                raise JudgeError(f"{reason_of(error)}{hint}", stop, tried_again=True) from error
            finally:
                self.time_s += loop.time() - start
            self.judged += 1
            return verdict

    async def _tried(self, task: Task, episode: Episode) -> Verdict:
        retries = 0
        while True:
            try:
                return await self._once(task, episode)
            except Exception as error:
                if retries >= self._rules.retries or not is_infrastructure(error):
                    raise
                retries += 1
                log.warning("task %s is judged again: %s: %s", task.id, type(error).__name__, error)
                await asyncio.sleep(_PAUSE_S * 2**retries)

    async def _once(self, task: Task, episode: Episode) -> Verdict:
        call = Call(f'the judger "{self.judger.label}"', self._rules.timeout_s)
        try:
            return await call.run(lambda: self.judger.judge(task, episode))
        except DeadlineError as error:
            if not call.late:
                raise
            late = f"judging took longer than {self._rules.timeout_s:g} s; raise judge.timeout_s"
            raise TimeoutError(late) from error

    @property
    def label(self) -> str:
        return self.judger.label

    def held(self) -> list[Judger]:
        return [self.judger]


def configured_judger(config: AgentConfig, given: Any = None) -> Judger | None:
    """The judger that is `given` or named, where and as `[judge]` says; None if there is none."""
    name, routes = config.workflow.judger, config.judge.routes
    if name and routes:
        raise ConfigError(f'both workflow.judger ("{name}") and judge.routes are set; keep one of them')
    if given is not None:
        return placed_judger(config, partial(as_judger, given, {}))
    if routes:
        return placed_judger(config, partial(Router, routes))
    return named_judger(config, name, config.workflow.judger_args) if name else None


def named_judger(config: AgentConfig, name: str, args: dict[str, Any]) -> GuardedJudger:
    """A judger by its name, where and as `[judge]` says."""
    return placed_judger(config, partial(_by_name, name, args))


def placed_judger(config: AgentConfig, recipe: Callable[[], Judger]) -> GuardedJudger:
    """The judger that `recipe` makes, in this process or in actors, under the rules of `[judge]`."""
    judge = config.judge
    if judge.placement == "local":
        return GuardedJudger(recipe(), judge)
    new = load_object("headrace.judge.actors:RayJudger")
    return GuardedJudger(new(recipe, judge.actors, judge.concurrency, config.cluster), judge)


def _by_name(name: str, args: dict[str, Any]) -> Judger:
    return as_judger(resolve("judger", name), args)
