"""What a backend with a torch model in this process lends to the engine of its run."""

from __future__ import annotations

from typing import Any

from headrace.backends.local.frozen import score_rows
from headrace.engines.base import ModelHost
from headrace.weights.base import WeightSender
from headrace.weights.canary import Rows
from headrace.weights.in_place import InPlace
from headrace.weights.sender import server_sender
from headrace.weights.shared_memory import SharedWeights
from headrace.weights.source import ModelWeights


def new_host(transport: str, tokenizer: Any, hf_model: Any, in_place: InPlace, weights: ModelWeights) -> ModelHost:
    """The host of an engine that shares the model ("in_place"), or of one that gets copies, in another process or on
    servers."""
    model = in_place.model

    async def score(rows: Rows) -> list[list[float]]:
        all_of_them = [range(len(rows))]
        return await weights.on_learner(lambda: score_rows(model, rows, [1.0] * len(rows), all_of_them, 1024))

    sender: WeightSender
    if transport == "in_place":
        sender = in_place
    elif transport == "shared_memory":
        sender = SharedWeights(weights)
    else:
        sender = server_sender(transport, weights)
    ends = tuple(eos_token_ids(hf_model, tokenizer))
    dtype = str(hf_model.dtype).removeprefix("torch.")
    return ModelHost(tokenizer, ends, model.max_length, weights, sender, score, model.vocabulary, dtype)


def eos_token_ids(hf_model: Any, tokenizer: Any) -> list[int]:
    """Every id that ends a reply: those of the generation config and the tokenizer's own."""
    configured = getattr(getattr(hf_model, "generation_config", None), "eos_token_id", None)
    ids = configured if isinstance(configured, list) else [configured]
    return sorted({i for i in (*ids, tokenizer.eos_token_id) if i is not None})
