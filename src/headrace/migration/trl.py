"""A GRPOConfig of TRL, as its `to_dict()` gives it, as a run file."""

from __future__ import annotations

from pathlib import PurePath
from typing import Any

from headrace.errors import ConfigError
from headrace.migration.carry import Carry, Fate, Imported, Rest, finished

_AGGREGATIONS = {
    "grpo": "sequence_mean_token_mean",
    "bnpo": "token_mean",
    "dapo": "token_mean",
    "dr_grpo": "constant",
    "cispo": "token_mean",
}
_CORRECTIONS = {
    "token_truncate": ("tis", "token"),
    "sequence_truncate": ("tis", "sequence"),
    "token_mask": ("icepop", ""),
}
_TRACKERS = ("wandb", "mlflow", "trackio", "tensorboard")
_DECISIVE = (
    "num_iterations", "min_p", "generation_kwargs", "chat_template_kwargs", "repetition_penalty", "fp16", "optim",
    "sync_ref_model", "off_policy_mask_threshold", "reward_weights", "router_aux_loss_coef", "use_adaptive_entropy",
    "use_bias_correction_kl", "neftune_noise_alpha", "label_smoothing_factor", "model_init_kwargs", "save_steps",
)  # fmt: skip
"""What changes the training."""
_REST: Rest = (
    ("use_bias_correction_kl", Fate.LOST, "the divergence is k3, uncorrected"),
    ("label_smoothing_factor", Fate.LOST, "targets are not smoothed"),
    ("ds3_gather_for_generation", Fate.IDLE, "for DeepSpeed"),
    ("include_num_input_tokens_seen", Fate.LOST, "metrics count tokens: docs/metrics.md"),
    ("accelerator_config.*", Fate.LOST, "ranks are those of backend fsdp"),
    ("fsdp*", Fate.LOST, 'backend.name = "fsdp" shards the model'),
    ("deepspeed*", Fate.LOST, 'backend.name = "fsdp" shards the model'),
    ("ddp_*", Fate.LOST, 'backend.name = "fsdp" with backend.shard = 1'),
    ("dataloader_*", Fate.LOST, "tasks are read once, at the start"),
    ("vllm_server_timeout", Fate.LOST, "engine.start_timeout_s"),
    ("vllm_server_*", Fate.IDLE, "for vllm_mode server"),
    ("vllm_group_port", Fate.IDLE, "for vllm_mode server"),
    ("vllm_*", Fate.LOST, "an option of the server: engine.server_args"),
    ("sapo_*", Fate.IDLE, "for another loss"),
    ("vespo_*", Fate.IDLE, "for another loss"),
    ("ref_model_*", Fate.IDLE, "the reference stays fixed"),
    ("entropy_coef_*", Fate.IDLE, "the coefficient is fixed"),
    ("entropy_target", Fate.IDLE, "the coefficient is fixed"),
    ("hub_*", Fate.LOST, "`headrace export` writes a model; it is not uploaded"),
    ("log*", Fate.LOST, "the ledger and metrics.jsonl have every step and episode"),
    ("eval_*", Fate.LOST, "see [eval]"),
    ("per_device_eval_batch_size", Fate.LOST, "evaluation fills the engine's batch"),
    ("num_completions_to_print", Fate.LOST, "`headrace view` shows every episode"),
    ("multi_objective_aggregation", Fate.IDLE, "one reward"),
    ("average_tokens_across_devices", Fate.CARRIED, "losses are averaged over all ranks"),
    ("train_sampling_strategy", Fate.IDLE, "shuffle_dataset decides"),
    ("project", Fate.LOST, "track.project, with wandb, mlflow or trackio"),
    ("do_*", Fate.IDLE, "GRPOTrainer does not read it"),
    ("prediction_loss_only", Fate.IDLE, "GRPOTrainer does not read it"),
    ("skip_memory_metrics", Fate.IDLE, "GRPOTrainer does not read it"),
    ("length_column_name", Fate.IDLE, "GRPOTrainer does not read it"),
)


def import_trl(given: dict[str, Any], tasks: int | None = None) -> Imported:
    """Our settings; `tasks` is the number of training tasks, by which epochs become steps."""
    missing = [key for key in ("num_generations", "learning_rate", "max_completion_length", "beta") if key not in given]
    if missing:
        raise ConfigError(
            f"this is no GRPOConfig of TRL: it has no {', '.join(missing)}; give json.dumps(config.to_dict())"
        )
    carry = Carry(given)
    carry.open += [
        "model.name: the model is an argument of GRPOTrainer there; name it",
        "data.tasks: the dataset is an argument of GRPOTrainer there; name it",
        "workflow.judger: reward functions are arguments of GRPOTrainer there; name a judger",
    ]
    _batches(carry, tasks)
    _sampling(carry)
    _algorithm(carry)
    _correction(carry)
    _optimizer(carry)
    _run(carry)
    carry.finish(_REST, _DECISIVE)
    return finished(carry)


def _batches(carry: Carry, tasks: int | None) -> None:
    rows, group = carry.get("per_device_train_batch_size", 8), carry.get("num_generations", 8)
    turns = carry.get("steps_per_generation") or carry.get("gradient_accumulation_steps", 1)
    generated = carry.get("generation_batch_size") or rows * turns
    accumulated = carry.get("gradient_accumulation_steps", 1)
    updates = max(1, turns // accumulated)
    carry.put("num_generations", "rollout.group_size", group)
    note = f"tasks: {generated} completions in groups of {group}"
    carry.put("generation_batch_size", "trainer.batch_size", max(1, generated // group), note)
    carry.values.setdefault("trainer.batch_size", max(1, generated // group))
    carry.put("steps_per_generation", "trainer.updates_per_batch", updates)
    carry.values["trainer.updates_per_batch"] = updates
    for key in ("per_device_train_batch_size", "gradient_accumulation_steps"):
        carry.part_of(key, "trainer.batch_size", "micro-batches are packed by backend.micro_batch_tokens")
    if carry.get("num_iterations", 1) > 1:
        carry.lose("num_iterations", "a batch is trained once; produce.reuse trains groups again, in later steps")
    else:
        carry.as_here("num_iterations", "each batch is trained once")
    if (steps := carry.get("max_steps", -1)) > 0:
        carry.put("max_steps", "trainer.steps", steps)
        carry.idle("num_train_epochs", "max_steps decides")
    elif tasks is not None:
        batches = max(1, tasks // carry.values["trainer.batch_size"])
        steps = max(1, round(carry.get("num_train_epochs", 1.0) * batches)) * updates
        carry.put("num_train_epochs", "trainer.steps", steps, f"of {tasks} tasks")
    else:
        carry.lose("num_train_epochs", "runs are counted in steps; give --tasks N, the number of training tasks")
        carry.open.append("trainer.steps: epochs need the number of training tasks; import again with --tasks N")


def _sampling(carry: Carry) -> None:
    carry.put("max_completion_length", "rollout.max_tokens", carry.get("max_completion_length", 256))
    for name, usual in (("temperature", 1.0), ("top_p", 1.0)):
        carry.put(name, f"rollout.{name}", float(carry.get(name, usual)))
    carry.put("top_k", "rollout.top_k", carry.get("top_k", 0))
    if (penalty := carry.get("repetition_penalty", 1.0)) != 1.0:
        carry.lose("repetition_penalty", "it would change the distribution that is trained")
        carry.open.append(f"repetition_penalty = {penalty:g} has no counterpart")
    else:
        carry.as_here("repetition_penalty", "none")
    if not carry.get("use_vllm", False):
        carry.put("use_vllm", "engine.name", "torch")
        return
    carry.put("use_vllm", "engine.name", "vllm")
    if carry.get("vllm_mode", "colocate") == "server":
        url = carry.get("vllm_server_base_url") or (
            f"http://{carry.get('vllm_server_host', '127.0.0.1')}:{carry.get('vllm_server_port', 8000)}"
        )
        carry.values["engine.urls"] = [url]
        for key in ("vllm_mode", "vllm_server_base_url", "vllm_server_host", "vllm_server_port"):
            carry.part_of(key, "engine.urls", "a vLLM server of its own, not `trl vllm-serve`: docs/engines.md")
        return
    carry.as_here("vllm_mode", 'trainer.placement = "colocate"')
    made: list[str] = []
    for key, flag in (
        ("vllm_gpu_memory_utilization", "--gpu-memory-utilization"),
        ("vllm_tensor_parallel_size", "--tensor-parallel-size"),
    ):
        if (value := carry.get(key)) is not None:
            made += [flag, str(value)]
            carry.part_of(key, "engine.server_args", flag)
    carry.values["engine.server_args"] = made
    if (length := carry.get("vllm_max_model_length")) is not None:
        carry.put("vllm_max_model_length", "engine.max_model_length", length)


def _algorithm(carry: Carry) -> None:
    carry.values["algorithm.estimator"] = "grpo"
    scale = carry.get("scale_rewards", "group")
    if scale in ("group", True, "none", False):
        carry.put("scale_rewards", "algorithm.normalize_by_std", scale in ("group", True))
    else:
        carry.lose(
            "scale_rewards", "rewards are scaled by their group; reinforce_plus_plus_baseline scales by the batch"
        )
        carry.open.append(f"algorithm.estimator: scale_rewards = {scale!r} has no counterpart under grpo; choose")
    kind = carry.get("loss_type", "dapo")
    whole = carry.get("importance_sampling_level", "token") == "sequence"
    if carry.one_of("loss_type", "algorithm.aggregation", _AGGREGATIONS, "loss_type"):
        carry.values["algorithm.loss"] = "cispo" if kind == "cispo" else "gspo" if whole else "ppo_clip"
        if kind == "dr_grpo":
            carry.values["algorithm.aggregation_length"] = carry.values["rollout.max_tokens"]
    carry.part_of("importance_sampling_level", "algorithm.loss")
    low = float(carry.get("epsilon", 0.2))
    carry.put("epsilon", "algorithm.clip_low", low)
    carry.put("epsilon_high", "algorithm.clip_high", float(carry.get("epsilon_high", low)))
    carry.values["algorithm.clip_high"] = float(carry.get("epsilon_high", low))
    if carry.get("delta") is not None:
        carry.put("delta", "algorithm.dual_clip", float(carry.get("delta")))
    carry.put("entropy_coef", "algorithm.entropy_coef", float(carry.get("entropy_coef", 0.0)))
    carry.put("beta", "algorithm.kl.coef", float(carry.get("beta", 0.0)), "k3, in the loss")
    if not carry.get("beta", 0.0):
        carry.idle("use_bias_correction_kl", "no divergence")
    if carry.get("top_entropy_quantile", 1.0) == 1.0:
        carry.as_here("top_entropy_quantile", "all tokens are trained")
    else:
        carry.lose("top_entropy_quantile", "all tokens are trained")
        carry.open.append("top_entropy_quantile has no counterpart: all tokens are trained")
    if not carry.get("label_smoothing_factor", 0.0):
        carry.as_here("label_smoothing_factor", "targets are not smoothed")
    if carry.get("mask_truncated_completions", False):
        note = "they leave their group, too; TRL compares with them"
        carry.part_of("mask_truncated_completions", "filters.drop_terminations", note)
        carry.values["filters.drop_terminations"] = ["length"]


def _correction(carry: Carry) -> None:
    """The ratio is to the learner's own log-probabilities; the sampler is corrected for, if at all, apart."""
    carry.values["algorithm.proximal"] = "recompute"
    prefix = "vllm_importance_sampling"
    if not (carry.get("use_vllm", False) and carry.get(f"{prefix}_correction", False)):
        for name in ("correction", "mode", "clip_max", "clip_min", "cap"):
            carry.idle(f"{prefix}_{name}", "no correction")
        return
    mode = carry.get(f"{prefix}_mode", "sequence_mask")
    if mode not in _CORRECTIONS:
        for name in ("correction", "mode", "clip_max", "clip_min", "cap"):
            if carry.get(f"{prefix}_{name}") is not None:
                carry.lose(f"{prefix}_{name}", "sequence_mask goes by the mean ratio here, by the product there")
        carry.open.append(f"algorithm.correction: {prefix}_mode = {mode!r} is not the same here; choose one")
        return
    name, level = _CORRECTIONS[mode]
    carry.put(f"{prefix}_mode", "algorithm.correction.name", name)
    carry.part_of(f"{prefix}_correction", "algorithm.correction.name")
    if level:
        carry.values["algorithm.correction.level"] = level
    high = carry.get(f"{prefix}_clip_max", carry.get(f"{prefix}_cap"))
    if high is not None:
        carry.put(f"{prefix}_clip_max", "algorithm.correction.high", float(high))
    if (low := carry.get(f"{prefix}_clip_min")) is not None:
        carry.put(f"{prefix}_clip_min", "algorithm.correction.low", float(low))


def _optimizer(carry: Carry) -> None:
    carry.put("learning_rate", "optimizer.lr", carry.get("learning_rate"))
    betas = [float(carry.get("adam_beta1", 0.9)), float(carry.get("adam_beta2", 0.999))]
    for key in ("adam_beta1", "adam_beta2"):
        carry.put(key, "optimizer.betas", betas)
    carry.put("adam_epsilon", "optimizer.eps", float(carry.get("adam_epsilon", 1e-8)))
    carry.put("weight_decay", "optimizer.weight_decay", float(carry.get("weight_decay", 0.0)), "on matrices only")
    carry.put("max_grad_norm", "optimizer.grad_clip", float(carry.get("max_grad_norm", 1.0)))
    if str(carry.get("optim", "adamw_torch")).startswith("adamw_torch"):
        carry.as_here("optim", "AdamW")
    else:
        carry.lose("optim", "the optimizer is AdamW")
    schedules = {"linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant"}
    if (schedule := carry.get("lr_scheduler_type", "linear")) in schedules:
        carry.put("lr_scheduler_type", "optimizer.schedule", schedules[schedule])
    else:
        carry.lose("lr_scheduler_type", "schedules are constant, linear and cosine")
        carry.open.append(f"optimizer.schedule: there is no {schedule!r}; choose constant, linear or cosine")
    warmup = carry.get("warmup_steps", 0)
    if warmup and warmup < 1:
        carry.put("warmup_steps", "optimizer.warmup_ratio", float(warmup))
    else:
        carry.put("warmup_steps", "optimizer.warmup_steps", int(warmup))
    if carry.get("warmup_ratio"):
        carry.put("warmup_ratio", "optimizer.warmup_ratio", float(carry.get("warmup_ratio")))
    checkpointing = bool(carry.get("gradient_checkpointing", False))
    carry.put("gradient_checkpointing", "backend.gradient_checkpointing", checkpointing)
    if carry.get("bf16", False):
        carry.put("bf16", "model.dtype", "bfloat16")
        carry.values["optimizer.master_dtype"] = "float32"
    if carry.get("fp16", False):
        carry.lose("fp16", "types are bfloat16, float32 and float64")


def _run(carry: Carry) -> None:
    folder = PurePath(carry.get("output_dir") or "trl")
    name = carry.get("run_name") or folder.name
    carry.put("run_name", "run.name", str(name).replace("/", "-"))
    carry.put("output_dir", "run.dir", str(folder.parent) if folder.name == name else str(folder))
    carry.put("seed", "run.seed", carry.get("seed", 42))
    if carry.get("full_determinism", False):
        carry.put("full_determinism", "run.deterministic", True)
    carry.put("shuffle_dataset", "data.shuffle", bool(carry.get("shuffle_dataset", True)))
    saves = carry.get("save_strategy", "steps") == "steps"
    every = carry.get("save_steps", 500)
    if saves and isinstance(every, int):
        carry.put("save_steps", "trainer.save_every", every)
    else:
        carry.lose("save_steps", "a number of steps: trainer.save_every")
    carry.part_of("save_strategy", "trainer.save_every")
    if (keep := carry.get("save_total_limit")) is not None:
        carry.put("save_total_limit", "trainer.keep_last", keep)
    given = carry.get("report_to", [])
    found = [given] if isinstance(given, str) else given
    trackers = ["console", "jsonl", *(one for one in found if one in _TRACKERS)]
    unknown = [one for one in found if one not in (*_TRACKERS, "none", "all")]
    carry.put("report_to", "track.trackers", trackers, f"no tracker {', '.join(unknown)}" if unknown else "")
    if {"wandb", "mlflow", "trackio"} & {*trackers} and carry.get("project"):
        carry.put("project", "track.project", carry.get("project"))
    if carry.get("use_cpu", False):
        carry.put("use_cpu", "model.device", "cpu")
