"""From a configuration to what evaluating takes. The trainer's set-up builds on it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.backends.base import Backend
from headrace.config import EvalSet, RunConfig
from headrace.data.sources import load_source
from headrace.data.task import Message, Task
from headrace.data.training import HOLDOUT, TrainingData, load_evaluation, load_training, warn_of_bad_rows
from headrace.engines.base import EvaluationView, RolloutEngine, SamplingParams
from headrace.errors import ConfigError
from headrace.evaluation.evaluator import Evaluator, MetricFunction
from headrace.judge.base import Judger, as_judger
from headrace.judge.router import GuardedJudger, Router
from headrace.registry import nearest, resolve
from headrace.rollout.agent_loop import AgentLoop, Limits
from headrace.rollout.budget import Budget
from headrace.rollout.chat import ChatTemplate
from headrace.rollout.gateway import configure as configure_gateway
from headrace.rollout.model_client import Model
from headrace.rollout.remote_model import Client, NoEngine, remote_model
from headrace.rollout.store import Values
from headrace.rollout.workflow import RunFunction, as_run_function, preference, single_turn

Tasks = Iterable[Task | dict[str, Any]]
EvaluationSets = dict[str, tuple[EvalSet, list[Task]]]


@dataclass(frozen=True, slots=True)
class EvaluationParts:
    """What evaluating takes."""

    backend: Backend
    engine: RolloutEngine
    chat: ChatTemplate
    manager: AgentLoop
    evaluator: Evaluator


def in_this_process(config: RunConfig) -> RunConfig:
    """The same with a colocated engine, for what needs none of its own."""
    trainer = config.trainer.model_copy(update={"placement": "colocate", "release_cache": None})
    engine = config.engine.model_copy(update={"threads": 0})
    return config.model_copy(update={"trainer": trainer, "engine": engine})


def assemble_evaluation(config: RunConfig) -> EvaluationParts:
    """Build what evaluating takes, and nothing that only training needs: the engine stays in this process."""
    config = in_this_process(config)
    run, judge, new_backend = run_function(config, None), configured_judger(config, None), checked_backend(config)
    return evaluation_parts(config, run, judge, evaluation_sets(config, None), new_backend)


def evaluation_parts(
    config: RunConfig,
    run: RunFunction,
    judge: Judger | None,
    sets: EvaluationSets,
    new_backend: Any,
    values: Values | None = None,
) -> EvaluationParts:
    """Loads the model."""
    configure_gateway(config.gateway)
    ways = _ways_to_evaluate(config, run, judge)
    _check_sets(sets, ways)
    metrics = _metric_functions(config)
    backend: Backend = new_backend(config)
    engine = backend.create_engine()
    chat = ChatTemplate(backend.tokenizer)

    async def ask(messages: Sequence[Message], params: SamplingParams, seed: int) -> str:
        return (await Model(engine, chat, params, seed, training=False).chat(messages)).text

    def new_manager(run: RunFunction, judge: Judger | None) -> AgentLoop:
        _lend_policy(judge, ask)
        return AgentLoop(run, EvaluationView(engine), chat, judge, limits(config), training=False, values=values)

    manager, evaluator = _evaluating(config, sets, ways, metrics, new_manager)
    return EvaluationParts(backend, engine, chat, manager, evaluator)


def assemble_remote_evaluation(config: RunConfig, client: Client) -> tuple[AgentLoop, Evaluator]:
    """What evaluating a model behind a URL takes: no backend, no engine, no tokenizer."""
    ways = _ways_to_evaluate(config, run_function(config, None), configured_judger(config, None))

    async def ask(messages: Sequence[Message], params: SamplingParams, seed: int) -> str:
        return (await client.chat(messages, params, seed=seed)).text

    def new_manager(run: RunFunction, judge: Judger | None) -> AgentLoop:
        _lend_policy(judge, ask)
        no_template: Any = None  # the server has it
        new_model = remote_model(client)
        return AgentLoop(run, NoEngine(), no_template, judge, limits(config), training=False, new_model=new_model)

    sets = evaluation_sets(config, None)
    _check_sets(sets, ways)
    return _evaluating(config, sets, ways, _metric_functions(config), new_manager)


Way = tuple[RunFunction, Judger | None]
"""A workflow and who judges it."""


def _ways_to_evaluate(config: RunConfig, run: RunFunction, judge: Judger | None) -> dict[str | None, Way]:
    """The run's own way under None, and those of sets that have one of their own."""
    if run is preference:  # given pairs hold nothing to evaluate: the model is asked
        run = single_turn
    ways: dict[str | None, Way] = {None: (run, judge)}
    for name, section in config.eval.sets.items():
        if section.workflow is None and section.judger is None:
            continue
        own = as_run_function(resolve("workflow", section.workflow), section.workflow_args) if section.workflow else run
        judged = judge
        if section.judger:
            found = as_judger(resolve("judger", section.judger), section.judger_args)
            judged = GuardedJudger(found, config.judge)
        ways[name] = own, judged
    return ways


def _evaluating(
    config: RunConfig,
    sets: EvaluationSets,
    ways: dict[str | None, Way],
    metrics: dict[str, MetricFunction],
    new_manager: Callable[[RunFunction, Judger | None], AgentLoop],
) -> tuple[AgentLoop, Evaluator]:
    managers = {name: new_manager(*way) for name, way in ways.items() if name is not None}
    limit_s = config.trainer.hook_timeout_s
    evaluator = Evaluator(sets, config.rollout, config.run.seed, metrics, managers, limit_s)
    return new_manager(*ways[None]), evaluator


def check_tasks(judge: Judger, tasks: Sequence[Task]) -> None:
    """Tasks that cannot be judged are found now, not when an episode of theirs is complete."""
    for task in tasks:
        judge.check_task(task)


def _check_sets(sets: EvaluationSets, ways: dict[str | None, Way]) -> None:
    for name, (_, tasks) in sets.items():
        _, judge = ways.get(name, ways[None])
        if judge is not None:
            check_tasks(judge, tasks)


def _lend_policy(judge: Judger | None, ask: Any) -> None:
    """A judger that wants to ask the run's own model gets a way to."""
    use_policy = getattr(judge, "use_policy", None)
    if callable(use_policy):
        use_policy(ask)


def _metric_functions(config: RunConfig) -> dict[str, MetricFunction]:
    return {path: resolve("evaluation metric", path) for path in config.eval.metrics}


def checked_backend(config: RunConfig) -> Any:
    """The backend's class, which can do all that the configuration asks for."""
    found = resolve("backend", config.backend.name)
    found.check(config)
    return found


def run_function(config: RunConfig, workflow: Any) -> RunFunction:
    return as_run_function(
        workflow if workflow is not None else resolve("workflow", config.workflow.name), config.workflow.args
    )


def configured_judger(config: RunConfig, judger: Any) -> Judger | None:
    """The judger that was given or is named, under the rules of [judge]."""
    name, routes = config.workflow.judger, config.judge.routes
    if name and routes:
        raise ConfigError(f'both workflow.judger ("{name}") and judge.routes are set; keep one of them')
    if judger is not None:
        found = as_judger(judger, {})
    elif routes:
        found = Router(routes)
    elif name:
        found = as_judger(resolve("judger", name), config.workflow.judger_args)
    else:
        return None
    return GuardedJudger(found, config.judge)


def limits(config: RunConfig) -> Limits:
    rollout = config.rollout
    budget = Budget(rollout.max_turns, rollout.max_episode_tokens, rollout.max_tool_calls)
    return Limits(rollout.max_concurrent, rollout.timeout_s, budget, rollout.retries)


def evaluation_sets(
    config: RunConfig, given: dict[str, Tasks] | None, data: TrainingData | None = None
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


def _is_held_out(config: RunConfig, name: str, given: dict[str, Tasks]) -> bool:
    return name not in given and config.eval.sets[name].tasks == HOLDOUT
