# pyright: reportMissingImports=false
"""verl's Megatron engine: which settings make sense together, and what verl is given."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

from verl.workers.config import McoreEngineConfig, McoreOptimizerConfig

from headrace.backends.verl.platform import on_gpus
from headrace.config import RunConfig
from headrace.errors import ConfigError

_AT = "backend.verl.engine"
_PARALLEL = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
_EXPERTS = ("expert_tensor_parallel_size", "expert_model_parallel_size", "pipeline_model_parallel_size")
_CHECKPOINTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def check_megatron(config: RunConfig) -> None:
    """Raise ConfigError for settings that do not fit verl's Megatron engine. It needs neither Megatron nor a GPU."""
    for problem in _problems(config):
        raise ConfigError(f'{_AT}.strategy = "megatron": {problem}')


def megatron_engine(config: RunConfig, forward_only: bool = False) -> McoreEngineConfig:
    """The model in tensor, pipeline and context parallel parts, as the run file says. Dropout is off."""
    given = dict(config.backend.verl.get("engine", {}))
    transformer = {
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        **(_CHECKPOINTED if config.backend.gradient_checkpointing else {}),
        **given.pop("override_transformer_config", {}),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of sequence parallelism, which verl turns off where there are no parts
        return McoreEngineConfig(
            **{
                **given,
                "strategy": "megatron",
                "forward_only": forward_only,
                "dtype": "bfloat16",
                "use_dynamic_bsz": False,
                "override_transformer_config": transformer,
                "seed": config.run.seed,
            }
        )


def megatron_optimizer(config: RunConfig) -> McoreOptimizerConfig:
    """Adam as the run has it. The learning rate comes with each step, so Megatron's own schedule is constant."""
    section, given = config.optimizer, dict(config.backend.verl.get("optimizer", {}))
    more = given.pop("override_optimizer_config", None) or {}
    return McoreOptimizerConfig(
        **given,
        lr=section.lr,
        min_lr=0.0,
        betas=section.betas,
        weight_decay=section.weight_decay,
        clip_grad=section.grad_clip,
        lr_warmup_steps=0,
        lr_decay_style="constant",
        total_training_steps=1,
        override_optimizer_config={"adam_beta1": section.betas[0], "adam_beta2": section.betas[1],
                                   "adam_eps": section.eps, **more},
    )  # fmt: skip


def _problems(config: RunConfig) -> Iterator[str]:
    given: Mapping[str, Any] = config.backend.verl.get("engine", {})
    if config.model.dtype not in ("auto", "bfloat16"):
        yield f'model.dtype = "{config.model.dtype}", and Megatron computes in bfloat16; set model.dtype = "bfloat16"'
    if not on_gpus(config):
        yield "it runs on GPUs only, and cluster.learner gives a rank none; set cluster.learner = { CPU = 4, GPU = 1 }"
    if config.model.lora.rank:
        yield (
            f"model.lora.rank = {config.model.lora.rank}, and adapters are trained with FSDP2 only; set it to 0, or "
            f'{_AT}.strategy = "fsdp2"'
        )
    if config.backend.shard:
        yield f"backend.shard = {config.backend.shard} is for FSDP2; set it to 0, and the sizes in [{_AT}]"
    for names in (_PARALLEL, _EXPERTS):
        sizes = {name: 1 if (size := given.get(name)) is None else size for name in names}
        if wrong := [name for name, size in sizes.items() if size < 1]:
            yield f"{_AT}.{wrong[0]} = {sizes[wrong[0]]} must be at least 1"
        ranks, parts = config.backend.ranks, prod(sizes.values())
        if isinstance(ranks, int) and parts > 0 and ranks % parts:
            shown = " × ".join(f"{name} {size}" for name, size in sizes.items())
            yield (
                f"{shown} = {parts} ranks hold one model, and backend.ranks = {ranks} is no multiple of it; set it to "
                f"{-(-ranks // parts) * parts}, or other sizes"
            )
