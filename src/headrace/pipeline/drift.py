"""The mismatch alarm: how far the learner is from the sampler, and what of it has which cause.

A token that the current version sampled should have the same log-probability in the learner, up to rounding. A
difference there is numeric drift, or weights that did not arrive. An older token's difference is staleness: the policy
has moved. Sequences that went on under new weights with their old cache belong to neither, and are told apart.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headrace.data.sample import NO_VERSION, Sample
from headrace.metrics import MetricsAggregator, Reducer


def drift_metrics(
    samples: Sequence[Sample], logprobs: Sequence[Sequence[float]], version: int, updated: bool = False
) -> MetricsAggregator:
    """Differences of sampler and learner on the trained tokens; `updated` says that this version has moved on since."""
    metrics = MetricsAggregator()
    for sample, row in zip(samples, logprobs, strict=True):
        kept = [(lp, v) for lp, v, m in zip(sample.logprobs, sample.versions, sample.loss_mask, strict=True) if m]
        sampled = np.array([v != NO_VERSION for _, v in kept], dtype=bool)
        if not sampled.any():
            continue
        gap_S = np.array([lp for lp, _ in kept])[sampled] - np.asarray(row)[sampled]
        _record(metrics, "policy/kl_to_sampler", gap_S)
        metrics.record("policy/logprob_gap_max", float(np.abs(gap_S).max()), Reducer.MAX)
        oldest = min(v for v in sample.versions if v != NO_VERSION)
        if oldest == version and not updated:
            _record(metrics, "drift/same_version", np.abs(gap_S))
            metrics.record("drift/same_version_max", float(np.abs(gap_S).max()), Reducer.MAX)
        elif oldest < version:
            _record(metrics, "drift/stale", np.abs(gap_S))
    return metrics


def _record(metrics: MetricsAggregator, key: str, values: np.ndarray) -> None:
    metrics.record(key, float(values.mean()), Reducer.WEIGHTED_MEAN, weight=len(values))
