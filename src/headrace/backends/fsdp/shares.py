"""How a batch is spread over ranks: balanced by cost, packed by token budget, with equally many passes for all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from headrace.backends.base import Trained
from headrace.data.packing import cut_by_tokens
from headrace.data.sample import TrainBatch
from headrace.tracking.metrics import MetricsAggregator

_EVEN = 4096
"""Length of a row at which attention, whose cost grows with the square, costs as much as all the rest."""


@dataclass(frozen=True, slots=True)
class Share:
    """One rank's part of a batch. `rows` are its samples' indices in the whole.

    All ranks have equally many micro-batches, because a collective waits for all: some are empty. `valued` says of each
    whether any rank has returns for the value head in it: then all ranks run it.
    """

    batch: TrainBatch
    rows: tuple[int, ...]
    valued: tuple[bool, ...]


def shares_of(batch: TrainBatch, ranks: int, budget: int, groups_apart: bool = False) -> list[Share]:
    """The batch in one share per rank. Rows that make a sequence together (preference pairs) stay together.

    With `groups_apart` every group is spread by itself. Then a step computes the same bits whether its groups came all
    at once or one by one.
    """
    together = max(1, len(batch.samples) // max(batch.sequences, 1))
    chosen: list[list[int]] = [[] for _ in range(ranks)]
    cuts: list[list[tuple[int, ...]]] = [[] for _ in range(ranks)]
    for _, run in groupby(range(len(batch.samples)), lambda row: batch.samples[row].group_id if groups_apart else 0):
        spread = spread_rows(batch, list(run), ranks, together)
        found = [_cut(batch, rows, budget, together) for rows in spread]
        passes = max(map(len, found))
        for rank, rows in enumerate(spread):
            chosen[rank] += rows
            cuts[rank] += [*found[rank], *([()] * (passes - len(found[rank])))]
    return _joined(batch, chosen, cuts, together)


def spread_rows(batch: TrainBatch, rows: Sequence[int], ranks: int, together: int) -> list[list[int]]:
    """Rows by rank: the costliest first, each to the rank that has the least to do; then in their order."""
    lengths = {row: len(batch.samples[row].tokens) for row in rows}
    units = [rows[start : start + together] for start in range(0, len(rows), together)]
    loads = [0] * ranks
    chosen: list[list[int]] = [[] for _ in range(ranks)]
    for unit in sorted(units, key=lambda unit: (-_cost(unit, lengths), unit[0])):
        least = loads.index(min(loads))
        loads[least] += _cost(unit, lengths)
        chosen[least] += unit
    return [sorted(some) for some in chosen]


def gather_rows(shares: Sequence[Share], found: Sequence[Sequence[Any]], total: int) -> list[Any]:
    """What the ranks found for their rows, in the order of the whole batch."""
    rows: list[Any] = [None] * total
    for share, values in zip(shares, found, strict=True):
        for row, value in zip(share.rows, values, strict=True):
            rows[row] = value
    return rows


def merge_trained(shares: Sequence[Share], found: Sequence[Trained], total: int) -> Trained:
    """What one rank would have found."""
    metrics = MetricsAggregator()
    for one in found:
        metrics.merge(one.metrics)
    rejected = {share.rows[i] for share, one in zip(shares, found, strict=True) for i in one.rejected}
    entropies = [one.entropies for one in found]
    known = all(one or not share.rows for one, share in zip(entropies, shares, strict=True))
    return Trained(
        metrics,
        tuple(gather_rows(shares, [one.logprobs for one in found], total)),
        frozenset(rejected),
        tuple(gather_rows(shares, entropies, total)) if known else (),
        tuple(gather_rows(shares, [one.clip_states for one in found], total)),
    )


def _cost(rows: Sequence[int], lengths: Mapping[int, int]) -> int:
    return sum(lengths[row] * (_EVEN + lengths[row]) for row in rows)


def _cut(batch: TrainBatch, rows: Sequence[int], budget: int, together: int) -> list[tuple[int, ...]]:
    """Micro-batches of rows, by their indices in the whole."""
    cuts = cut_by_tokens([batch.samples[row].tokens for row in rows], budget, together) if rows else ()
    return [tuple(rows[place] for place in cut) for cut in cuts]


def _joined(
    batch: TrainBatch, chosen: Sequence[Sequence[int]], cuts: Sequence[Sequence[tuple[int, ...]]], together: int
) -> list[Share]:
    valued = tuple(
        any(batch.samples[row].returns is not None for cut in cuts_now for row in cut)
        for cuts_now in zip(*cuts, strict=True)
    )
    shares = []
    for rows, own in zip(chosen, cuts, strict=True):
        place = {row: number for number, row in enumerate(rows)}
        samples = tuple(batch.samples[row] for row in rows)
        weights = tuple(batch.weights[row] for row in rows)
        micro_batches = tuple(tuple(place[row] for row in cut) for cut in own)
        part = TrainBatch(samples, weights, micro_batches, len(samples) // together)
        shares.append(Share(part, tuple(rows), valued))
    return shares
