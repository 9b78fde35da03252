"""Decoding one sequence after the other, with whatever cache the model makes: right for every architecture."""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

from headrace.models.packed import PackedRows
from headrace.models.parts import Parts


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
        kept.crop(length - len(slot.ids))  # a negative number: so many fewer
    return Slot(slot.ids[:length], kept)


def _can_be_cut(cache: Any) -> bool:
    # windows and recurrent states forget what a shorter sequence needs
    return type(cache) is DynamicCache and all(type(layer) is DynamicLayer for layer in cache.layers)


class SequentialDecoder:
    """A forward per sequence and token."""

    continues_prefixes = False

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self.one_by_one = True

    def new_cache(self) -> CacheList:
        return CacheList()

    def prefill(self, cache: CacheList, rows: PackedRows, slots: Sequence[int], begin: Sequence[int] | None) -> None:
        for slot, row in zip(slots, rows.ids_N[rows.where_T].split(rows.lengths), strict=True):
            cache.slots[slot] = Slot()
            self._read(cache.slots[slot], row.tolist())

    def decode(self, cache: CacheList, ids_B: Tensor, lengths: Sequence[int]) -> Tensor:
        states = []
        for slot, (token, length) in enumerate(zip(ids_B.tolist(), lengths, strict=True)):
            if not length:
                cache.slots[slot] = Slot()
            states.append(self._read(cache.slots[slot], [token]))
        return torch.stack(states)

    def logits(self, states_BD: Tensor) -> Tensor:
        return torch.cat([self._parts.logits(row) for row in states_BD.split(1)])

    def _read(self, slot: Slot, tokens: list[int]) -> Tensor:
        """Append the tokens to the slot's sequence; the state (or logits) after the last."""
        slot.ids += tokens
        known = {"past_key_values": slot.cache} if slot.cache is not None else {}
        unread = torch.tensor([tokens if known else slot.ids], device=self._parts.device)
        states_1LD, slot.cache = self._parts.run(unread, last_only=True, use_cache=True, **known)
        return states_1LD[0, -1]
