# pyright: reportMissingImports=false
"""What of verl the backend uses, and how it is called: every name, so that another version's changes are a list."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from importlib.metadata import version
from typing import Any

import verl  # noqa: F401  # so that a missing package is named as such

from headrace.errors import ConfigError
from headrace.registry import load_object

TESTED = "0.9.1"

CALLS: dict[str, tuple[str, ...]] = {
    "verl.plugin.platform:PlatformRegistry.register": ("platform",),
    "verl.plugin.platform:get_platform": (),
    "verl.plugin.platform:set_platform": ("platform",),
    "verl.single_controller.ray:RayClassWithInitArgs": ("cls", "args", "kwargs"),
    "verl.single_controller.ray:RayClassWithInitArgs.update_options": ("self", "options"),
    "verl.single_controller.ray:RayWorkerGroup": ("resource_pool", "ray_cls_with_init", "kwargs"),
    "verl.single_controller.ray:RayWorkerGroup.execute_all_async": ("self", "method_name", "args", "kwargs"),
    "verl.single_controller.ray:RayWorkerGroup._get_master_addr_port": (
        "self", "pg", "bundle_index", "master_port_range",
    ),
    "verl.single_controller.ray.base:SubRayResourcePool": (
        "placement_groups", "start_bundle_index", "subgroup_world_size", "kwargs",
    ),
    "verl.single_controller.ray.base:RayResourcePool": ("process_on_nodes", "use_gpu", "max_colocate_count"),
    "verl.utils.tensordict_utils:get_tensordict": ("tensor_dict", "non_tensor_dict"),
    "verl.workers.engine:EngineRegistry.register": ("model_type", "backend", "device"),
    "verl.workers.engine:FSDPEngineWithLMHead.forward_step": ("self", "micro_batch", "loss_function", "forward_only"),
    "verl.workers.engine_workers:TrainingWorker": ("config",),
    "verl.workers.engine_workers:TrainingWorker.infer_batch": ("self", "data"),
    "verl.workers.engine_workers:TrainingWorker.reset": ("self",),
    "verl.workers.engine_workers:TrainingWorker.set_loss_fn": ("self", "loss_fn"),
    "verl.workers.engine_workers_tinker:TinkerTrainingWorker": ("config",),
    "verl.workers.engine_workers_tinker:TinkerTrainingWorker.forward_backward": ("self", "data"),
    "verl.workers.engine_workers_tinker:TinkerTrainingWorker.optimizer_step": ("self", "optim_step_params"),
    "verl.workers.engine_workers_tinker:TinkerTrainingWorker.optimizer_zero_grad": ("self",),
}  # fmt: skip
"""Parameters that must be there, by what is called."""

FIELDS: dict[str, tuple[str, ...]] = {
    "verl.trainer.config:CheckpointConfig": (),
    "verl.workers.config:FSDPEngineConfig": (
        "strategy", "forward_only", "fsdp_size", "model_dtype", "dtype", "mixed_precision", "use_dynamic_bsz",
        "use_no_sync_for_gradient_accumulation", "use_torch_compile", "seed",
    ),
    "verl.workers.config:FSDPOptimizerConfig": (
        "lr", "betas", "weight_decay", "clip_grad", "lr_warmup_steps", "total_training_steps",
        "override_optimizer_config",
    ),
    "verl.workers.config:HFModelConfig": (
        "path", "override_config", "enable_gradient_checkpointing", "use_remove_padding", "lora_rank", "lora_alpha",
        "target_modules",
    ),
    "verl.workers.config:McoreEngineConfig": (
        "strategy", "forward_only", "dtype", "use_dynamic_bsz", "seed", "override_transformer_config",
        "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size",
        "expert_model_parallel_size", "expert_tensor_parallel_size", "vanilla_mbridge",
    ),
    "verl.workers.config:McoreOptimizerConfig": (
        "lr", "min_lr", "betas", "weight_decay", "clip_grad", "lr_warmup_steps", "lr_decay_style",
        "total_training_steps", "override_optimizer_config",
    ),
    "verl.workers.config:TrainingWorkerConfig": (
        "model_type", "model_config", "engine_config", "optimizer_config", "checkpoint_config",
    ),
}  # fmt: skip
"""Fields that must be there, by configuration class."""

PLATFORM = "verl.plugin.platform:PlatformBase"
"""Whose abstract methods the CPU's platform has, all of them."""


def differences(
    calls: dict[str, tuple[str, ...]] = CALLS, settings: dict[str, tuple[str, ...]] = FIELDS
) -> Iterator[str]:
    """What the installed verl has otherwise, a line each."""
    for path, wanted in calls.items():
        yield from _missing(path, wanted, _parameters, "takes no")
    for path, wanted in settings.items():
        yield from _missing(path, wanted, _fields, "has no field")
    ours: Any = load_object("headrace.backends.verl.cpu:CpuPlatform")
    for name in sorted(load_object(PLATFORM).__abstractmethods__ - set(vars(ours))):
        yield f"{PLATFORM} has a new abstract method {name}, which the platform of the CPU lacks"


def require_all() -> None:
    """Raise ConfigError if another version than the tested one lacks what is used."""
    found = version("verl")
    if found == TESTED:
        return
    lines = "\n".join(f"  {line}" for line in differences())
    if lines:
        raise ConfigError(
            f'verl {found} is installed, and backend "verl" is written for {TESTED}; these differ:\n{lines}\n'
            f"install verl=={TESTED} (make verl)"
        )


def _missing(path: str, wanted: tuple[str, ...], names: Any, says: str) -> Iterator[str]:
    try:
        there = names(load_object(path))
    except (ConfigError, ImportError):
        yield f"{path} is gone"
        return
    for name in wanted:
        if name not in there:
            yield f"{path} {says} {name}; it has {', '.join(there) or 'none'}"


def _parameters(target: Any) -> list[str]:
    return list(inspect.signature(target).parameters)


def _fields(target: Any) -> list[str]:
    return [one.name for one in fields(target)] if is_dataclass(target) else []
