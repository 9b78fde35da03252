"""Decoding many sequences in one forward of a transformers model, each in a slot of a preallocated cache."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from headrace.models.packed import PackedRows
from headrace.models.parts import Parts
from headrace.models.row_attention import needs_own_attention
from headrace.models.sequential_decoding import SequentialDecoder
from headrace.models.slot_attention import use_slot_attention
from headrace.models.slot_cache import LENGTH_GRAIN, DecodeStep, PrefillStep, SlotKeyValues
from headrace.models.transfer import upload

_log = logging.getLogger("headrace")
_FEWEST, _MOST_PROGRAMS = 8, 64
_FILLED = 0.6  # a row shorter than this share of its batch's longest goes into the next batch


class BatchedDecoder:
    """Prefills rows in batches, and decodes all slots at once.

    `one_by_one`: each slot in a forward of its own, whose shape depends on the slot alone. A sequence is then
    independent, to the bit, of what else is decoded.
    """

    continues_prefixes = True

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self.one_by_one = False
        self._compiled: Callable[..., Tensor] | None = None
        use_slot_attention(parts.whole)

    def new_cache(self) -> SlotKeyValues:
        return SlotKeyValues(static=self.compiled)

    @property
    def compiled(self) -> bool:
        return self._compiled is not None

    def compile(self) -> None:
        """Compile the decoding step, for batches and lengths in powers of two; on CUDA it is recorded as a graph."""
        # each batch and length is a program of its own, and of these there are more than torch expects
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _MOST_PROGRAMS)
        mode = "reduce-overhead" if self._parts.device.type == "cuda" else None
        self._compiled = torch.compile(self._forward, dynamic=False, mode=mode)

    def prefill(
        self, cache: SlotKeyValues, rows: PackedRows, slots: Sequence[int], begin: Sequence[int] | None
    ) -> None:
        """Rows of similar length together. They are on the host, as what is made of them is until it is complete."""
        ids = np.split(rows.ids_N.numpy()[rows.where_T.numpy()], np.cumsum(rows.lengths)[:-1])
        firsts = begin or [0] * len(slots)
        batches: list[list[int]] = []
        for row in sorted(range(len(slots)), key=lambda row: (bool(firsts[row]), -rows.lengths[row])):
            longest = batches[-1][0] if batches else row
            same_kind = bool(firsts[row]) == bool(firsts[longest])
            if self.one_by_one or not batches or not same_kind or rows.lengths[row] < _FILLED * rows.lengths[longest]:
                batches.append([])
            batches[-1].append(row)
        for batch in batches:
            self._prefill(cache, [(ids[row], slots[row], firsts[row]) for row in batch])

    def _prefill(self, cache: SlotKeyValues, rows: Sequence[tuple[np.ndarray, int, int]]) -> None:
        lengths = np.array([len(ids) for ids, _, _ in rows])
        slots, begin = np.array([slot for _, slot, _ in rows]), np.array([first for _, _, first in rows])
        longest, seen = int(lengths.max()), int((begin + lengths).max())
        columns = np.arange(longest)
        row_of, column_of = np.nonzero(columns < lengths[:, None])
        padded = np.zeros((len(rows), longest), dtype=np.int64)
        padded[row_of, column_of] = np.concatenate([ids for ids, _, _ in rows])
        # padding repeats the last position: the one after it may be beyond what the model knows
        at = begin[:, None] + np.minimum(columns, lengths[:, None] - 1)
        written = (row_of, column_of, slots[row_of], at[row_of, column_of])
        ids_RL, at_RL, slots_R, begin_R, row_T, column_T, slot_T, position_T = upload(
            [padded, at, slots, begin, *written], self._parts.device
        )
        cache.step = PrefillStep(
            row_T, column_T, slot_T, position_T, begin_R, seen, seen - longest, slots_R if begin.any() else None
        )
        self._parts.run(ids_RL, last_only=True, position_ids=at_RL, past_key_values=cache, use_cache=True)

    def decode(self, cache: SlotKeyValues, ids_B: Tensor, lengths: Sequence[int]) -> Tensor:
        if self._compiled is not None and not self.one_by_one and cache.tensors:  # which the first step of all makes
            return self._decode_compiled(self._compiled, cache, ids_B, lengths)
        ids_B, lengths_B = upload([ids_B.numpy(), np.array(lengths)], self._parts.device)
        if not self.one_by_one:
            return self._decode(cache, 0, ids_B, lengths_B, max(lengths) + 1)
        each = enumerate(zip(ids_B.split(1), lengths_B.split(1), lengths, strict=True))
        return torch.cat([self._decode(cache, slot, id_1, at_1, length + 1) for slot, (id_1, at_1, length) in each])

    def _decode(self, cache: SlotKeyValues, first: int, ids_B: Tensor, lengths_B: Tensor, length: int) -> Tensor:
        rows_B = torch.arange(len(ids_B), device=ids_B.device)
        cache.step = DecodeStep(slice(first, first + len(ids_B)), rows_B, lengths_B, length)
        return self._forward(ids_B, lengths_B, cache)

    def _decode_compiled(
        self, compiled: Callable[..., Tensor], cache: SlotKeyValues, ids_B: Tensor, lengths: Sequence[int]
    ) -> Tensor:
        """Slots that are not in use fill the batch up: they write to their first position, which nobody reads."""
        count, most = len(lengths), _power(len(lengths), _FEWEST)
        cache.ensure(most, _power(max(lengths) + 1, LENGTH_GRAIN))
        ids, at = np.zeros((2, most), dtype=np.int64)
        ids[:count], at[:count] = ids_B.numpy(), lengths
        ids_P, at_P, rows_P = upload([ids, at, np.arange(most)], self._parts.device)
        cache.step = DecodeStep(slice(0, most), rows_P, at_P, _power(max(lengths) + 1, LENGTH_GRAIN))
        states_PD = compiled(ids_P, at_P, cache)
        return states_PD[:count].clone()  # the next step of a recorded graph writes to the same memory

    def _forward(self, ids_B: Tensor, at_B: Tensor, cache: SlotKeyValues) -> Tensor:
        states_B1D, _ = self._parts.run(
            ids_B[:, None], position_ids=at_B[:, None], past_key_values=cache, use_cache=True
        )
        return states_B1D[:, -1]

    def logits(self, states_BD: Tensor) -> Tensor:
        if not self.one_by_one:
            return self._parts.logits(states_BD)
        return torch.cat([self._parts.logits(row) for row in states_BD.split(1)])


def _power(count: int, least: int) -> int:
    """The next power of two, times the least."""
    return least * 2 ** max(0, -(-count // least) - 1).bit_length()


@torch.no_grad()
def why_not_batched(parts: Parts) -> str | None:
    """Why the model's sequences cannot be decoded together; None if they can."""
    _, cache = parts.run(torch.zeros((1, 1), dtype=torch.long, device=parts.device), use_cache=True)
    if not isinstance(cache, DynamicCache):
        return "it has no key/value cache"
    kinds = {type(layer) for layer in cache.layers} - {DynamicLayer, DynamicSlidingWindowLayer}
    if kinds:
        return f"it keeps other states than keys and values ({kinds.pop().__name__})"
    return None if parts.whole._supports_attention_backend else "its attention takes no other implementation"


_REMEMBERED = "_headrace_decodes_together"
_PROBE = (6, 3, 1)  # lengths of the rows that are decoded together at the start, to see that it is right
_FAR = {torch.bfloat16: 0.5, torch.float16: 0.1}  # in standard deviations of the logits; else 1e-2


def choose_decoder(parts: Parts) -> BatchedDecoder | SequentialDecoder:
    """All slots in one forward, where that gives the same logits as one row after the other. A few tokens try it.

    Copies of a model are decoded as it is: they remember what was found.
    """
    if not hasattr(parts.whole, _REMEMBERED):
        why = why_not_batched(parts) or _why_wrong(parts)
        if why:
            _log.warning("%s is decoded one sequence at a time: %s", type(parts.whole).__name__, why)
        setattr(parts.whole, _REMEMBERED, not why)
    return BatchedDecoder(parts) if getattr(parts.whole, _REMEMBERED) else SequentialDecoder(parts)


def remember_decoder(source: Parts, target: Parts) -> None:
    """Let modules of the same model be decoded in the same way."""
    setattr(target.whole, _REMEMBERED, getattr(source.whole, _REMEMBERED))


def _why_wrong(parts: Parts) -> str | None:
    rows = [[(7 * i + 3 * length) % parts.config.vocab_size for i in range(length)] for length in _PROBE]
    plain = parts.whole.config._attn_implementation
    if needs_own_attention(parts.whole):
        parts.whole.config._attn_implementation = "eager"  # torch's would leave a cap out
    want_BV = _each(parts, rows)
    got_BV = _together(BatchedDecoder(parts), parts, rows)
    parts.whole.config._attn_implementation = plain
    far = float(((got_BV - want_BV).abs().amax(-1) / want_BV.std(-1)).max())
    # what is not a number is so in either way
    return f"together, logits were off by {far:.2g} of their deviation" if far > _FAR.get(parts.dtype, 1e-2) else None


@torch.no_grad()
def _each(parts: Parts, rows: Sequence[Sequence[int]]) -> Tensor:
    """Logits after each row, from a forward over the row."""
    states = [parts.run(torch.tensor([row], device=parts.device), use_cache=False)[0][:, -1] for row in rows]
    return parts.logits(torch.cat(states)).float()


@torch.no_grad()
def _together(decoder: BatchedDecoder, parts: Parts, rows: Sequence[Sequence[int]]) -> Tensor:
    """The same, with the rows in slots, all but their last tokens prefilled."""
    cache = decoder.new_cache()
    cache.ensure(len(rows), max(map(len, rows)))
    begun = [row[:-1] for row in rows if len(row) > 1]
    decoder.prefill(cache, PackedRows.from_rows(begun), range(len(begun)), None)
    ids_B = torch.tensor([row[-1] for row in rows], device="cpu")
    return decoder.logits(decoder.decode(cache, ids_B, [len(row) - 1 for row in rows])).float()
