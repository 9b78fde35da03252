"""From a configuration to the parts of a run. Every name is looked up here, before anything expensive starts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from headrace.agents.budget import Budget
from headrace.agents.chat import ChatTemplate
from headrace.agents.loop import AgentLoopManager, Limits
from headrace.agents.workflow import RunFunction, as_run_function, demonstration, preference, single_turn
from headrace.backends.base import Backend
from headrace.combinations import check_combinations, chosen
from headrace.config import AlgorithmSection, EvalSet, RunConfig
from headrace.data.sampler import TaskSampler
from headrace.data.task import Task, load_tasks
from headrace.engine.base import EvaluationView, RolloutEngine
from headrace.errors import ConfigError
from headrace.evaluator import Evaluator
from headrace.judge.base import Judger, as_judger
from headrace.objectives import Objective, demonstration_sampler
from headrace.pipeline.buffer import Grouping
from headrace.pipeline.staleness import StalenessPolicy
from headrace.registry import nearest, resolve

Tasks = Iterable[Task | dict[str, Any]]
EvaluationSets = dict[str, tuple[EvalSet, list[Task]]]


@dataclass(frozen=True, slots=True)
class EvaluationParts:
    """What evaluating takes."""

    backend: Backend
    engine: RolloutEngine
    chat: ChatTemplate
    eval_manager: AgentLoopManager
    evaluator: Evaluator


@dataclass(frozen=True, slots=True)
class RunParts:
    """What the trainer's loops work with."""

    backend: Backend
    engine: RolloutEngine
    sampler: TaskSampler
    manager: AgentLoopManager
    eval_manager: AgentLoopManager
    evaluator: Evaluator
    objective: Objective
    policy: StalenessPolicy
    grouping: Grouping | None


def resolve_objective(config: RunConfig) -> RunConfig:
    """Check the configuration, and fill in what the objective settles."""
    check_combinations(config)
    algorithm, rollout = config.algorithm, config.rollout
    if algorithm.objective == "sft":  # the same loop: one demonstration per task, all advantages 1, cross-entropy
        algorithm = algorithm.model_copy(update={"estimator": "constant", "loss": "cross_entropy"})
        rollout = rollout.model_copy(update={"group_size": 1})
    elif algorithm.objective == "dpo":
        algorithm = algorithm.model_copy(update={"loss": "dpo"})
        if config.workflow.name == "preference":  # a pair of a file is one episode with two trajectories
            rollout = rollout.model_copy(update={"group_size": 1})
    return config.model_copy(update={"algorithm": algorithm, "rollout": rollout})


def assemble(
    config: RunConfig,
    workflow: Any = None,
    tasks: Tasks | None = None,
    judger: Any = None,
    eval_tasks: dict[str, Tasks] | None = None,
) -> RunParts:
    """Build every part. Objects given here go before what the configuration names.

    Names first, then tasks, then the model: what is cheap to find wrong is found before what is dear to load.
    """
    run, judge = _run_function(config, workflow), _judger(config, judger)
    for name in chosen(config.algorithm, "estimator"):
        resolve("estimator", name)
    grouping: Grouping | None = resolve("grouping", config.workflow.grouping) if config.workflow.grouping else None
    policy: StalenessPolicy = resolve("staleness", config.trainer.staleness)(config.trainer.max_staleness)
    new_objective = resolve("objective", config.algorithm.objective)
    unjudged = run is single_turn and judge is None
    if unjudged and config.algorithm.objective != "sft" and _needs_reward(config.algorithm)("agent"):
        raise ConfigError(
            'workflow "single_turn" gives no reward and there is no judger; set workflow.judger, '
            "or use a workflow that returns a number"
        )
    new_backend = _checked_backend(config)
    train_tasks = load_tasks(tasks) if tasks is not None else load_tasks(config.data.tasks, **config.data.args)
    sampler = TaskSampler(train_tasks, config.fresh_groups, config.run.seed, config.data.shuffle, config.data.drop_last)
    sets = _evaluation_sets(config, eval_tasks)
    demonstrations = demonstration_sampler(config)
    parts = _evaluation_parts(config, run, judge, sets, new_backend)
    if config.algorithm.objective == "sft":
        run, judge = demonstration, None
    manager = AgentLoopManager(
        run, parts.engine, parts.chat, judge, _limits(config), needs_reward=_needs_reward(config.algorithm)
    )
    objective: Objective = new_objective(config, parts.backend, parts.chat, demonstrations, policy)
    return RunParts(
        parts.backend, parts.engine, sampler, manager, parts.eval_manager, parts.evaluator, objective, policy, grouping
    )


def assemble_evaluation(config: RunConfig) -> EvaluationParts:
    """Build what evaluating takes, and nothing that only training needs: the engine stays in this process."""
    config = config.model_copy(update={"trainer": config.trainer.model_copy(update={"placement": "colocate"})})
    run, judge, new_backend = _run_function(config, None), _judger(config, None), _checked_backend(config)
    return _evaluation_parts(config, run, judge, _evaluation_sets(config, None), new_backend)


def _evaluation_parts(
    config: RunConfig, run: RunFunction, judge: Judger | None, sets: EvaluationSets, new_backend: Any
) -> EvaluationParts:
    """Loads the model."""
    backend: Backend = new_backend(config)
    engine = backend.create_engine()
    chat = ChatTemplate(backend.tokenizer)
    if run is preference:  # given pairs hold nothing to evaluate: the model is asked
        run = single_turn
    manager = AgentLoopManager(run, EvaluationView(engine), chat, judge, _limits(config), training=False)
    return EvaluationParts(backend, engine, chat, manager, Evaluator(sets, config.rollout, config.run.seed))


def _checked_backend(config: RunConfig) -> Any:
    """The backend's class, which can do all that the configuration asks for."""
    found = resolve("backend", config.backend.name)
    found.check(config)
    return found


def _run_function(config: RunConfig, workflow: Any) -> RunFunction:
    return as_run_function(
        workflow if workflow is not None else resolve("workflow", config.workflow.name), config.workflow.args
    )


def _needs_reward(algorithm: AlgorithmSection) -> Callable[[str], bool]:
    """Which roles are trained by reward: neither those that a teacher teaches, nor those that are not trained."""
    untrained = {name for name, role in algorithm.roles.items() if not role.train}
    return lambda role: role not in untrained and algorithm.for_role(role).estimator != "distill"


def _judger(config: RunConfig, judger: Any) -> Judger | None:
    if judger is not None:
        return as_judger(judger, {})
    name = config.workflow.judger
    return as_judger(resolve("judger", name), config.workflow.judger_args) if name else None


def _limits(config: RunConfig) -> Limits:
    rollout = config.rollout
    budget = Budget(rollout.max_turns, rollout.max_episode_tokens, rollout.max_tool_calls)
    return Limits(rollout.max_concurrent, rollout.timeout_s, budget, rollout.retries)


def _evaluation_sets(config: RunConfig, given: dict[str, Tasks] | None) -> EvaluationSets:
    given = given or {}
    for name in given:
        if name not in config.eval.sets:
            raise ConfigError(
                f'eval_tasks has tasks for the set "{name}", which the configuration does not name'
                f"{nearest(name, config.eval.sets)}; add a section [eval.sets.{name}]"
            )
    return {
        name: (section, load_tasks(given[name]) if name in given else load_tasks(section.tasks, **section.args))
        for name, section in config.eval.sets.items()
    }
