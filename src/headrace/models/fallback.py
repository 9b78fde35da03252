"""Any causal language model through its own transformers forward: right-padded batches, one cache per sequence."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from headrace.models.causal import PackedRows


class CacheList:
    """Whatever cache object the model makes, one per slot."""

    def __init__(self) -> None:
        self.slots: list[Any] = []

    def ensure(self, slots: int, length: int) -> None:
        self.slots += [None] * (slots - len(self.slots))

    def copy(self, source: int, target: int, length: int) -> None:
        kept = copy.deepcopy(self.slots[source])
        if kept is not None and kept.get_seq_length() > length:
            kept.crop(length)
        self.slots[target] = kept

    def release(self) -> None:
        self.slots = []


class TransformersModel:
    """The model's own forward. Slower than the fast path, and right for every architecture."""

    def __init__(self, hf_model: Any) -> None:
        config = hf_model.config.get_text_config()
        self.vocabulary: int = config.vocab_size
        self.max_length: int = getattr(config, "max_position_embeddings", None) or 1 << 30
        self.row_block = 0  # sequences are decoded one by one, which makes them independent in any case
        self._model = hf_model
        self._decoder = (hf_model.get_base_model() if hasattr(hf_model, "peft_config") else hf_model).get_decoder()
        self._head = hf_model.get_output_embeddings()
        # some models scale or cap their logits after the head; those hand over whole logits instead of hidden states
        self._split_head = self._head is not None and self._head_alone_gives_logits()

    def hidden(self, rows: PackedRows) -> Tensor:
        count, longest, index_N = rows.padded_index()
        if index_N is None:
            return self._forward(rows.ids_N.view(count, longest)).flatten(0, 1)
        ids = rows.ids_N.new_zeros(count * longest).index_copy(0, index_N, rows.ids_N)
        mask = torch.zeros_like(ids).index_fill(0, index_N, 1)
        padded = self._forward(ids.view(count, longest), attention_mask=mask.view(count, longest))
        return padded.flatten(0, 1).index_select(0, index_N)

    def logits(self, hidden_ND: Tensor) -> Tensor:
        return self._head(hidden_ND) if self._split_head else hidden_ND

    def decode_logits(self, hidden_BD: Tensor) -> Tensor:
        return torch.cat([self.logits(row) for row in hidden_BD.split(1)])

    def new_cache(self) -> CacheList:
        return CacheList()

    @torch.no_grad()
    def prefill(self, cache: CacheList, rows: PackedRows, slots: Sequence[int]) -> None:
        start = 0
        for slot, length in zip(slots, rows.lengths, strict=True):
            out = self._model(rows.ids_N[start : start + length][None], use_cache=True, logits_to_keep=1)
            cache.slots[slot] = out.past_key_values
            start += length

    @torch.no_grad()
    def decode(self, cache: CacheList, ids_B: Tensor, lengths: Sequence[int]) -> Tensor:
        hidden = []
        for slot, length in enumerate(lengths):
            past = cache.slots[slot] if length else None
            out = self._call(ids_B[slot : slot + 1][None], past_key_values=past, use_cache=True)
            cache.slots[slot] = out.past_key_values
            hidden.append(self._states(out)[0, -1])
        return torch.stack(hidden)

    def _forward(self, ids_RL: Tensor, **kwargs: Any) -> Tensor:
        return self._states(self._call(ids_RL, use_cache=False, **kwargs))

    def _call(self, ids_RL: Tensor, **kwargs: Any) -> Any:
        return (self._decoder if self._split_head else self._model)(input_ids=ids_RL, **kwargs)

    def _states(self, out: Any) -> Tensor:
        return out.last_hidden_state if self._split_head else out.logits

    @torch.no_grad()
    def _head_alone_gives_logits(self) -> bool:
        ids = torch.arange(min(4, self.vocabulary))[None]
        training = self._model.training
        self._model.eval()
        whole = self._model(input_ids=ids, use_cache=False).logits
        parts = self._head(self._decoder(input_ids=ids, use_cache=False).last_hidden_state)
        self._model.train(training)
        return whole.shape == parts.shape and torch.allclose(whole, parts, atol=1e-5)
