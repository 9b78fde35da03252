"""Evaluator: the same fixed tasks each time, in order, all of them; a failed episode counts as wrong."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from headrace.config import EvalSet, RolloutSection
from headrace.data.episode import Episode, is_number
from headrace.data.seeds import derive_seed
from headrace.data.task import Task
from headrace.engines.base import SamplingParams
from headrace.errors import WorkflowError
from headrace.rollout.agent_loop import AgentLoop
from headrace.utils.deadline import call_user
from headrace.utils.usercode import reason_of

_Z95 = 1.959963984540054
_RESAMPLES = 1000

MetricFunction = Callable[[list[list[Episode]]], Mapping[str, Any]]
"""Figures of a set's episodes, of which there is a list per task."""
_NONE: Mapping[str, Any] = MappingProxyType({})


class Evaluator:
    """Evaluates sets of tasks. Touches neither training's buffer nor its sampler nor its random state.

    `metrics` are functions of the user's own, by the name that they have in the run file. `managers` are those of sets
    that have a workflow or a judger of their own.
    """

    def __init__(
        self,
        sets: dict[str, tuple[EvalSet, list[Task]]],
        rollout: RolloutSection,
        seed: int,
        metrics: Mapping[str, MetricFunction] = _NONE,
        managers: Mapping[str, AgentLoop] = _NONE,
        hook_timeout_s: float | None = None,
    ) -> None:
        self.sets = {name: (section, tasks[: section.limit]) for name, (section, tasks) in sets.items()}
        self._rollout = rollout
        self._seed = seed
        self._own_metrics = metrics
        self._managers = managers
        self._hook_timeout_s = hook_timeout_s

    async def evaluate(
        self,
        manager: AgentLoop,
        progress: Callable[[str, int, int], None] | None = None,
        keep: Callable[[str, dict[str, float], list[Episode]], None] | None = None,
        on_episode: Callable[[str, Episode], None] | None = None,
    ) -> dict[str, float]:
        """Metrics `eval/<set>/…` of every set. `keep` gets those of each set, with its episodes.

        `on_episode` gets every episode as soon as it is done, `progress` how many of the set's are.
        """
        metrics: dict[str, float] = {}
        for name, (section, tasks) in self.sets.items():
            own = self._managers.get(name, manager)
            done = 0
            total = len(tasks) * section.attempts

            def told(episode: Episode, name: str = name, total: int = total) -> None:
                nonlocal done
                done += 1
                if on_episode is not None:
                    on_episode(name, episode)
                if progress is not None:
                    progress(name, done, total)

            episodes = await self._roll_out(own, name, section, tasks, told)
            found = evaluation_metrics(episodes, section.attempts, self._seed)
            found |= await self._own(episodes, found)
            if keep is not None:
                keep(name, found, [episode for attempts in episodes for episode in attempts])
            metrics |= under(name, found)
        return metrics

    @property
    def managers(self) -> list[AgentLoop]:
        """Those of sets that have a workflow or a judger of their own."""
        return list(self._managers.values())

    async def _roll_out(
        self,
        manager: AgentLoop,
        name: str,
        section: EvalSet,
        tasks: Sequence[Task],
        told: Callable[[Episode], None],
    ) -> list[list[Episode]]:
        sampling = SamplingParams(
            temperature=section.temperature,
            top_p=section.top_p,
            top_k=0,
            max_tokens=section.max_tokens or self._rollout.max_tokens,
            stop=self._rollout.stop,
        )
        seed = derive_seed("eval", name, self._seed)  # what is trained, and other sets, draw other numbers
        async with asyncio.TaskGroup() as group:
            running = [
                group.create_task(
                    # group_id is the task's place in the list: every evaluation draws the same random numbers
                    manager.roll_out_group(task, index, section.attempts, seed, sampling, told)
                )
                for index, task in enumerate(tasks)
            ]
        return [task.result() for task in running]

    async def _own(self, episodes: list[list[Episode]], taken: Mapping[str, float]) -> dict[str, float]:
        """What the user's functions say, each told its own copy of the lists."""
        found: dict[str, float] = {}
        for path, function in self._own_metrics.items():
            where = f'the evaluation metric "{path}"'
            own = [list(attempts) for attempts in episodes]
            try:
                answer = await call_user(where, function, own, limit_s=self._hook_timeout_s)
            except Exception as error:
                raise WorkflowError(f"{where} failed: {reason_of(error)}") from error
            found |= _checked(where, answer, {*taken, *found})
        return found


def _checked(where: str, answer: Any, taken: set[str]) -> dict[str, float]:
    """The metrics that a function returned, or an error that names it."""
    if not isinstance(answer, Mapping):
        raise WorkflowError(f"{where} must return {{name: number}}, got {answer!r}")
    for name, value in answer.items():
        if not isinstance(name, str) or not name:
            raise WorkflowError(f"{where}: a metric's name must be text, got {name!r}")
        if not is_number(value) or not math.isfinite(float(value)):
            raise WorkflowError(f'{where}: "{name}" must be a finite number, got {value!r}')
        if name in taken:
            raise WorkflowError(f'{where}: there is a metric "{name}" already; choose another name')
    return {name: float(value) for name, value in answer.items()}


def under(name: str, metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics of a set under their keys."""
    return {f"eval/{name}/{key}": value for key, value in metrics.items()}


def evaluation_metrics(episodes: Sequence[Sequence[Episode]], attempts: int, seed: int = 0) -> dict[str, float]:
    """pass@k, avg@k with 95% intervals, overall and per source, from the episodes of each task."""
    metrics = _scores(episodes, attempts, seed)
    sources = sorted({task[0].source for task in episodes})
    if len(sources) > 1:
        for source in sources:
            chosen = [task for task in episodes if task[0].source == source]
            metrics |= {f"{source}/{key}": value for key, value in _scores(chosen, attempts, seed).items()}
    return metrics


def _scores(episodes: Sequence[Sequence[Episode]], attempts: int, seed: int) -> dict[str, float]:
    correct = [sum(is_right(episode) for episode in task) for task in episodes]
    flat = [episode for task in episodes for episode in task]
    metrics = {
        "tasks": float(len(episodes)),
        "failed": float(sum(episode.failed for episode in flat)),
        "reward": float(np.mean([0.0 if episode.failed else episode.reward for episode in flat])),
        "response_tokens": float(np.mean([_response_tokens(episode) for episode in flat])),
    }
    for k in sorted({1, *(2**i for i in range(attempts.bit_length())), attempts}):
        if k <= attempts:
            metrics[f"pass@{k}"] = float(np.mean([pass_at_k(attempts, c, k) for c in correct]))
    metrics[f"avg@{attempts}"] = float(np.mean([c / attempts for c in correct]))
    low, high = (
        wilson_interval(sum(correct), len(correct))
        if attempts == 1
        else bootstrap_interval([c / attempts for c in correct], seed)
    )
    return {**metrics, "pass@1_low": low, "pass@1_high": high}


def _response_tokens(episode: Episode) -> float:
    """A model behind a URL tells no ids; what its server counts is among the episode's metrics."""
    return episode.response_tokens or episode.metrics.get("response_tokens", 0.0)


def is_right(episode: Episode) -> bool:
    """Whether the attempt counts as solved."""
    if episode.failed:
        return False
    return episode.is_correct if episode.is_correct is not None else episode.reward >= 1.0


def pass_at_k(attempts: int, correct: int, k: int) -> float:
    """Unbiased: 1 - C(n - c, k) / C(n, k)."""
    return 1.0 - math.comb(attempts - correct, k) / math.comb(attempts, k)


def wilson_interval(successes: int, trials: int) -> tuple[float, float]:
    """95% interval of a proportion."""
    if trials == 0:
        return 0.0, 1.0
    share = successes / trials
    centre = share + _Z95**2 / (2 * trials)
    spread = _Z95 * math.sqrt(share * (1 - share) / trials + _Z95**2 / (4 * trials**2))
    scale = 1 + _Z95**2 / trials
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)


def bootstrap_interval(values: Sequence[float], seed: int = 0, resamples: int = _RESAMPLES) -> tuple[float, float]:
    """95% interval of the mean, resampling tasks."""
    rng = np.random.default_rng(seed)
    data = np.asarray(values)
    means = data[rng.integers(0, len(data), (resamples, len(data)))].mean(axis=1)
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)
