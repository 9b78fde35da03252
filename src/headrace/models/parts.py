"""A transformers model taken apart: its decoder and its head, and how hidden states or logits are had from them."""

from __future__ import annotations

import inspect
from functools import cached_property
from typing import Any

import torch
from torch import Tensor


class Parts:
    """A transformers model, its decoder and its head; adapters live inside of them."""

    def __init__(self, hf_model: Any) -> None:
        self.whole: Any = hf_model.get_base_model() if hasattr(hf_model, "peft_config") else hf_model
        self.decoder: Any = self.whole.get_decoder()
        self.head: Any = self.whole.get_output_embeddings()
        self.config: Any = self.whole.config.get_text_config()
        takes = inspect.signature(self.whole.forward).parameters
        self.last_only = {"logits_to_keep": 1} if "logits_to_keep" in takes else {}

    @property
    def max_length(self) -> int:
        """The longest row whose tokens' positions do not depend on how long it is."""
        longest = getattr(self.config, "max_position_embeddings", None) or 1 << 30
        rope = getattr(self.config, "rope_parameters", None) or {}
        # from this length on, all positions of a row are turned by other angles: those that were cached would be wrong
        original = rope.get("original_max_position_embeddings") if rope.get("rope_type") == "longrope" else None
        return min(longest, original or longest)

    @property
    def device(self) -> torch.device:
        return self.whole.get_input_embeddings().weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.whole.get_input_embeddings().weight.dtype

    @cached_property
    @torch.no_grad()
    def split_head(self) -> bool:
        """Whether the head alone gives logits. Some models scale or cap them after it: those give whole logits where
        others give hidden states."""
        if self.head is None or self.decoder is self.whole:
            return False
        ids = torch.arange(min(4, self.head.weight.shape[0]), device=self.device)[None]
        whole = self.whole(input_ids=ids, use_cache=False).logits
        parts = self.head(self.decoder(input_ids=ids, use_cache=False).last_hidden_state)
        return torch.equal(whole, parts)  # to the bit: where logits are still small, a cap hardly shows

    def run(self, ids_RL: Tensor, last_only: bool = False, **arguments: Any) -> tuple[Tensor, Any]:
        """(hidden states [R, L, D], or logits where the head is not split off; whatever cache the model returned)."""
        if self.split_head:
            out = self.decoder(input_ids=ids_RL, **arguments)
            return out.last_hidden_state, getattr(out, "past_key_values", None)
        out = self.whole(input_ids=ids_RL, **arguments, **(self.last_only if last_only else {}))
        return out.logits, getattr(out, "past_key_values", None)

    def logits(self, states_ND: Tensor) -> Tensor:
        """Logits of what `run` gave."""
        return self.head(states_ND) if self.split_head else states_ND
