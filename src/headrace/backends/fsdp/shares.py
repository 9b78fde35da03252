"""How a batch is spread over ranks: balanced by cost, packed by token budget, with equally many passes for all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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

    Ranks that have fewer micro-batches than `passes` run empty ones: a collective waits for all. `valued` says of each
    pass whether any rank has returns for the value head in it: then all ranks run it.
    """

    batch: TrainBatch
    rows: tuple[int, ...]
    passes: int
    valued: tuple[bool, ...]


def shares_of(batch: TrainBatch, ranks: int, budget: int) -> list[Share]:
    """The batch in one share per rank. Rows that make a sequence together (preference pairs) stay together."""
    together = max(1, len(batch.samples) // max(batch.sequences, 1))
    parts = [_part(batch, rows, budget, together) for rows in spread_rows(batch, ranks, together)]
    passes = max(len(part.micro_batches) for part, _ in parts)
    valued = tuple(any(_has_returns(part, number) for part, _ in parts) for number in range(passes))
    return [Share(part, rows, passes, valued) for part, rows in parts]


def spread_rows(batch: TrainBatch, ranks: int, together: int) -> list[tuple[int, ...]]:
    """Indices of rows by rank: the costliest first, each to the rank that has the least to do; then in their order."""
    lengths = [len(sample.tokens) for sample in batch.samples]
    units = [range(start, min(start + together, len(lengths))) for start in range(0, len(lengths), together)]
    loads = [0] * ranks
    chosen: list[list[int]] = [[] for _ in range(ranks)]
    for unit in sorted(units, key=lambda unit: (-_cost(unit, lengths), unit.start)):
        least = loads.index(min(loads))
        loads[least] += _cost(unit, lengths)
        chosen[least] += unit
    return [tuple(sorted(rows)) for rows in chosen]


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


def _cost(rows: Sequence[int], lengths: Sequence[int]) -> int:
    return sum(lengths[row] * (_EVEN + lengths[row]) for row in rows)


def _part(batch: TrainBatch, rows: tuple[int, ...], budget: int, together: int) -> tuple[TrainBatch, tuple[int, ...]]:
    samples = tuple(batch.samples[row] for row in rows)
    cuts = cut_by_tokens([sample.tokens for sample in samples], budget, together) if rows else ()
    weights = tuple(batch.weights[row] for row in rows)
    return TrainBatch(samples, weights, cuts, len(samples) // together), rows


def _has_returns(batch: TrainBatch, number: int) -> bool:
    cuts = batch.micro_batches[number : number + 1]
    return any(batch.samples[row].returns is not None for cut in cuts for row in cut)
