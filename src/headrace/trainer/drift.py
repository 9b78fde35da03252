"""The mismatch alarm: how far the learner is from the sampler, and what of it has which cause.

A token that the current version sampled should have the same log-probability in the learner, up to rounding. A
difference there is numeric drift, or weights that did not arrive. An older token's difference is staleness: the policy
has moved. Sequences that continued under new weights with their old cache belong to neither, and are reported
separately.

Log-probabilities can be right of tokens that were drawn in another way: with noise that repeats, say. Then the surprise
of the tokens of the current version, -log p, is not their entropy on average.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress

import numpy as np

from headrace.data.sample import NO_VERSION, Sample
from headrace.tracking.metrics import MetricsAggregator


def drift_metrics(
    samples: Sequence[Sample],
    logprobs: Sequence[Sequence[float]],
    version: int,
    updated: bool = False,
    sampler: tuple[str, str] | None = None,
    entropies: Sequence[Sequence[float]] = (),
) -> MetricsAggregator:
    """Differences of sampler and learner on the trained tokens; `updated` says that this version has moved on since.

    `sampler` is the engine and the type of its weights, which rounding depends on: runs can then be compared by it.
    `entropies` are the learner's, of the same tokens as its `logprobs`, where it knows them.
    """
    metrics = MetricsAggregator()
    rows, gap_T, excess_T = _gaps(samples, logprobs, entropies or None)
    if not rows:
        return metrics
    counts = [count for _, count in rows]
    starts = np.cumsum([0, *counts[:-1]])
    size_T = np.abs(gap_T)
    # row by row, so that the metrics do not depend on how a step is cut
    mean_R = np.add.reduceat(gap_T, starts) / counts
    mean_size_R = np.add.reduceat(size_T, starts) / counts
    largest_R = np.maximum.reduceat(size_T, starts)
    oldest_R, weight_R = np.array(rows).T
    weight_R = weight_R.astype(float)
    metrics.record_each("policy/kl_to_sampler", mean_R.tolist(), weight_R.tolist())
    metrics.record_each("policy/logprob_gap_max", largest_R.tolist())
    stale_R = oldest_R < version
    metrics.record_each("drift/stale", mean_size_R[stale_R].tolist(), weight_R[stale_R].tolist())
    if not updated:
        same_R = oldest_R == version
        sizes, weights = mean_size_R[same_R].tolist(), weight_R[same_R].tolist()
        metrics.record_each("drift/same_version", sizes, weights)
        metrics.record_each("drift/same_version_max", largest_R[same_R].tolist())
        if excess_T is not None:
            excess_R = np.add.reduceat(excess_T, starts) / counts
            metrics.record_each("drift/surprise", excess_R[same_R].tolist(), weights)
        if sampler is not None:
            engine, dtype = sampler
            metrics.record_each(f"drift/of/{engine}/{dtype}", sizes, weights)
    return metrics


def _gaps(
    samples: Sequence[Sample], found: Sequence[Sequence[float]], entropies: Sequence[Sequence[float]] | None
) -> tuple[list[tuple[int, int]], np.ndarray, np.ndarray | None]:
    """Of all sampled and trained tokens: sampler minus learner, and the learner's surprise minus its entropy.

    Before them, per row with any such token, its oldest version and their count.
    """
    rows: list[tuple[int, int]] = []
    sampler: list[float] = []
    learner: list[float] = []
    expected: list[float] = []
    for sample, row, entropy in zip(samples, found, entropies or found, strict=True):
        versions = tuple(compress(sample.versions, sample.loss_mask))
        assert len(row) == len(versions), "the backend gives one log-probability per trained token"
        logprobs = tuple(compress(sample.logprobs, sample.loss_mask))
        if NO_VERSION in versions:
            is_sampled = [version != NO_VERSION for version in versions]
            logprobs, row, entropy = (tuple(compress(some, is_sampled)) for some in (logprobs, row, entropy))
        if row:
            rows.append((min(set(sample.versions) - {NO_VERSION}), len(row)))
            sampler += logprobs
            learner += row
            expected += entropy
    learner_T = np.array(learner)
    known = entropies is not None and len(expected) == len(learner)
    return rows, np.array(sampler) - learner_T, -learner_T - np.array(expected) if known else None
