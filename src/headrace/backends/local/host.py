"""What a backend with a torch model in this process lends to the engine of its run."""

from __future__ import annotations

from typing import Any

from headrace.engines.base import ModelHost
from headrace.weights.in_place import InPlace
from headrace.weights.shared_memory import SharedWeights
from headrace.weights.source import ModelWeights


def new_host(transport: str, tokenizer: Any, hf_model: Any, in_place: InPlace, weights: ModelWeights) -> ModelHost:
    """The host of an engine that shares the model ("in_place"), or of one that gets copies ("shared_memory")."""
    sender = in_place if transport == "in_place" else SharedWeights(weights)
    return ModelHost(tokenizer, tuple(eos_token_ids(hf_model, tokenizer)), in_place.model.max_length, weights, sender)


def eos_token_ids(hf_model: Any, tokenizer: Any) -> list[int]:
    """Every id that ends a reply: those of the generation config and the tokenizer's own."""
    configured = getattr(getattr(hf_model, "generation_config", None), "eos_token_id", None)
    ids = configured if isinstance(configured, list) else [configured]
    return sorted({i for i in (*ids, tokenizer.eos_token_id) if i is not None})
