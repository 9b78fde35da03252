"""What the learner computed of a batch's trained tokens, as one body per update."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain, pairwise
from typing import Any, Final

import numpy as np

from headrace.data.sample import ClipState, TrainBatch
from headrace.ledger.pack import DamagedRecordError, Packer, expand, require_sane, unpack
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
    packer.numbers(_floats(_joined(values.logprobs for values in learned)))
    present = []
    if all(len(values.entropies) == len(values.logprobs) for values in learned):
        present.append(_ENTROPIES)
        packer.numbers(_halves(_joined(values.entropies for values in learned)))
    if all(len(values.clip_states) == len(values.logprobs) for values in learned):
        present.append(_CLIP)
        packer.integers(_runs(_joined(values.clip_states for values in learned)))
    return packer.packed(present, plain=True)


def _joined(rows: Iterable[Sequence[Sequence[float]]]) -> np.ndarray:
    """All values of all rows: there are many, and one by one they would take longer than writing them."""
    return np.fromiter(chain.from_iterable(chain.from_iterable(rows)), np.float64)


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
    values = np.frombuffer(bytes(mask), np.uint8)
    lengths = np.diff(_bounds(values)).tolist()
    return [0, *lengths] if values[0] else lengths


def _from_mask_runs(lengths: Sequence[int]) -> tuple[int, ...]:
    return tuple(number % 2 for number, count in enumerate(lengths) for _ in range(count))


def _runs(values: np.ndarray) -> tuple[int, ...]:
    """As `runs` of many values."""
    if not len(values):
        return ()
    bounds = _bounds(values)
    pairs = np.stack([np.diff(bounds), values[bounds[:-1]].astype(np.int64)], 1)
    return tuple(pairs.ravel().tolist())


def _bounds(values: np.ndarray) -> np.ndarray:
    """Where runs of the same value begin, and the end."""
    return np.concatenate([[0], np.flatnonzero(np.diff(values)) + 1, [len(values)]])


def _floats(values: np.ndarray) -> array[float]:
    """In single precision if that is exact."""
    with np.errstate(over="ignore"):
        single = values.astype(np.float32)
    if np.array_equal(single.astype(np.float64), values, equal_nan=True):
        return array("f", single.tobytes())
    return array("d", values.tobytes())


def _halves(values: np.ndarray) -> array[int]:
    """The bits of half-precision numbers; what is too large for one is its largest."""
    largest = np.finfo(np.float16).max
    return array("H", values.clip(-largest, largest).astype(np.float16).tobytes())


def _from_halves(bits: Sequence[int]) -> tuple[float, ...]:
    return tuple(np.array(bits, np.uint16).view(np.float16).astype(np.float64).tolist())
