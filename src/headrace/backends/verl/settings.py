# pyright: reportMissingImports=false
"""From a run configuration to verl's: what Headrace decides, and what `[backend.verl]` passes through."""

from __future__ import annotations

import json
from dataclasses import MISSING, fields
from typing import Any, get_args, get_type_hints

import torch
from transformers import AutoConfig
from verl.trainer.config import CheckpointConfig
from verl.workers.config import (
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
    McoreEngineConfig,
    McoreOptimizerConfig,
    TrainingWorkerConfig,
)

from headrace.backends.verl.megatron import check_megatron, megatron_engine, megatron_optimizer
from headrace.backends.verl.platform import strategy_of
from headrace.config import RunConfig
from headrace.errors import ConfigError, boundary
from headrace.models.catalog import resolve_model
from headrace.models.device import forward_dtype
from headrace.registry import nearest

_CLASSES: dict[str, dict[str, Any]] = {
    "fsdp2": {"engine": FSDPEngineConfig, "model": HFModelConfig, "optimizer": FSDPOptimizerConfig},
    "megatron": {"engine": McoreEngineConfig, "model": HFModelConfig, "optimizer": McoreOptimizerConfig},
}
_SIMPLE = (bool, int, float, str, dict, list)
_SHORT = {torch.float32: "fp32", torch.bfloat16: "bf16"}
_BUDGET, _SCHEDULE, _NAME = "backend.micro_batch_tokens", "optimizer.schedule", "model.name"
_OWNED: dict[str, dict[str, str]] = {
    "engine": {
        **dict.fromkeys(("dtype", "model_dtype", "mixed_precision"), "model.dtype"),
        **dict.fromkeys(("use_dynamic_bsz", "max_token_len_per_gpu", "micro_batch_size_per_gpu"), _BUDGET),
        **dict.fromkeys(("infer_max_token_len_per_gpu", "infer_micro_batch_size_per_gpu"), _BUDGET),
        "use_no_sync_for_gradient_accumulation": _BUDGET,
        "fsdp_size": "backend.shard",
        "use_remove_padding": "backend.verl.model.use_remove_padding",
        "seed": "run.seed",
    },
    "model": {
        **dict.fromkeys(("path", "local_path", "hf_config_path", "local_hf_config_path", "hf_config"), _NAME),
        **dict.fromkeys(("tokenizer_path", "local_tokenizer_path", "tokenizer", "load_tokenizer", "processor"), _NAME),
        **dict.fromkeys(("generation_config", "architectures"), _NAME),
        "lora_rank": "model.lora.rank",
        "lora_alpha": "model.lora.alpha",
        "target_modules": "model.lora.targets",
        "enable_gradient_checkpointing": "backend.gradient_checkpointing",
    },
    "optimizer": {
        **{key: f"optimizer.{key}" for key in ("lr", "betas", "weight_decay", "grad_clip")},
        "clip_grad": "optimizer.grad_clip",
        **dict.fromkeys(("lr_scheduler_type", "warmup_style", "num_cycles", "zero_indexed_step"), _SCHEDULE),
        **dict.fromkeys(("lr_warmup_steps", "lr_warmup_steps_ratio"), "optimizer.warmup_steps"),
        **dict.fromkeys(("lr_warmup_init", "lr_decay_steps", "lr_decay_style", "weight_decay_incr_style"), _SCHEDULE),
        **dict.fromkeys(("lr_wsd_decay_style", "lr_wsd_decay_steps"), _SCHEDULE),
        "use_checkpoint_opt_param_scheduler": _SCHEDULE,
        "total_training_steps": "trainer.steps",
        **dict.fromkeys(("min_lr_ratio", "min_lr"), "optimizer.min_lr_ratio"),
    },
}
"""What a setting of Headrace says: by key of verl's, its name here."""
_REFUSED: dict[str, dict[str, str]] = {
    "engine": {
        "forward_only": "the learner computes gradients",
        "full_determinism": "verl changes the process's environment for it",
        "ulysses_sequence_parallel_size": "rows are spread over data-parallel ranks only",
        "use_fused_kernels": "verl's fused head knows one temperature for all rows",
        "router_replay": "rows carry no routes",
        "qat": "weight syncs send weights as they are trained",
        "turbo_config": 'it is for strategy "fsdp_turbo"',
        "dynamic_context_parallel": "rows are spread over data-parallel ranks",
        "use_mbridge": "verl converts weights by a bridge always",
        **dict.fromkeys(("use_dist_checkpointing", "dist_checkpointing_path"), "the model is read from model.name"),
        "dist_checkpointing_prefix": "the model is read from model.name",
    },
    "model": {
        "model_type": "the learner trains a language model",
        "use_fused_kernels": "verl's fused head knows one temperature for all rows",
        "fused_kernel_options": "verl's fused head knows one temperature for all rows",
        "lora": "it is for adapters with Megatron, which are trained with FSDP2 only",
        "lora_adapter_path": "adapters begin as the run does; resume from a checkpoint of the run",
        "target_parameters": "adapters are on linear layers",
        "exclude_modules": "model.lora.targets names all layers that have adapters",
        "custom_chat_template": "Headrace renders prompts with the tokenizer's own",
        "mtp": "the loss is of the next token",
    },
    "optimizer": {},
}


def check_settings(config: RunConfig) -> None:
    """Raise ConfigError for a key that verl does not have, that Headrace decides, or whose value verl's class refuses.

    Neither the model nor a device is needed for it.
    """
    given = config.backend.verl
    unknown = sorted(given.keys() - _OWNED.keys())
    if unknown:
        raise ConfigError(
            f"backend.verl has no table {unknown[0]}{nearest(unknown[0], _OWNED)}; it has {', '.join(_OWNED)}"
        )
    strategy = strategy_of(config)
    if strategy not in _CLASSES:
        raise ConfigError(
            f"backend.verl.engine.strategy = {json.dumps(strategy)}{nearest(str(strategy), _CLASSES)} is not one of "
            f'{", ".join(_CLASSES)}; set it to "fsdp2", or leave it out'
        )
    for table, settings in given.items():
        for key, value in settings.items():
            _check_key(table, key, value, _CLASSES[strategy][table])
    if strategy == "megatron":
        check_megatron(config)
    for table, build in (("engine", lambda: engine_config(config, 1)), ("optimizer", lambda: optimizer_config(config))):
        with boundary(ConfigError, f"verl refuses backend.verl.{table}"):
            build()


def _check_key(table: str, key: str, value: Any, kind: Any) -> None:
    name = f"backend.verl.{table}.{key}"
    known = {one.name: one for one in fields(kind) if not one.name.startswith("_")}
    if key not in known:
        free = [one for one in known if one not in _OWNED[table] and one not in _REFUSED[table]]
        raise ConfigError(f"{name}: verl's {kind.__name__} has no {key}{nearest(key, known)}; it has {', '.join(free)}")
    if key in _OWNED[table]:
        raise ConfigError(f"{name} is decided by {_OWNED[table][key]}; set that, and remove {name}")
    if key in _REFUSED[table]:
        raise ConfigError(f"{name} cannot be set: {_REFUSED[table][key]}; remove it")
    factory = known[key].default_factory
    usual: Any = known[key].default if factory is MISSING else factory()
    if isinstance(usual, bool | int | float | str | dict | list) and not _is_a(value, type(usual)):
        raise ConfigError(
            f"{name} must be a {type(usual).__name__}, as {json.dumps(usual)} is; got {json.dumps(value)}"
        )
    kinds = [one for one in get_args(get_type_hints(kind)[key]) if one in _SIMPLE]
    if usual is None and kinds and not any(_is_a(value, one) for one in kinds):
        raise ConfigError(f"{name} must be a {kinds[0].__name__}; got {json.dumps(value)}")


def _is_a(value: Any, kind: type) -> bool:
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(value, kind) and not (kind is int and isinstance(value, bool))


def worker_config(config: RunConfig, size: int, forward_only: bool = False) -> TrainingWorkerConfig:
    """For every worker of `size`. `forward_only`: of a model that is asked and never trained."""
    return TrainingWorkerConfig(
        model_type="language_model",
        model_config=_model_config(config),
        engine_config=engine_config(config, size, forward_only),
        optimizer_config=optimizer_config(config),
        checkpoint_config=CheckpointConfig(),
    )


def engine_config(config: RunConfig, size: int, forward_only: bool = False) -> FSDPEngineConfig | McoreEngineConfig:
    """In the types that the run states: verl's own default computes in bfloat16."""
    if strategy_of(config) == "megatron":
        return megatron_engine(config, forward_only)
    short = _SHORT[forward_dtype(config.model)]
    return FSDPEngineConfig(
        **{
            "use_torch_compile": False,  # of the entropy alone
            **config.backend.verl.get("engine", {}),
            "strategy": "fsdp2",
            "forward_only": forward_only,
            "fsdp_size": config.backend.shard or size,
            "model_dtype": "fp32",
            "dtype": "float32" if short == "fp32" else "bfloat16",
            "mixed_precision": {"param_dtype": short, "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
            "use_dynamic_bsz": False,
            "use_no_sync_for_gradient_accumulation": False,
            "seed": config.run.seed,
        }
    )


def optimizer_config(config: RunConfig) -> FSDPOptimizerConfig | McoreOptimizerConfig:
    """AdamW as the run has it. The learning rate comes with each step; Headrace has clipped by then."""
    if strategy_of(config) == "megatron":
        return megatron_optimizer(config)
    section, given = config.optimizer, dict(config.backend.verl.get("optimizer", {}))
    more = given.pop("override_optimizer_config", None) or {}
    return FSDPOptimizerConfig(
        **given,
        lr=section.lr,
        betas=section.betas,
        weight_decay=section.weight_decay,
        clip_grad=float("inf"),
        lr_warmup_steps=0,
        total_training_steps=1,
        override_optimizer_config={"eps": section.eps, **more},
    )


def _model_config(config: RunConfig) -> HFModelConfig:
    section, given = config.model, dict(config.backend.verl.get("model", {}))
    folder = str(resolve_model(section.name))
    override = {"attn_implementation": "sdpa", **_without_dropout(folder), **given.pop("override_config", {})}
    return HFModelConfig(
        **{
            "use_remove_padding": False,
            **given,
            "path": folder,
            "override_config": override,
            "enable_gradient_checkpointing": config.backend.gradient_checkpointing,
            "lora_rank": section.lora.rank,
            "lora_alpha": section.lora.alpha,
            "target_modules": list(section.lora.targets),
        }
    )


def _without_dropout(folder: str) -> dict[str, float]:
    """With dropout, the policy that is trained would be another than the one that was sampled from."""
    text = AutoConfig.from_pretrained(folder).get_text_config()
    return {name: 0.0 for name, value in text.to_dict().items() if "drop" in name and isinstance(value, float)}
