"""Tensor parallelism: ranks split the matrices of every layer between them, as transformers plans it for the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.distributed.tensor.parallel.style import SequenceParallel
from transformers import AutoModelForCausalLM

from headrace.config import RunConfig
from headrace.errors import ConfigError
from headrace.models.catalog import resolve_model
from headrace.models.load import load_architecture

_HEADS = 2  # axis of queries and keys [rows, tokens, heads, dim] where a norm sees them


def _style(name: str) -> ParallelStyle | None:
    """torch's style for a word of transformers' plans; None if there is none."""
    match name:
        case "colwise":
            return ColwiseParallel()
        case "colwise_gather_output":
            return ColwiseParallel(output_layouts=Replicate())
        case "rowwise":
            return RowwiseParallel()
        case "rowwise_split_input":
            return RowwiseParallel(input_layouts=Replicate())
        case "replicated_with_grad_allreduce":  # each rank has some heads: their gradients are parts of a sum
            return SequenceParallel(sequence_dim=_HEADS, use_local_output=True)
    return None


def split_layers(hf_model: nn.Module, mesh: DeviceMesh) -> None:
    """Replace the parameters that the plan names by this rank's parts of them."""
    check_plan(hf_model, mesh.size())
    plan = {path: style for path, name in planned(hf_model).items() if (style := _style(name)) is not None}
    parallelize_module(hf_model, mesh, plan, src_data_rank=None)  # every rank has loaded the same weights


def planned(hf_model: Any) -> dict[str, str]:
    """Transformers' plan: words by the paths of modules. Without the embedding, and a head that shares its weights."""
    whole = {"embedding_rowwise", "embedding_colwise"}
    plan = {path: name for path, name in dict(getattr(hf_model, "tp_plan", None) or {}).items() if name not in whole}
    if hf_model.config.get_text_config().tie_word_embeddings:
        plan.pop("lm_head", None)
    return plan


def check_split(config: RunConfig) -> None:
    """Raise ConfigError if ranks cannot split the model. One with a hub id is checked once it is loaded."""
    ranks, name = config.backend.tensor_parallel, config.model.name
    if ranks == 1:
        return
    if config.model.lora.rank:
        raise ConfigError(
            f"backend.tensor_parallel = {ranks} splits layers, and model.lora.rank = {config.model.lora.rank} puts "
            f"adapters on them, which are not split; set one of the two to its default"
        )
    if config.backend.routing_replay:
        raise ConfigError("backend.tensor_parallel splits no experts; set it to 1, or backend.routing_replay = false")
    if Path(resolve_model(name)).is_dir():
        with torch.device("meta"):
            check_plan(AutoModelForCausalLM.from_config(load_architecture(name)), ranks)


def check_plan(hf_model: Any, ranks: int) -> None:
    """Raise ConfigError if so many ranks cannot split this model. It may be on the meta device."""
    plan, config = planned(hf_model), hf_model.config.get_text_config()
    named = f"backend.tensor_parallel = {ranks}"
    if not plan:
        raise ConfigError(
            f"{named} needs a plan of transformers for {config.model_type} models, and there is none; set it to 1, and "
            f"let ranks hold the model in shards (backend.shard)"
        )
    unknown = sorted({name for name in plan.values() if _style(name) is None})
    if unknown:
        raise ConfigError(
            f"{named}: transformers' plan for {config.model_type} models splits modules in ways that are not built "
            f"({', '.join(unknown)}); set it to 1"
        )
    for what, size in _sizes(hf_model, plan):
        if size % ranks:
            raise ConfigError(f"{named} does not divide {what} = {size}; set it to a divisor, or to 1")


def _sizes(hf_model: Any, plan: Mapping[str, str]) -> Iterator[tuple[str, int]]:
    """What is split, and how large it is."""
    config = hf_model.config.get_text_config()
    if "colwise" in plan.values():  # attention is computed by heads
        yield "num_attention_heads", config.num_attention_heads
        yield "num_key_value_heads", getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    for name, module in hf_model.named_modules():
        style = next((style for path, style in plan.items() if fnmatch(name, path)), None)
        if style is not None and isinstance(module, nn.Linear):
            yield (name, module.in_features if style == "rowwise" else module.out_features)
