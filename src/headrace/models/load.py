"""Loading models and tokenizers, with one clear sentence for whatever can be wrong with them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from headrace.config import LoraSection, ModelSection
from headrace.errors import ModelError, boundary
from headrace.models.bfloat16 import make_bfloat16_safe
from headrace.models.catalog import resolve_model
from headrace.models.device import CPU, forward_dtype, resolve_device
from headrace.models.fit import require_fit
from headrace.models.modules import align
from headrace.models.quantized import prepared, quantization

transformers_logging.disable_progress_bar()  # a bar for a second of loading would break the live view
# nor does it print by itself: what it warns of goes where all warnings go
transformers_logging.disable_default_handler()
transformers_logging.enable_propagation()


def load_tokenizer(name: str) -> Any:
    """The tokenizer of a model by catalog name, folder or hub id."""
    folder = resolve_model(name)
    with boundary(ModelError, f'cannot load the tokenizer of model "{name}"'):
        return AutoTokenizer.from_pretrained(folder)


def load_architecture(name: str) -> Any:
    """What the model's config.json says, without dropout; no weights are read."""
    folder = resolve_model(name)
    with boundary(ModelError, f'cannot load model "{name}"'):
        config = AutoConfig.from_pretrained(folder)
    _switch_dropout_off(config)
    return config


def load_model(section: ModelSection) -> Any:
    """The transformers model, in the wanted type, without dropout, with adapters if the section asks for them."""
    folder = resolve_model(section.name)
    device, dtype = resolve_device(section.device), forward_dtype(section)
    if device == CPU and dtype == torch.bfloat16:
        make_bfloat16_safe()
    quantized = quantization(section.quantize, device, dtype)
    config = load_architecture(section.name)
    with boundary(ModelError, f'cannot load model "{section.name}"'):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=dtype, output_loading_info=True, **quantized,
            ignore_mismatched_sizes=True,  # reported with all the rest
        )  # fmt: skip
    model, info = loaded
    require_fit(f'model "{section.name}"', model, info)
    if quantized:
        return add_adapters(prepared(model), section.lora)
    if device == CPU:
        align(model)
    model = model.to(device)
    return add_adapters(model, section.lora) if section.lora.rank else model


def _switch_dropout_off(config: Any) -> None:
    """With dropout, the policy that is trained would be another than the one that was sampled from."""
    text = config.get_text_config()
    for name, value in text.to_dict().items():
        if "drop" in name and isinstance(value, float):
            setattr(text, name, 0.0)


class _LearnerDropout(nn.Dropout):
    """Dropout where gradients are computed; scoring and sampling are never random."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) if torch.is_grad_enabled() else input


def add_adapters(model: Any, lora: LoraSection) -> Any:
    """The model with its weights frozen and low-rank adapters on the named layers."""
    from peft import LoraConfig, get_peft_model

    linear = {name.rsplit(".", 1)[-1] for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    unknown = sorted(set(lora.targets) - linear)
    if unknown:
        raise ModelError(
            f"model.lora.targets names layers that the model does not have: {', '.join(unknown)}; "
            f"it has {', '.join(sorted(linear))}"
        )
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]
        lora_dropout=lora.dropout,
        target_modules=list(lora.targets),
        task_type="CAUSAL_LM",
    )
    adapted = get_peft_model(model, config)
    for module in adapted.modules():
        dropouts: Any = getattr(module, "lora_dropout", {}) if lora.dropout else {}
        for name in dropouts:
            dropouts[name] = _LearnerDropout(lora.dropout)
    return adapted
