"""What the learner computed of a batch's trained tokens, as one body per update."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby, pairwise
from typing import Any, Final

from headrace.data.sample import ClipState, TrainBatch
from headrace.ledger.pack import DamagedRecordError, Packer, expand, require_sane, runs, unpack
from headrace.ledger.records import LearnerRow

_ENTROPIES: Final = "entropies"
_CLIP: Final = "clip_states"


def pack_tokens(batches: Sequence[TrainBatch], places: Sequence[int] | None = None) -> bytes:
    """The learner's values of all rows of the batches. `places` are those of the rows in `pack_rows`: all, in order.

    Log-probabilities are to the bit, in single precision where that is exact. Entropies are in half precision: they
    are there to be looked at. Masks and clip states are run lengths.
    """
    packer = Packer()
    samples = [sample for batch in batches for sample in batch.samples]
    learned = [batch.learned for batch in batches if batch.learned is not None]
    assert len(learned) == len(batches), "a batch is recorded with what was learned of it only after forward_backward"
    packer.integers(range(len(samples)) if places is None else places)
    masks = [_mask_runs(sample.loss_mask) for sample in samples]
    packer.integers([len(mask) for mask in masks])
    packer.integers([length for mask in masks for length in mask])
    packer.floats([value for values in learned for row in values.logprobs for value in row])
    present = []
    if all(len(values.entropies) == len(values.logprobs) for values in learned):
        present.append(_ENTROPIES)
        packer.integers(_halves([value for values in learned for row in values.entropies for value in row]))
    if all(len(values.clip_states) == len(values.logprobs) for values in learned):
        present.append(_CLIP)
        packer.integers(runs([state for values in learned for row in values.clip_states for state in row]))
    return packer.packed(present, plain=True)


def unpack_tokens(body: bytes) -> Iterator[tuple[int, LearnerRow]]:
    """The inverse of `pack_tokens`: each row, with its place."""
    present, (places, sizes, lengths, logprobs, *more) = unpack(body)
    optional: dict[str, Sequence[Any]] = dict(zip(present, more, strict=True))
    entropies = _from_halves(optional[_ENTROPIES]) if _ENTROPIES in optional else None
    states = expand(optional[_CLIP]) if _CLIP in optional else None
    require_sane(sum(lengths))
    place = 0
    bounds = pairwise(accumulate(sizes, initial=0))
    for row, (start, end) in zip(places, bounds, strict=True):
        mask = _from_mask_runs(lengths[start:end])
        span = slice(place, place + sum(mask))
        place = span.stop
        own = None if states is None else tuple(ClipState(state) for state in states[span])
        yield row, LearnerRow(mask, logprobs[span], None if entropies is None else entropies[span], own)
    if place != len(logprobs):
        raise DamagedRecordError(f"it has {len(logprobs)} log-probabilities for {place} trained tokens")


def _mask_runs(mask: Sequence[int]) -> list[int]:
    """How many targets in turn are not trained and trained, beginning with those that are not."""
    found = [sum(1 for _ in same) for _, same in groupby(mask)]
    return [0, *found] if mask and mask[0] else found


def _from_mask_runs(lengths: Sequence[int]) -> tuple[int, ...]:
    return tuple(number % 2 for number, count in enumerate(lengths) for _ in range(count))


def _halves(values: Sequence[float]) -> array[int]:
    """The bits of half-precision numbers; what is too large for one is its largest."""
    limited = [min(max(value, -65504.0), 65504.0) if value == value else value for value in values]
    return array("H", struct.pack(f"={len(limited)}e", *limited))


def _from_halves(bits: Sequence[int]) -> tuple[float, ...]:
    return struct.unpack(f"={len(bits)}e", array("H", bits).tobytes())
