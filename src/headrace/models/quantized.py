"""Base models in few bits, under adapters that are trained (QLoRA), through bitsandbytes."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch

from headrace.errors import ConfigError

_PACKAGE = "bitsandbytes"


def quantization(kind: str, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """What `from_pretrained` is given to load a model in few bits; nothing for kind "none"."""
    if kind == "none":
        return {}
    if importlib.util.find_spec(_PACKAGE) is None:
        raise ConfigError(
            f'model.quantize = "{kind}" needs the package {_PACKAGE}, which is not installed; install it (pip install '
            f'{_PACKAGE}), or set model.quantize = "none"'
        )
    from transformers import BitsAndBytesConfig

    if kind == "int8":
        config = BitsAndBytesConfig(load_in_8bit=True)
    else:
        config = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type=kind, bnb_4bit_compute_dtype=dtype, bnb_4bit_use_double_quant=True
        )
    return {"quantization_config": config, "device_map": {"": device}}


def prepared(model: Any) -> Any:
    """A quantised model that adapters can be trained on: all of it is frozen, in the types that it was loaded in."""
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            # on the CPU the sampler's modules would repack the weights, which the learner's share, into a layout that
            # has no gradient
            module.support_avx512bf16_for_cpu = False
    return model.requires_grad_(False)
