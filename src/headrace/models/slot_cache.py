"""Keys and values of sequences decoded together through a transformers model: one preallocated slot each.

The model's attention layers call `update`, and the functions that make its masks call `get_query_offset` and
`get_mask_sizes`. What they get depends on the `Step` under way: which slots the batch's rows are in, and from which
positions on.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

LENGTH_GRAIN, _SLOT_GRAIN = 64, 16


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """One token for each slot from `slots.start` on, at positions `first_R`; `length` positions are seen or masked."""

    slots: slice
    rows_R: Tensor
    first_R: Tensor
    length: int

    @property
    def past(self) -> int:
        """Positions that were there before."""
        return self.length - 1

    def update(self, keys: Tensor, values: Tensor, k_RHLd: Tensor, v_RHLd: Tensor) -> tuple[Tensor, Tensor]:
        """Write new keys and values into a layer's slots; what the rows attend to."""
        keys, values = keys[self.slots], values[self.slots]
        keys[self.rows_R, :, self.first_R] = k_RHLd[:, :, 0]
        values[self.rows_R, :, self.first_R] = v_RHLd[:, :, 0]
        return keys[:, :, : self.length], values[:, :, : self.length]


@dataclass(frozen=True, slots=True)
class PrefillStep:
    """Right-padded rows. Token t is at (`row_T`, `column_T`) of the batch and goes to (`slot_T`, `position_T`)."""

    row_T: Tensor
    column_T: Tensor
    slot_T: Tensor
    position_T: Tensor
    first_R: Tensor
    length: int
    past: int
    slots_R: Tensor | None
    """Slots that the rows continue; None: the rows see themselves alone."""

    def update(self, keys: Tensor, values: Tensor, k_RHLd: Tensor, v_RHLd: Tensor) -> tuple[Tensor, Tensor]:
        keys[self.slot_T, :, self.position_T] = k_RHLd[self.row_T, :, self.column_T]
        values[self.slot_T, :, self.position_T] = v_RHLd[self.row_T, :, self.column_T]
        if self.slots_R is None:
            return k_RHLd, v_RHLd
        seen = slice(self.length)
        return keys[:, :, seen].index_select(0, self.slots_R), values[:, :, seen].index_select(0, self.slots_R)


Step = DecodeStep | PrefillStep


class SlotKeyValues(Cache):
    """Per layer: keys and values [slots, heads, length, dim]; grows, never shrinks until released.

    Layers with a window keep all positions, too: their masks hide the older ones.
    """

    def __init__(self, static: bool = False) -> None:
        super().__init__(layers=[])
        self.step: Step | None = None
        self.slots = self.length = 0
        self._static = static
        self.tensors: list[tuple[Tensor, Tensor]] = []
        """By layer, made when the layer first has something to keep: only then is its shape known."""

    # ---- for the engine ---------------------------------------------------------------------------------------------

    def ensure(self, slots: int, length: int) -> None:
        """Make room for `slots` sequences of `length` tokens, keeping what is there."""
        if slots <= self.slots and length <= self.length:
            return
        if slots > self.slots:
            self.slots = round_up(slots, _SLOT_GRAIN)
        if length > self.length:  # by half at least, or long sequences would copy the cache over and over
            self.length = round_up(max(length, self.length * 3 // 2), LENGTH_GRAIN)
        self.tensors = [(self._grown(keys), self._grown(values)) for keys, values in self.tensors]

    def share(self, source: int, target: int, length: int) -> None:
        for tensor in self._all():
            tensor[target, :, :length] = tensor[source, :, :length]

    def free(self, slots: Collection[int]) -> None:
        pass  # what is left in them is masked until it is overwritten

    def move(self, source: int, target: int, length: int) -> None:
        self.share(source, target, length)

    def take(self, slot: int, length: int) -> list[Tensor]:
        return [tensor[slot, :, :length].clone() for tensor in self._all()]

    def put(self, slot: int, length: int, taken: Sequence[Tensor]) -> None:
        for tensor, held in zip(self._all(), taken, strict=True):
            tensor[slot, :, :length] = held[:, :length]

    def release(self) -> None:
        self.slots = self.length = 0
        self.tensors = []

    def _all(self) -> list[Tensor]:
        return [tensor for pair in self.tensors for tensor in pair]

    def _grown(self, old: Tensor) -> Tensor:
        grown = self._new(old)
        grown[: old.shape[0], :, : old.shape[2]] = old
        return grown

    def _new(self, like: Tensor) -> Tensor:
        # zeros: what was never written is masked, and 0 * NaN would be NaN
        made = like.new_zeros((self.slots, like.shape[1], self.length, like.shape[3]))
        if self._static:
            torch._dynamo.mark_static_address(made)  # what a recorded graph writes to must stay where it is
        return made

    # ---- for the model ----------------------------------------------------------------------------------------------

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        assert self.step is not None, "a forward has a step"
        while len(self.tensors) <= layer_idx:
            self.tensors.append((self._new(key_states), self._new(value_states)))
        return self.step.update(*self.tensors[layer_idx], key_states, value_states)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0 if self.step is None else self.step.past

    def get_query_offset(self, layer_idx: int = 0) -> Any:
        assert self.step is not None, "a forward has a step"
        return self.step.first_R

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        assert self.step is not None, "a forward has a step"
        return self.step.length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return self.length

    @property
    def is_sliding(self) -> list[bool]:
        return []


def round_up(count: int, grain: int) -> int:
    """The next multiple of the grain."""
    return -(-count // grain) * grain
