"""Evaluator: the same fixed tasks each time, in order, all of them; a failed episode counts as wrong."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Self

import numpy as np

from headrace.config import EvalSet, EvaluatorConfig, RolloutSection
from headrace.data.episode import Episode, is_number
from headrace.data.seeds import derive_seed
from headrace.engines.base import RolloutEngine, SamplingParams
from headrace.errors import WorkflowError
from headrace.evaluation.plan import EvaluationPlan, EvaluationSets, MetricFunction, Tasks, Way, evaluation_sets
from headrace.judge.router import configured_judger
from headrace.rollout.agent_loop import AgentLoop, close_all, local_loop, start_workflows
from headrace.rollout.chat import ChatTemplate
from headrace.rollout.gateway import close_gateway
from headrace.rollout.gateway import configure as configure_gateway
from headrace.rollout.store import Values
from headrace.rollout.workflow import run_function
from headrace.utils.deadline import call_user
from headrace.utils.usercode import reason_of

_Z95 = 1.959963984540054
_RESAMPLES = 1000
_MOST_DRAWN = 4_000_000

_NONE: Mapping[str, Any] = MappingProxyType({})


class Evaluator:
    """Evaluates sets of tasks. Touches neither training's buffer nor its sampler nor its random state.

    `loop` rolls the tasks out; `own_loops` are those of sets that have a workflow or a judger of their own. `metrics`
    are functions of the user's own, by name. Around `evaluate`, `async with` starts and closes workflows and judgers.
    """

    def __init__(
        self,
        sets: EvaluationSets,
        loop: AgentLoop,
        rollout: RolloutSection,
        seed: int,
        metrics: Mapping[str, MetricFunction] = _NONE,
        own_loops: Mapping[str, AgentLoop] = _NONE,
        hook_timeout_s: float | None = None,
    ) -> None:
        self.sets = {name: (section, tasks[: section.limit]) for name, (section, tasks) in sets.items()}
        self.loops = [loop, *own_loops.values()]
        """Those of all sets."""
        self._loop = loop
        self._own_loops = own_loops
        self._rollout = rollout
        self._seed = seed
        self._own_metrics = metrics
        self._hook_timeout_s = hook_timeout_s

    @classmethod
    def from_config(
        cls, config: EvaluatorConfig, engine: RolloutEngine, tokenizer: Any, *, workflow: Any = None,
        judger: Any = None, tasks: Mapping[str, Tasks] | None = None, metrics: Mapping[str, MetricFunction] = _NONE,
    ) -> Evaluator:  # fmt: skip
        """The evaluator that a config describes. Objects may be given instead of names: a workflow, a judger, the
        tasks of sets, and metric functions beside those that `eval.metrics` names."""
        configure_gateway(config.gateway)
        run = run_function(config.workflow, workflow)
        judge = configured_judger(config, judger)
        plan = EvaluationPlan.from_config(config, run, judge, evaluation_sets(config, tasks), metrics)
        return cls.from_plan(config, plan, engine, ChatTemplate(tokenizer))

    @classmethod
    def from_plan(
        cls, config: EvaluatorConfig, plan: EvaluationPlan, engine: RolloutEngine, chat: ChatTemplate,
        values: Values | None = None,
    ) -> Evaluator:  # fmt: skip
        """Now that there is an engine."""
        return cls.over(
            config,
            plan,
            lambda way: local_loop(config.rollout, way.run, way.judge, engine, chat, training=False, values=values),
        )

    @classmethod
    def over(cls, config: EvaluatorConfig, plan: EvaluationPlan, new_loop: Callable[[Way], AgentLoop]) -> Evaluator:
        """Over loops of any kind, one for each way of the plan."""
        own_loops = {name: new_loop(way) for name, way in plan.own_ways.items()}
        loop, seed, timeout_s = new_loop(plan.way), config.run.seed, config.trainer.hook_timeout_s
        return cls(plan.sets, loop, config.rollout, seed, plan.metrics, own_loops, timeout_s)

    async def __aenter__(self) -> Self:
        try:
            await start_workflows(self.loops, self._hook_timeout_s)
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await close_all(self.loops)
        await close_gateway()

    async def evaluate(
        self,
        progress: Callable[[str, int, int], None] | None = None,
        keep: Callable[[str, dict[str, float], list[Episode]], None] | None = None,
        on_episode: Callable[[str, Episode], None] | None = None,
    ) -> dict[str, float]:
        """Metrics `eval/<set>/…` of every set. `keep` gets those of each set, with its episodes.

        `on_episode` gets every episode as soon as it is done, `progress` how many of the set's are.
        """
        metrics: dict[str, float] = {}
        for name, (section, tasks) in self.sets.items():
            done = 0
            total = len(tasks) * section.attempts

            def episode_done(episode: Episode, name: str = name, total: int = total) -> None:
                nonlocal done
                done += 1
                if on_episode is not None:
                    on_episode(name, episode)
                if progress is not None:
                    progress(name, done, total)

            loop = self._own_loops.get(name, self._loop)
            seed = derive_seed("eval", name, self._seed)  # what is trained, and other sets, draw other numbers
            episodes = await loop.roll_out_tasks(tasks, section.attempts, seed, self._sampling(section), episode_done)
            found = evaluation_metrics(episodes, section.attempts, self._seed)
            found |= await self._own(episodes, found)
            if keep is not None:
                keep(name, found, [episode for attempts in episodes for episode in attempts])
            metrics |= under(name, found)
        return metrics

    def _sampling(self, section: EvalSet) -> SamplingParams:
        return SamplingParams(
            temperature=section.temperature,
            top_p=section.top_p,
            top_k=0,
            max_tokens=section.max_tokens or self._rollout.max_tokens,
            stop=self._rollout.stop,
        )

    async def _own(self, episodes: list[list[Episode]], taken: Mapping[str, float]) -> dict[str, float]:
        """What the user's functions return. Each gets its own copy of the lists."""
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
    """A model behind a URL returns no ids; what its server counts is among the episode's metrics."""
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
    at_once = max(1, _MOST_DRAWN // len(data))  # resamples: those of many tasks would not fit into memory
    draws = (min(at_once, resamples - made) for made in range(0, resamples, at_once))
    means = np.concatenate([data[rng.integers(0, len(data), (count, len(data)))].mean(axis=1) for count in draws])
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)
