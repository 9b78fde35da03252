"""What a run asks of the machine that its model is loaded on, checked before any weights are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headrace.config import RunConfig
from headrace.engines.torch.engine import usable_length
from headrace.models.catalog import resolve_model
from headrace.models.causal import require_no_copy
from headrace.models.device import CPU, forward_dtype, master_dtype, resolve_device
from headrace.models.llama import covers_architecture, refuse_compiling
from headrace.models.load import load_architecture
from headrace.models.packed_forward import check_attention, refuse_attention
from headrace.models.quantized import quantization


def check_model(config: RunConfig, fast_path: bool) -> None:
    """Raise ConfigError for a device, a type, a kernel or a length that the run cannot have here.

    `fast_path`: whether the backend uses Headrace's own forward pass where it covers the model.
    """
    if not config.cluster.address:  # else the ranks' machines decide
        _check_device(config)
    architecture = _architecture(config.model.name)
    if architecture is not None:
        _check_architecture(config, architecture, fast_path)
    if config.distill.teacher != "initial":
        resolve_model(config.distill.teacher)


def _check_device(config: RunConfig) -> None:
    section = config.model
    device, dtype = resolve_device(section.device), forward_dtype(section)
    master_dtype(section, config.optimizer)
    quantization(section.quantize, device, dtype)
    check_attention(section.attention, device, dtype)


def _architecture(name: str) -> Any:
    """What config.json says; None for a hub id, which is downloaded when the run starts."""
    return load_architecture(name) if Path(resolve_model(name)).is_dir() else None


def _check_architecture(config: RunConfig, architecture: Any, fast_path: bool) -> None:
    """What only a model of this architecture can, or cannot."""
    section, engine = config.model, config.engine
    fast = section.fast_path and section.quantize == "none" and covers_architecture(architecture)
    fast = fast and not config.cluster.address and resolve_device(section.device) == CPU
    if fast_path and fast and section.attention != "auto":
        refuse_attention(section.attention)
    if engine.name != "torch":
        return
    if longest := getattr(architecture.get_text_config(), "max_position_embeddings", None):
        usable_length(longest, engine.max_model_length)
    if fast and engine.compile:
        refuse_compiling()
    if not (fast or config.cluster.address):
        require_no_copy(engine.weights, "a model is decoded by transformers, as one outside the Llama family is")
