"""A resolved configuration of rLLM's unified trainer as a run file. It holds verl's, and decides parts of it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from headrace.errors import ConfigError
from headrace.migration.carry import Carry, Fate, Imported, Rest, finished
from headrace.migration.verl import carry_verl, check_is_verl
from headrace.migration.verl_rest import DECISIVE, REST

_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"
_DECIDES = {
    "algorithm.adv_estimator": "algorithm.adv_estimator",
    "algorithm.norm_adv_by_std_in_grpo": "algorithm.norm_adv_by_std_in_grpo",
    "algorithm.rollout_correction.bypass_mode": "algorithm.rollout_correction.bypass_mode",
    "algorithm.rollout_correction.tis_mode": "algorithm.rollout_correction.rollout_is",
    "algorithm.rollout_correction.tis_cap": "algorithm.rollout_correction.rollout_is_threshold",
    "algorithm.kl_beta": f"{_ACTOR}.kl_loss_coef",
    "algorithm.loss_fn": f"{_ACTOR}.policy_loss.loss_mode",
    "algorithm.loss_agg_mode": f"{_ACTOR}.loss_agg_mode",
    "algorithm.lr_schedule": f"{_ACTOR}.optim.lr_scheduler_type",
    "algorithm.warmup_steps": f"{_ACTOR}.optim.lr_warmup_steps",
    "algorithm.warmup_steps_ratio": f"{_ACTOR}.optim.lr_warmup_steps_ratio",
    "algorithm.eps_clip": f"{_ACTOR}.clip_ratio_low",
    "algorithm.eps_clip_high": f"{_ACTOR}.clip_ratio_high",
    "rollout.n": f"{_ROLLOUT}.n",
    "rollout.n_val": f"{_ROLLOUT}.val_kwargs.n",
    "rollout.train.temperature": f"{_ROLLOUT}.temperature",
    "rollout.train.top_p": f"{_ROLLOUT}.top_p",
    "rollout.train.top_k": f"{_ROLLOUT}.top_k",
    "rollout.train.max_tokens": f"{_ROLLOUT}.response_length",
    "rollout.val.temperature": f"{_ROLLOUT}.val_kwargs.temperature",
    "rollout.val.top_p": f"{_ROLLOUT}.val_kwargs.top_p",
    "trainer.save_freq": "trainer.save_freq",
    "trainer.test_freq": "trainer.test_freq",
    "trainer.val_before_train": "trainer.val_before_train",
    "trainer.total_epochs": "trainer.total_epochs",
    "trainer.total_batches": "trainer.total_training_steps",
    "trainer.logger": "trainer.logger",
    "trainer.project_name": "trainer.project_name",
    "trainer.experiment_name": "trainer.experiment_name",
    "data.train_batch_size": "data.train_batch_size",
    "data.max_prompt_length": "data.max_prompt_length",
    "data.max_response_length": "data.max_response_length",
}
"""What rLLM copies into verl's configuration when it starts: its own key (below rllm), and verl's."""
_TERMINATIONS = {
    "mask_max_response_length_exceeded": "length",
    "mask_max_prompt_length_exceeded": "length",
    "mask_max_turns_exceeded": "turns",
}
_DECISIVE = (
    "rllm.disable_thinking",
    "rllm.accumulate_reasoning",
    "rllm.algorithm.router_replay",
    "rllm.distill.enable",
)
_REST: Rest = (
    ("rllm.algorithm.router_replay", Fate.LOST, "experts are not replayed"),
    ("rllm.workflow.name", Fate.LOST, "write it as a workflow: async def run(task, model)"),
    ("rllm.workflow.*", Fate.LOST, "arguments of your workflow go into workflow.args"),
    ("rllm.agent.*", Fate.LOST, "arguments of your workflow go into workflow.args"),
    ("rllm.env.*", Fate.LOST, 'an environment is workflow "environment": docs/workflows.md'),
    ("rllm.gateway.*", Fate.LOST, "the gateway is [gateway]; tokens are always exact there"),
    ("rllm.remote_runtime.*", Fate.IDLE, "off"),
    ("rllm.episode_logging.*", Fate.LOST, "the ledger records every episode"),
    ("rllm.stepwise_advantage.*", Fate.IDLE, "advantages are broadcast"),
    ("rllm.rollout.*", Fate.LOST, "see docs/engine.md"),
    ("rllm.async_training.*", Fate.IDLE, "synchronous, or not needed"),
    ("rllm.compact_filtering.*", Fate.IDLE, "filtering is off, or these never come"),
    ("rllm.rejection_sample.*", Fate.IDLE, "rejection sampling is off"),
    ("rllm.filter_token_mismatch", Fate.CARRIED, "ids are exact: there is no mismatch"),
    ("rllm.trainer.project_name", Fate.LOST, "it is for wandb, mlflow and trackio"),
    ("rllm.backend", Fate.IDLE, "which of rLLM's backends trains"),
    ("rllm.*", Fate.LOST, "unknown to this import"),
    ("rollout.*", Fate.LOST, "engine.replicas"),
    ("async_training.*", Fate.IDLE, "rllm.async_training decides"),
)


def import_rllm(given: dict[str, Any], tasks: int | None = None) -> Imported:
    """Our settings; `tasks` is the number of training tasks, by which epochs become steps."""
    if not any(key.startswith("rllm.") for key in given):
        raise ConfigError(
            "this is no resolved configuration of rLLM: it has no section rllm; use `headrace import verl`"
        )
    check_is_verl(given)
    carry = Carry(_as_started(given))
    carry_verl(carry, tasks)
    _agents(carry)
    _filters(carry)
    _asynchronous(carry)
    for own, theirs in _DECIDES.items():
        if f"rllm.{own}" in given and theirs in carry.lines and given[f"rllm.{own}"] is not None:
            line = carry.lines[theirs]
            carry.lines[f"rllm.{own}"] = replace(line, key=f"rllm.{own}", value=given[f"rllm.{own}"])
            carry.idle(theirs, f"rllm.{own} decides")
    carry.finish((*_REST, *REST), (*DECISIVE, *_DECISIVE))
    return finished(carry)


def _as_started(given: dict[str, Any]) -> dict[str, Any]:
    """verl's settings as rLLM sets them when it starts."""
    made = dict(given)
    for own, theirs in _DECIDES.items():
        value = given.get(f"rllm.{own}")
        if value is not None and not (own == "trainer.total_batches" and value <= 0):
            made[theirs] = value
    if given.get("rllm.algorithm.eps_clip_high") is None and "rllm.algorithm.eps_clip" in given:
        made[f"{_ACTOR}.clip_ratio_high"] = given["rllm.algorithm.eps_clip"]
    made[f"{_ACTOR}.use_kl_loss"] = bool(given.get("rllm.algorithm.kl_beta"))
    made[f"{_ROLLOUT}.val_kwargs.do_sample"] = bool(made.get(f"{_ROLLOUT}.val_kwargs.temperature"))
    if given.get("rllm.async_training.enable"):
        made["data.train_batch_size"] = given["rllm.async_training.mini_batch_size"]
    # verl's own settings that refer to these were resolved before rLLM sets them
    made[f"{_ROLLOUT}.prompt_length"] = made["data.max_prompt_length"]
    names = [given.get(f"trainer.{name}") for name in ("project_name", "experiment_name")]
    if given.get("trainer.default_local_dir") == "/".join(["checkpoints", *map(str, names)]):
        made["trainer.default_local_dir"] = (
            f"checkpoints/{made['trainer.project_name']}/{made['trainer.experiment_name']}"
        )
    # a batch is one update there, whatever verl's own default says
    made[f"{_ACTOR}.ppo_mini_batch_size"] = min(made[f"{_ACTOR}.ppo_mini_batch_size"], made["data.train_batch_size"])
    return made


def _agents(carry: Carry) -> None:
    carry.values.pop("workflow.name", None)
    carry.open.append(
        "workflow.name: name your workflow or agent program, as docs/workflows.md and docs/gateway.md show"
    )
    if (most := carry.get("rllm.workflow.n_parallel_tasks")) is not None:
        carry.put("rllm.workflow.n_parallel_tasks", "rollout.max_concurrent", most)
    if (retries := carry.get("rllm.workflow.retry_limit")) is not None:
        carry.put("rllm.workflow.retry_limit", "rollout.retries", retries, "of failed infrastructure only")
    if (limit := carry.get("rllm.agent.trajectory_timeout")) is not None:
        carry.put("rllm.agent.trajectory_timeout", "rollout.timeout_s", float(limit))
    if carry.get("rllm.algorithm.router_replay", "disabled") == "disabled":
        carry.as_here("rllm.algorithm.router_replay", "experts are not replayed")
    precomputed = bool(carry.get("rllm.algorithm.use_precomputed_advantage", False))
    carry.put("rllm.algorithm.use_precomputed_advantage", "algorithm.use_precomputed_advantage", precomputed)
    if carry.get("rllm.stepwise_advantage.enable", False) and carry.get("rllm.stepwise_advantage.mode") == "per_step":
        carry.put("rllm.stepwise_advantage.mode", "workflow.grouping", "by_step")
    if carry.get("rllm.data.seed") is not None:
        carry.put("rllm.data.seed", "run.seed", carry.get("rllm.data.seed"))


def _filters(carry: Carry) -> None:
    dropped: list[str] = []
    if carry.get("rllm.compact_filtering.enable", False):
        carry.part_of("rllm.compact_filtering.enable", "filters.drop_terminations")
        for name, reason in _TERMINATIONS.items():
            if carry.get(f"rllm.compact_filtering.{name}", False) and reason != "turns":
                dropped.append(reason)
                carry.part_of(f"rllm.compact_filtering.{name}", "filters.drop_terminations", reason)
            elif carry.get(f"rllm.compact_filtering.{name}", False):
                carry.lose(f"rllm.compact_filtering.{name}", 'add "turns" once workflow.name makes several calls')
        for name in ("mask_timeout", "mask_error"):
            carry.as_here(f"rllm.compact_filtering.{name}", "failed episodes are never trained")
        for name in ("mask_env_done", "mask_unknown"):
            if carry.get(f"rllm.compact_filtering.{name}", False):
                carry.lose(f"rllm.compact_filtering.{name}", "there is no such reason; filter in a grouping hook")
    for key in ("rllm.mask_truncated_samples", "rllm.agent.overlong_filter"):
        if carry.get(key, False):
            dropped.append("length")
            carry.part_of(key, "filters.drop_terminations", "length")
    if dropped:
        carry.values["filters.drop_terminations"] = sorted(set(dropped))
    at = "rllm.rejection_sample"
    if carry.get(f"{at}.filter_uniform_groups", False):
        carry.put(f"{at}.filter_uniform_groups", "filters.drop_uniform", True)
        carry.idle("algorithm.filter_groups.enable", f"{at} decides")
    if carry.get(f"{at}.min_trajs_per_group") is not None:
        carry.put(f"{at}.min_trajs_per_group", "filters.min_trajectories", carry.get(f"{at}.min_trajs_per_group"))
    if carry.get(f"{at}.enable", False):
        carry.part_of(f"{at}.enable", "filters.min_partial_tasks")
        carry.put(
            f"{at}.min_partial_solve_tasks", "filters.min_partial_tasks", carry.get(f"{at}.min_partial_solve_tasks")
        )
        if carry.get(f"{at}.multiplier", 1) != 1:
            carry.lose(f"{at}.multiplier", "batches are added until enough tasks are partly solved")


def _asynchronous(carry: Carry) -> None:
    at = "rllm.async_training"
    if not carry.get(f"{at}.enable", False):
        return
    share = float(carry.get(f"{at}.staleness_threshold", 0.0))
    every = carry.get(f"{at}.trigger_parameter_sync_step", 1)
    bound = max(1, math.ceil(share) * every)
    note = f"versions, not a share of samples: {share:g} there" if share else "1 is the least that generates ahead"
    carry.put(f"{at}.staleness_threshold", "trainer.max_staleness", bound, note)
    carry.values |= {"trainer.placement": "separate", "trainer.staleness": "count"}
    carry.part_of(f"{at}.enable", "trainer.placement")
    carry.put(f"{at}.mini_batch_size", "trainer.batch_size", carry.values["trainer.batch_size"])
    carry.put(f"{at}.partial_rollout", "trainer.partial_rollouts", bool(carry.get(f"{at}.partial_rollout", False)))
    if every != 1:
        carry.lose(f"{at}.trigger_parameter_sync_step", "weights are synced at every step")
