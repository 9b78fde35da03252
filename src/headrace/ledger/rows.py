"""Training rows as one body per batch: whose they were, and the advantages that they were trained with."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import compress
from typing import Final

from headrace.data.sample import Sample, TrainBatch
from headrace.ledger.pack import Packer, require_sane, unpack
from headrace.ledger.records import TrainedRow

_NONE, _ONE, _EACH = range(3)  # numbers that a row has in the array of advantages: none, one for all tokens, one each
_COLUMNS = 6  # of integers
_PREFERRED: Final = (None, False, True)
_OF_PREFERRED: Final = {value: code for code, value in enumerate(_PREFERRED)}


def pack_rows(batches: Sequence[TrainBatch]) -> bytes:
    """The rows of the batches that one step is made of, column by column. Only tokens that are trained count."""
    packer, roles = Packer(), dict[str, int]()
    rows: list[tuple[int, ...]] = []
    advantages = array("d")
    for sample, preferred in _rows(batches):
        values = tuple(compress(sample.advantages, sample.loss_mask))
        role = roles.setdefault(sample.role, len(roles))
        count = _NONE if preferred is not None else _ONE if _is_one_number(values) else _EACH
        advantages.extend(values[: (0, 1, len(values))[count]])
        rows.append((sample.group_id, sample.rollout_idx, role, len(values), count, _OF_PREFERRED[preferred]))
    for column in zip(*rows, strict=True) if rows else ((),) * _COLUMNS:
        packer.integers(column)
    packer.floats(advantages)
    return packer.packed(list(roles))


def unpack_rows(body: bytes) -> tuple[TrainedRow, ...]:
    """The inverse of `pack_rows`."""
    roles, (*columns, advantages) = unpack(body)
    require_sane(sum(columns[3]))  # trained tokens, each of which gets an advantage below
    found: list[TrainedRow] = []
    place = 0
    for group_id, rollout_idx, role, tokens, count, preferred in zip(*columns, strict=True):
        end = place + (0, 1, tokens)[count]
        values = advantages[place:end]
        place = end
        own = None if count == _NONE else values * tokens if count == _ONE else values
        found.append(TrainedRow(group_id, rollout_idx, roles[role], tokens, own, _PREFERRED[preferred]))
    return tuple(found)


def _rows(batches: Sequence[TrainBatch]) -> Iterator[tuple[Sample, bool | None]]:
    """Every row and, where rows come in pairs, whether it is the preferred one: its advantages play no part."""
    for batch in batches:
        paired = len(batch.samples) == 2 * batch.sequences
        for place, sample in enumerate(batch.samples):
            yield sample, place % 2 == 0 if paired else None


def _is_one_number(values: tuple[float, ...]) -> bool:
    """Whether all are the same to the bit."""
    if not values or values.count(values[0]) < len(values):
        return False
    if values[0] != 0:
        return True
    found = array("d", values).tobytes()  # 0.0 and -0.0 are equal, but not the same
    return found == found[:8] * len(values)
