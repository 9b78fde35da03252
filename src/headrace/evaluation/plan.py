"""EvaluationPlan: what is evaluated, by which workflow, and who judges it; known before a model is loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from headrace.config import EvalSet, EvaluatorConfig
from headrace.data.episode import Episode
from headrace.data.sources import load_source
from headrace.data.task import Task
from headrace.data.training import HOLDOUT, TrainingData, load_evaluation, load_training, warn_of_bad_rows
from headrace.errors import ConfigError
from headrace.judge.base import Judger
from headrace.judge.router import named_judger
from headrace.registry import nearest, resolve
from headrace.rollout.workflow import RunFunction, as_run_function, preference, single_turn

Tasks = Iterable[Task | dict[str, Any]]
EvaluationSets = dict[str, tuple[EvalSet, list[Task]]]
MetricFunction = Callable[[list[list[Episode]]], Mapping[str, Any]]
"""From the episodes of a set, a list per task, to metrics."""
_NONE: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Way:
    """A workflow and who judges it."""

    run: RunFunction
    judge: Judger | None


@dataclass(frozen=True, slots=True)
class EvaluationPlan:
    """`way` is the run's own; `own_ways` are those of sets that have a workflow or a judger of their own."""

    sets: EvaluationSets
    way: Way
    own_ways: Mapping[str, Way]
    metrics: Mapping[str, MetricFunction]

    @classmethod
    def from_config(
        cls,
        config: EvaluatorConfig,
        run: RunFunction,
        judge: Judger | None,
        sets: EvaluationSets,
        metrics: Mapping[str, MetricFunction] = _NONE,
    ) -> EvaluationPlan:
        """With all names resolved and all tasks checked. `metrics` come beside those that `eval.metrics` names."""
        if run is preference:  # given pairs hold nothing to evaluate: the model is asked
            run = single_turn
        way = Way(run, judge)
        own_ways = {
            name: _own_way(config, section, way)
            for name, section in config.eval.sets.items()
            if section.workflow is not None or section.judger is not None
        }
        for name, (_, tasks) in sets.items():
            check_tasks(own_ways.get(name, way).judge, tasks)
        named = {path: resolve("evaluation metric", path) for path in config.eval.metrics}
        return cls(sets, way, own_ways, {**named, **metrics})


def _own_way(config: EvaluatorConfig, section: EvalSet, usual: Way) -> Way:
    run, judge = usual.run, usual.judge
    if section.workflow:
        run = as_run_function(resolve("workflow", section.workflow), section.workflow_args)
    if section.judger:
        judge = named_judger(config, section.judger, section.judger_args)
    return Way(run, judge)


def check_tasks(judge: Judger | None, tasks: Sequence[Task]) -> None:
    """Tasks that cannot be judged are found now, not when an episode of theirs is complete."""
    if judge is None:
        return
    for task in tasks:
        judge.check_task(task)


def evaluation_sets(
    config: EvaluatorConfig, given: Mapping[str, Tasks] | None = None, data: TrainingData | None = None
) -> EvaluationSets:
    """The sets with their tasks. Without `data`, training tasks are loaded only if a set is what they leave out."""
    given = given or {}
    for name in given:
        if name not in config.eval.sets:
            raise ConfigError(
                f'eval_tasks has tasks for the set "{name}", which the configuration does not name'
                f"{nearest(name, config.eval.sets)}; add a section [eval.sets.{name}]"
            )
    sets: EvaluationSets = {}
    if data is None and any(_is_held_out(config, name, given) for name in config.eval.sets):
        data = load_training(config.data)
    for name, section in config.eval.sets.items():
        if name in given:
            skip_bad = config.data.on_bad_row == "skip"
            found = load_source(section, given[name], system=config.data.system, skip_bad=skip_bad)
        else:
            found = load_evaluation(section, config.data, data.held_out if data else [], name)
        warn_of_bad_rows(found, f'the evaluation set "{name}"')
        sets[name] = (section, found.tasks)
    return sets


def _is_held_out(config: EvaluatorConfig, name: str, given: Mapping[str, Tasks]) -> bool:
    return name not in given and config.eval.sets[name].tasks == HOLDOUT
