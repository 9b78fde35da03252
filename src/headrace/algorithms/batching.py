"""Packing: groups become a TrainBatch, cut into micro-batches, with the normaliser of the loss."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from headrace.config import AlgorithmSection
from headrace.data.episode import TrajectoryGroup
from headrace.data.packing import cut_by_tokens
from headrace.data.sample import Sample, TrainBatch, merge_steps


def to_samples(groups: Sequence[TrajectoryGroup]) -> list[Sample]:
    """Training rows of all trajectories, leaving out rows with nothing to train."""
    rows = [
        sample
        for group in groups
        for trajectory in group.trajectories
        for sample in merge_steps(trajectory, task_id=group.task_id, group_id=group.group_id)
    ]
    return [row for row in rows if row.trained_tokens]


def pack(
    samples: Sequence[Sample], algorithm: AlgorithmSection, micro_batch_tokens: int, together: int = 1,
    groups_apart: bool = False,
) -> TrainBatch:  # fmt: skip
    """Rows with their weights, in micro-batches. `together` rows (2 for preference pairs) count as one sequence.

    With `groups_apart` no micro-batch holds rows of two groups. Then a step computes the same bits whether its groups
    came all at once or one by one.
    """
    per_row = algorithm.aggregation == "sequence_mean_token_mean"
    weights = tuple(1.0 / max(sample.trained_tokens, 1) if per_row else 1.0 for sample in samples)
    cuts: list[tuple[int, ...]] = []
    for _, run in groupby(range(len(samples)), lambda i: samples[i].group_id if groups_apart else 0):
        rows = list(run)
        tokens = [samples[i].tokens for i in rows]
        cuts += [tuple(rows[i] for i in cut) for cut in cut_by_tokens(tokens, micro_batch_tokens, together)]
    return TrainBatch(tuple(samples), weights, tuple(cuts), len(samples) // together)


def split(batch: TrainBatch, algorithm: AlgorithmSection, micro_batch_tokens: int, shares: int) -> list[TrainBatch]:
    """The batch in equal shares, each with rows of all groups; rows that belong together stay together."""
    together = len(batch.samples) // batch.sequences
    chosen = [[batch.samples[row] for row in rows] for rows in rows_of_shares(batch, shares)]
    return [pack(rows, algorithm, micro_batch_tokens, together) for rows in chosen]


def rows_of_shares(batch: TrainBatch, shares: int) -> list[list[int]]:
    """Which of the batch's rows each of its shares has; none is empty."""
    together = len(batch.samples) // batch.sequences
    units = [range(start, start + together) for start in range(0, len(batch.samples), together)]
    chosen = [[row for unit in units[share::shares] for row in unit] for share in range(shares)]
    return [rows for rows in chosen if rows]


def grad_scale(batches: Sequence[TrainBatch], algorithm: AlgorithmSection) -> float:
    """The factor of the summed gradient of a complete optimizer step.

    It counts over the step, not per micro-batch, or short micro-batches would be upweighted.
    """
    # what a correction rejects is single rows: no preference pairs, of which two make a sequence
    sequences = sum(batch.sequences - len(batch.rejected) for batch in batches)
    tokens = sum(s.trained_tokens for batch in batches for i, s in enumerate(batch.samples) if i not in batch.rejected)
    match algorithm.aggregation:
        case "token_mean":
            return 1.0 / max(tokens, 1)
        case "sequence_mean_token_mean" | "sequence_mean_token_sum":
            return 1.0 / max(sequences, 1)
        case "constant":
            return 1.0 / (max(sequences, 1) * algorithm.aggregation_length)
        case "token_sum":
            return 1.0
