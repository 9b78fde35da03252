"""From a configuration to what evaluating takes. The trainer's set-up builds on it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from headrace.backends.base import Backend
from headrace.backends.setup import Choice, Policy, attach_engine, choose
from headrace.config import BackendSection, RunConfig
from headrace.config.names import EVALUATION, check_names
from headrace.data.task import Message
from headrace.engines.base import RolloutEngine, SamplingParams
from headrace.evaluation.evaluator import Evaluator
from headrace.evaluation.plan import EvaluationPlan, EvaluationSets, Way, evaluation_sets
from headrace.judge.base import Judger
from headrace.judge.router import configured_judger
from headrace.rollout.agent_loop import AgentLoop, Limits, lend_policy
from headrace.rollout.chat import ChatTemplate
from headrace.rollout.gateway import configure as configure_gateway
from headrace.rollout.remote_model import Client, NoEngine, remote_model
from headrace.rollout.store import Values
from headrace.rollout.workflow import RunFunction, run_function
from headrace.utils.threads import run_in_thread
from headrace.weights.sync import WeightSync


@dataclass(frozen=True, slots=True)
class EvaluationParts:
    """What evaluating takes."""

    backend: Backend
    engine: RolloutEngine
    sync: WeightSync
    chat: ChatTemplate
    evaluator: Evaluator


def in_this_process(config: RunConfig) -> RunConfig:
    """The same with a colocated engine, for what needs none of its own."""
    trainer = config.trainer.model_copy(update={"placement": "colocate", "release_cache": None})
    engine = config.engine.model_copy(update={"threads": 0})
    backend = config.backend
    if backend.name in ("fsdp", "verl"):  # whose checkpoints the local backend reads
        backend = BackendSection(**backend.model_dump(include={"micro_batch_tokens", "logits_chunk", "threads"}))
    cluster = config.cluster.model_copy(update={"engine": {}})
    return config.model_copy(update={"trainer": trainer, "engine": engine, "backend": backend, "cluster": cluster})


def assemble_evaluation(config: RunConfig) -> EvaluationParts:
    """Build what evaluating takes, and nothing that only training needs: the engine stays in this process."""
    config = in_this_process(config)
    check_names(config, keys=EVALUATION)
    run, judge = run_function(config.workflow), configured_judger(config)
    choice = choose(config)
    return evaluation_parts(config, run, judge, evaluation_sets(config), choice)


@asynccontextmanager
async def open_policy(config: RunConfig) -> AsyncIterator[Policy]:
    """The model that a configuration names, loaded, with its engine in this process. Both are closed at the end."""
    config = in_this_process(config)
    choice = choose(config)
    policy = attach_engine(config, await run_in_thread(choice.new_backend, config), choice)
    try:
        await policy.sync.sync(0)
        yield policy
    finally:
        await policy.engine.close()
        await policy.backend.close()


def evaluation_parts(
    config: RunConfig,
    run: RunFunction,
    judge: Judger | None,
    sets: EvaluationSets,
    choice: Choice,
    values: Values | None = None,
) -> EvaluationParts:
    """Loads the model."""
    configure_gateway(config.gateway)
    plan = EvaluationPlan.from_config(config, run, judge, sets)
    policy = attach_engine(config, choice.new_backend(config), choice)
    chat = ChatTemplate(policy.backend.tokenizer)
    evaluator = Evaluator.from_plan(config, plan, policy.engine, chat, values)
    return EvaluationParts(policy.backend, policy.engine, policy.sync, chat, evaluator)


def assemble_remote_evaluation(config: RunConfig, client: Client) -> Evaluator:
    """What evaluating a model behind a URL takes: no backend, no engine, no tokenizer."""
    check_names(config, keys=EVALUATION)
    run, judge = run_function(config.workflow), configured_judger(config)
    plan = EvaluationPlan.from_config(config, run, judge, evaluation_sets(config))

    async def ask(messages: Sequence[Message], params: SamplingParams, seed: int) -> str:
        return (await client.chat(messages, params, seed=seed)).text

    def new_loop(way: Way) -> AgentLoop:
        lend_policy(way.judge, ask)
        no_template: Any = None  # the server has it
        limits, new_model = Limits.from_section(config.rollout), remote_model(client)
        return AgentLoop(way.run, NoEngine(), no_template, way.judge, limits, training=False, new_model=new_model)

    return Evaluator.over(config, plan, new_loop)
