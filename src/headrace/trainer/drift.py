"""The mismatch alarm: how far the learner is from the sampler, and what of it has which cause.

A token that the current version sampled should have the same log-probability in the learner, up to rounding. A
difference there is numeric drift, or weights that did not arrive. An older token's difference is staleness: the policy
has moved. Sequences that continued under new weights with their old cache belong to neither, and are reported
separately.
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
) -> MetricsAggregator:
    """Differences of sampler and learner on the trained tokens; `updated` says that this version has moved on since.

    `sampler` is the engine and the type of its weights, which rounding depends on: runs can then be compared by it.
    """
    metrics = MetricsAggregator()
    rows, gap_T = _gaps(samples, logprobs)
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
        if sampler is not None:
            engine, dtype = sampler
            metrics.record_each(f"drift/of/{engine}/{dtype}", sizes, weights)
    return metrics


def _gaps(samples: Sequence[Sample], found: Sequence[Sequence[float]]) -> tuple[list[tuple[int, int]], np.ndarray]:
    """Sampler minus learner on all sampled and trained tokens; per row with any, its oldest version and their count."""
    rows: list[tuple[int, int]] = []
    sampler: list[float] = []
    learner: list[float] = []
    for sample, row in zip(samples, found, strict=True):
        versions = tuple(compress(sample.versions, sample.loss_mask))
        assert len(row) == len(versions), "the backend gives one log-probability per trained token"
        logprobs = tuple(compress(sample.logprobs, sample.loss_mask))
        if NO_VERSION in versions:
            is_sampled = [version != NO_VERSION for version in versions]
            logprobs, row = tuple(compress(logprobs, is_sampled)), tuple(compress(row, is_sampled))
        if row:
            rows.append((min(set(sample.versions) - {NO_VERSION}), len(row)))
            sampler += logprobs
            learner += row
    return rows, np.array(sampler) - np.array(learner)
