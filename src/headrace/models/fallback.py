"""Any causal language model through its own transformers forward: right-padded batches, one cache per sequence."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

from headrace.config import Weights
from headrace.models.causal import Draws, require_no_copy
from headrace.models.modules import copy_modules, copy_weights, trained_parameters
from headrace.models.packed import PackedRows


@dataclass(slots=True)
class Slot:
    """One sequence: the tokens it has read, and the model's cache of them; with None they are read again."""

    ids: list[int] = field(default_factory=list)
    cache: Any = None


class CacheList:
    """Whatever cache object the model makes, one per slot."""

    def __init__(self) -> None:
        self.slots: list[Slot] = []

    def ensure(self, slots: int, length: int) -> None:
        self.slots += [Slot() for _ in range(slots - len(self.slots))]

    def share(self, source: int, target: int, length: int) -> None:
        self.slots[target] = self.take(source, length)

    def free(self, slots: Collection[int]) -> None:
        for slot in slots:
            self.slots[slot] = Slot()

    def move(self, source: int, target: int, length: int) -> None:
        self.slots[target] = self.slots[source]  # which holds no more than that
        self.free([source])

    def take(self, slot: int, length: int) -> Slot:
        return _first(self.slots[slot], length)

    def put(self, slot: int, length: int, taken: Slot) -> None:
        self.slots[slot] = _first(taken, length)  # a copy: it may be put again

    def release(self) -> None:
        self.slots = []


def _first(slot: Slot, length: int) -> Slot:
    """A copy of its first tokens."""
    cut = length < len(slot.ids)
    kept = None if cut and not _can_be_cut(slot.cache) else copy.deepcopy(slot.cache)
    if cut and kept is not None:
        kept.crop(length)
    return Slot(slot.ids[:length], kept)


def _can_be_cut(cache: Any) -> bool:
    # windows and recurrent states forget what a shorter sequence needs
    return type(cache) is DynamicCache and all(type(layer) is DynamicLayer for layer in cache.layers)


def _padded_index(rows: PackedRows) -> tuple[int, int, Tensor | None]:
    """(rows, longest, index of each token in a right-padded [rows * longest] layout; None if nothing is padded)."""
    count, longest = len(rows.lengths), max(rows.lengths)
    if min(rows.lengths) == longest:
        return count, longest, None
    lengths_R = torch.tensor(rows.lengths, device=rows.ids_N.device)
    starts_R = torch.arange(count, device=rows.ids_N.device) * longest
    return count, longest, starts_R.repeat_interleave(lengths_R) + rows.positions_N


class TransformersModel:
    """The model's own forward. Slower than the fast path, and right for every architecture."""

    def __init__(self, hf_model: Any) -> None:
        config = hf_model.config.get_text_config()
        self.vocabulary: int = config.vocab_size
        self.max_length: int = getattr(config, "max_position_embeddings", None) or 1 << 30
        self.shares_prefixes = False
        self.row_block = 0  # sequences are decoded one by one, which makes them independent in any case
        self._trained = trained_parameters(hf_model)
        # modules of its own: the learner's may be in training mode, where checkpointing drops the cache, or have their
        # adapters switched off for a moment
        self._twin = copy_modules(hf_model)
        self._learner, self._sampler = _Parts(hf_model), _Parts(self._twin)
        # some models scale or cap their logits after the head; those hand over whole logits instead of hidden states
        self._split_head = self._sampler.head_alone_gives_logits()

    def hidden(self, rows: PackedRows) -> Tensor:
        count, longest, index_N = _padded_index(rows)
        if index_N is None:
            return self._forward(rows.ids_N.view(count, longest)).flatten(0, 1)
        ids = rows.ids_N.new_zeros(count * longest).index_copy(0, index_N, rows.ids_N)
        mask = torch.zeros_like(ids).index_fill(0, index_N, 1)
        padded = self._forward(ids.view(count, longest), attention_mask=mask.view(count, longest))
        return padded.flatten(0, 1).index_select(0, index_N)

    def logits(self, hidden_ND: Tensor) -> Tensor:
        return self._learner.head(hidden_ND) if self._split_head else hidden_ND

    def fused_head(self) -> None:
        return None

    @torch.no_grad()
    def decode_logits(self, hidden_BD: Tensor) -> Tensor:
        return torch.cat([self._sampler.head(row) for row in hidden_BD.split(1)]) if self._split_head else hidden_BD

    def decode_and_sample(self, cache: CacheList, ids_B: Tensor, lengths: Sequence[int], draws: Draws) -> None:
        return None

    def decode_with(self, weights: Weights) -> None:
        require_no_copy(weights, "a model is decoded by transformers, as one outside the Llama family is")

    def renew(self) -> None:
        pass

    def weights(self) -> list[Tensor]:
        return [parameter.data for parameter in self._trained]

    def copy(self) -> TransformersModel:
        copied = TransformersModel(copy_weights(self._twin, self._trained))
        copied.row_block = self.row_block
        return copied

    def new_cache(self) -> CacheList:
        return CacheList()

    @torch.no_grad()
    def prefill(
        self, cache: CacheList, rows: PackedRows, slots: Sequence[int], begin: Sequence[int] | None = None
    ) -> None:
        for slot, row in zip(slots, rows.ids_N.split(rows.lengths), strict=True):
            cache.slots[slot] = Slot()
            self._read(cache.slots[slot], row.tolist())

    @torch.no_grad()
    def decode(self, cache: CacheList, ids_B: Tensor, lengths: Sequence[int]) -> Tensor:
        hidden = []
        for slot, (token, length) in enumerate(zip(ids_B.tolist(), lengths, strict=True)):
            if not length:
                cache.slots[slot] = Slot()
            hidden.append(self._read(cache.slots[slot], [token]))
        return torch.stack(hidden)

    def _read(self, slot: Slot, tokens: list[int]) -> Tensor:
        """Append the tokens to the slot's sequence; the state (or logits) after the last."""
        slot.ids += tokens
        known = {"past_key_values": slot.cache} if slot.cache is not None else {}
        unread = torch.tensor([tokens if known else slot.ids])
        if self._split_head:
            out = self._sampler.decoder(input_ids=unread, use_cache=True, **known)
        else:
            out = self._sampler.whole(input_ids=unread, use_cache=True, **known, **self._sampler.last_only)
        slot.cache = getattr(out, "past_key_values", None)
        return self._states(out)[0, -1]

    def _forward(self, ids_RL: Tensor, **kwargs: Any) -> Tensor:
        model = self._learner.decoder if self._split_head else self._learner.whole
        return self._states(model(input_ids=ids_RL, use_cache=False, **kwargs))

    def _states(self, out: Any) -> Tensor:
        return out.last_hidden_state if self._split_head else out.logits


class _Parts:
    """A transformers model, its decoder and its head; adapters live inside of them."""

    def __init__(self, hf_model: Any) -> None:
        self.whole: Any = hf_model.get_base_model() if hasattr(hf_model, "peft_config") else hf_model
        self.decoder: Any = self.whole.get_decoder()
        self.head: Any = self.whole.get_output_embeddings()
        takes = inspect.signature(self.whole.forward).parameters
        self.last_only = {"logits_to_keep": 1} if "logits_to_keep" in takes else {}

    @torch.no_grad()
    def head_alone_gives_logits(self) -> bool:
        if self.head is None:
            return False
        ids = torch.arange(min(4, self.head.weight.shape[0]))[None]
        whole = self.whole(input_ids=ids, use_cache=False).logits
        parts = self.head(self.decoder(input_ids=ids, use_cache=False).last_hidden_state)
        return torch.equal(whole, parts)  # to the bit: where logits are still small, a cap hardly shows
