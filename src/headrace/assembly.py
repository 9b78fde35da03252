"""From a configuration to the parts of a run. Every name is looked up here, before anything expensive starts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from headrace.agents.chat import ChatTemplate
from headrace.agents.loop import AgentLoopManager
from headrace.agents.workflow import as_run_function, demonstration
from headrace.backends.base import Backend
from headrace.combinations import check_combinations, chosen
from headrace.config import RunConfig
from headrace.data.sampler import TaskSampler
from headrace.data.task import Task, load_tasks
from headrace.engine.base import RolloutEngine
from headrace.evaluator import Evaluator
from headrace.judge.base import Judger, as_judger
from headrace.objectives import Objective
from headrace.pipeline.buffer import Grouping
from headrace.registry import resolve

Tasks = Iterable[Task | dict[str, Any]]


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
    """Build every part. Objects given here go before what the configuration names."""
    run = as_run_function(
        workflow if workflow is not None else resolve("workflow", config.workflow.name), config.workflow.args
    )
    judge = _judger(config, judger)
    for name in chosen(config.algorithm, "estimator"):
        resolve("estimator", name)
    train_tasks = load_tasks(tasks) if tasks is not None else load_tasks(config.data.tasks, **config.data.args)
    sampler = TaskSampler(
        train_tasks, config.trainer.batch_size, config.run.seed, config.data.shuffle, config.data.drop_last
    )
    sets = {
        name: (section, load_tasks((eval_tasks or {}).get(name) or section.tasks, **section.args))
        for name, section in config.eval.sets.items()
    }
    backend: Backend = resolve("backend", config.backend.name)(config)
    backend.check(config)
    engine = backend.create_engine()
    chat = ChatTemplate(backend.tokenizer)
    needs_rewards = chosen(config.algorithm, "estimator") != {"distill"}
    limits = (config.rollout.max_concurrent, config.rollout.timeout_s, needs_rewards)
    eval_manager = AgentLoopManager(run, engine, chat, judge, *limits)
    manager = eval_manager
    if config.algorithm.objective == "sft":
        manager = AgentLoopManager(demonstration, engine, chat, None, *limits)
    evaluator = Evaluator(sets, config.rollout, config.run.seed)
    objective: Objective = resolve("objective", config.algorithm.objective)(config, backend, chat)
    grouping: Grouping | None = resolve("grouping", config.workflow.grouping) if config.workflow.grouping else None
    return RunParts(backend, engine, sampler, manager, eval_manager, evaluator, objective, grouping)


def _judger(config: RunConfig, judger: Any) -> Judger | None:
    if judger is not None:
        return as_judger(judger, {})
    name = config.workflow.judger
    return as_judger(resolve("judger", name), config.workflow.judger_args) if name else None
