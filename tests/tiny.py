"""Tiny random models of many architectures: every parameter away from its initial value, logits of an ordinary size."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

VOCABULARY = 97
LENGTH = 256

_IDS: dict[str, Any] = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_USUAL: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": LENGTH,
    "tie_word_embeddings": False,
}
_GROUPED: dict[str, Any] = {**_USUAL, "num_key_value_heads": 2}
_GPT2: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": LENGTH}
_LLAMA3_ROPE: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2}
_MIXED = ["sliding_attention", "full_attention"]

# name: (transformers model type, configuration)
FAST: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", _GROUPED),
    "llama_ungrouped_tied": ("llama", {**_USUAL, "num_key_value_heads": 4, "tie_word_embeddings": True}),
    "llama_biases": ("llama", {**_GROUPED, "attention_bias": True, "mlp_bias": True}),
    "llama3_rope": ("llama", {**_GROUPED, "rope_parameters": _LLAMA3_ROPE}),
    "qwen2": ("qwen2", {**_GROUPED, "tie_word_embeddings": True}),
    "qwen3": ("qwen3", {**_GROUPED, "head_dim": 16}),
    "mistral": ("mistral", {**_GROUPED, "sliding_window": None}),
}
FALLBACK: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", _GPT2),  # learned positions, dropout
    "gpt_neox": ("gpt_neox", _USUAL),
    "phi": ("phi", _USUAL),  # a head with a bias
    "gemma2": ("gemma2", {**_GROUPED, "head_dim": 8, "sliding_window": 8}),  # capped logits, layers with a window
    "granite": ("granite", {**_GROUPED, "logits_scaling": 3.0}),
    "mistral_window": ("mistral", {**_GROUPED, "sliding_window": 8}),
    "mixtral": ("mixtral", {**_GROUPED, "num_local_experts": 2}),
    "gemma3": ("gemma3_text", {**_GROUPED, "head_dim": 8, "sliding_window": 8, "layer_types": _MIXED}),
    "phi3": ("phi3", _GROUPED),
    "qwen3_moe": ("qwen3_moe", {**_GROUPED, **_EXPERTS, "head_dim": 8, "moe_intermediate_size": 16}),
    "gpt_oss": (  # sinks, experts with biases, layers with a window
        "gpt_oss",
        {
            **_GROUPED,
            "head_dim": 8,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 8,
            "layer_types": _MIXED,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "openai_gpt": ("openai-gpt", _GPT2),  # has no key/value cache at all
    "mamba": ("mamba", {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}),  # nor has this one
}
FAMILIES = {**FAST, **FALLBACK}


def tiny_model(family: str, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any) -> Any:
    """A seeded transformers model with two layers, in evaluation mode; `changes` go over its configuration."""
    model_type, options = FAMILIES[family]
    config = AutoConfig.for_model(model_type, **{**_IDS, **options, **changes})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    randomise(model, seed)
    return model


@torch.no_grad()
def randomise(model: Any, seed: int) -> None:
    """Add seeded noise to all parameters: biases and norms too, or a forward that forgets them would pass."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        parameter += noise * (1.5 / parameter.shape[-1] ** 0.5 if parameter.ndim > 1 else 0.1)


def add_lora(model: Any, *targets: str, seed: int = 0, dropout: float = 0.0) -> Any:
    """The model with adapters on the named layers that do something, unlike freshly made ones."""
    from headrace.config import LoraSection
    from headrace.models.load import add_adapters

    adapted = add_adapters(model, LoraSection(rank=4, alpha=8.0, dropout=dropout, targets=targets))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                noise = torch.randn(parameter.shape, generator=generator) * 0.2
                parameter.copy_(noise.to(parameter.dtype))
    return adapted


def random_rows(*lengths: int, seed: int = 0) -> list[list[int]]:
    """Rows of ordinary token ids."""
    rng = random.Random(seed)
    return [[rng.randrange(3, VOCABULARY) for _ in range(length)] for length in lengths]


def detokenize(ids: Any) -> str:
    """Several characters per token, so that a stop string can begin in one token and end in another."""
    return "".join(f"[{token}]" for token in ids)


def saved_model(family: str, folder: Path, **options: Any) -> Path:
    """A folder with a tiny model, and a tokenizer that decodes as `detokenize` does."""
    tiny_model(family, **options).save_pretrained(folder)
    words = Tokenizer(WordLevel({f"[{token}]": token for token in range(VOCABULARY)}, unk_token="[0]"))
    words.decoder = Fuse()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="[2]").save_pretrained(folder)
    return folder
