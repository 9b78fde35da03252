"""Keys and values of the decoded sequences, one slot each; a shared prefix may be stored once."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

LENGTH_GRAIN, _SLOT_GRAIN = 64, 16


class LlamaCache:
    """Per layer: keys and values [slots, kv heads, length, head dim]; grows, never shrinks until released.

    With `shares`, a slot may have its first positions in another one, its stem: `stem_slots` and `stem_lengths` say
    where and how many (a length of 0: none). A stem has no stem itself.
    """

    def __init__(self, layers: int, heads: int, dim: int, like: Tensor, shares: bool = False) -> None:
        self._shape = (layers, heads, dim)
        self._like = like
        self._shares = shares
        self._slots = self.length = 0
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.stem_slots = self.stem_lengths = torch.zeros(0, dtype=torch.long)

    def ensure(self, slots: int, length: int) -> None:
        if slots <= self._slots and length <= self.length:
            return
        layers, heads, dim = self._shape
        old_slots, old_length = self._slots, self.length
        if slots > old_slots:
            self._slots = round_up(slots, _SLOT_GRAIN)
            more = torch.zeros(self._slots - old_slots, dtype=torch.long)
            self.stem_slots, self.stem_lengths = (torch.cat((x, more)) for x in (self.stem_slots, self.stem_lengths))
        if length > old_length:  # by half at least, or long sequences would copy the cache over and over
            self.length = round_up(max(length, old_length * 3 // 2), LENGTH_GRAIN)
        for tensors in (self.keys, self.values):
            for layer in range(layers):
                # a decoder that knows of stems reads nothing that was not written; others mask it, and 0 * NaN is NaN
                new = self._like.new_empty if self._shares else self._like.new_zeros
                grown = new((self._slots, heads, self.length, dim))
                if old_slots:
                    grown[:old_slots, :, :old_length] = tensors[layer]
                    tensors[layer] = grown
                else:
                    tensors.append(grown)

    def share(self, source: int, target: int, length: int) -> None:
        stem, known = self._stem(source)
        if not self._shares:
            self._copy(source, target, 0, length)
        elif known == 0 or known >= length:
            self._hang(target, stem if known else source, length)
        else:  # its prefix is in another slot, and the wanted part continues in the slot itself
            self._copy(stem, target, 0, known)
            self._copy(source, target, known, length)

    def free(self, slots: Collection[int]) -> None:
        for slot in slots:
            self._hang(slot, 0, 0)
        if self.stem_lengths.any():
            for slot in slots:
                self._hand_over(slot)

    def move(self, source: int, target: int, length: int) -> None:
        stem, known = self._stem(source)
        self._copy(source, target, known, length)
        for other in self._hanging_on(source):
            self.stem_slots[other] = target
        self._hang(target, stem, known)
        self._hang(source, 0, 0)

    def before(self, layer: int, wanted: Sequence[tuple[slice, int, int]]) -> list[tuple[slice, Tensor, Tensor]]:
        """For (tokens, slot, length), of slots without a stem: the tokens, with the slot's first keys and values."""
        keys, values = self.keys[layer], self.values[layer]
        return [(tokens, keys[slot, :, :length], values[slot, :, :length]) for tokens, slot, length in wanted]

    def take(self, slot: int, length: int) -> Any:
        stem, known = self._stem(slot)
        if known == 0:
            return [tensor[slot, :, :length].clone() for tensor in (*self.keys, *self.values)]
        first = min(known, length)
        return [
            torch.cat((tensor[stem, :, :first], tensor[slot, :, first:length]), dim=1)
            for tensor in (*self.keys, *self.values)
        ]

    def put(self, slot: int, length: int, taken: Any) -> None:
        for tensor, held in zip((*self.keys, *self.values), taken, strict=True):
            tensor[slot, :, :length] = held[:, :length]

    def release(self) -> None:
        self._slots = self.length = 0
        self.keys, self.values = [], []
        self.stem_slots = self.stem_lengths = torch.zeros(0, dtype=torch.long)

    def _stem(self, slot: int) -> tuple[int, int]:
        return int(self.stem_slots[slot]), int(self.stem_lengths[slot])

    def _hang(self, slot: int, stem: int, length: int) -> None:
        self.stem_slots[slot], self.stem_lengths[slot] = stem, length

    def _hanging_on(self, slot: int) -> list[int]:
        return ((self.stem_slots == slot) & (self.stem_lengths > 0)).nonzero().flatten().tolist()

    def _hand_over(self, slot: int) -> None:
        hanging = self._hanging_on(slot)
        if not hanging:
            return
        successor = max(hanging, key=lambda other: int(self.stem_lengths[other]))
        self._copy(slot, successor, 0, int(self.stem_lengths[successor]))
        self._hang(successor, 0, 0)
        for other in hanging:
            if other != successor:
                self.stem_slots[other] = successor

    def _copy(self, source: int, target: int, first: int, last: int) -> None:
        for tensor in (*self.keys, *self.values):
            tensor[target, :, first:last] = tensor[source, :, first:last]


def round_up(count: int, grain: int) -> int:
    """The next multiple of the grain."""
    return -(-count // grain) * grain
