"""Staleness policies: how work older than `max_staleness` is handled.

Pure logic, like the coordinator that uses them: no clock, no I/O. A policy can act at four points:

- admission: whether overdue running groups free their slot for a new group (`excuses_overdue`);
- before a step: whether the learner waits for groups that would become too old (`waits_for_due`);
- when groups are taken: whether a complete group is dropped (`is_stale`);
- on the rows of a step: which tokens are masked (`to_measure`, `limit`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import compress
from typing import Any

import numpy as np

from headrace.data.sample import NO_VERSION, Sample
from headrace.tracking.metrics import MetricsAggregator

_WINDOW = 1024
_FEWEST = 32
_QUANTILE = 0.99


def oldest_version(sample: Sample) -> int | None:
    """The version of the oldest trained token; None if no policy sampled any."""
    return min(set(compress(sample.versions, sample.loss_mask)) - {NO_VERSION}, default=None)


class StalenessPolicy:
    """`count`: only admission bounds how far generation runs ahead; slow groups may exceed the bound."""

    excuses_overdue = False
    waits_for_due = False

    def __init__(self, max_staleness: int) -> None:
        self.max_staleness = max_staleness

    def is_stale(self, age: int) -> bool:
        """Whether to drop a complete group whose oldest token is `age` versions old."""
        return False

    def to_measure(self, samples: Sequence[Sample], version: int) -> list[int]:
        """Rows whose log-probabilities under the current policy `limit` needs."""
        return []

    def limit(
        self,
        samples: Sequence[Sample],
        version: int,
        measured: Mapping[int, Sequence[float]],
        metrics: MetricsAggregator,
    ) -> list[Sample]:
        """The rows to train at `version`, with masks; `measured` has log-probabilities by row."""
        return list(samples)

    def observe(self, samples: Sequence[Sample], logprobs: Sequence[Sequence[float]], version: int) -> None:
        """Receive the log-probabilities that training computed; one number per trained token of each row."""

    def state(self) -> Any:
        """Its state as JSON, for a checkpoint."""

    def restore(self, state: Any) -> None:
        """Restore what `state` returned."""

    def _is_overage(self, sample: Sample, version: int) -> bool:
        oldest = oldest_version(sample)
        return oldest is not None and version - oldest > self.max_staleness


Count = StalenessPolicy


class Drop(StalenessPolicy):
    """`drop`: a group older than the bound is dropped, and another task takes its slot."""

    def is_stale(self, age: int) -> bool:
        return age > self.max_staleness


class Wait(StalenessPolicy):
    """`wait`: a step waits for every group that would be too old for the next one. The bound is hard."""

    waits_for_due = True


class Mask(StalenessPolicy):
    """`mask`: tokens older than the bound are masked; the rest of their episode is trained."""

    def limit(
        self,
        samples: Sequence[Sample],
        version: int,
        measured: Mapping[int, Sequence[float]],
        metrics: MetricsAggregator,
    ) -> list[Sample]:
        return [self._young_part(s, version, metrics) if self._is_overage(s, version) else s for s in samples]

    def _young_part(self, sample: Sample, version: int, metrics: MetricsAggregator) -> Sample:
        oldest = version - self.max_staleness
        young = [v == NO_VERSION or v >= oldest for v in sample.versions]
        return _masked(sample, young, metrics)


class Trust(Mask):
    """`trust`: bounds how far the policy has moved on the tokens instead of their age.

    The divergence of a row is the mean over its tokens of d²/2, with d the learner's minus the sampler's
    log-probability (the k2 estimate of their KL). The bound is the 99th percentile of the last 1,024 trained rows
    within the age bound. An older row is scored before it is trained: within the bound all of it is trained; otherwise
    the tokens that diverged most are masked until the mean of the others is within it. So no row is trained at a
    divergence that is unusual for young rows, no row is lost because its task was slow, and the learner does not wait:
    admission does not count an overdue running group.
    """

    excuses_overdue = True

    def __init__(self, max_staleness: int) -> None:
        super().__init__(max_staleness)
        self._seen: deque[float] = deque(maxlen=_WINDOW)

    @property
    def bound(self) -> float | None:
        """The largest divergence to train; None until enough young rows were seen."""
        return float(np.quantile(self._seen, _QUANTILE)) if len(self._seen) >= _FEWEST else None

    def state(self) -> Any:
        return list(self._seen)

    def restore(self, state: Any) -> None:
        self._seen.extend(state or ())

    def to_measure(self, samples: Sequence[Sample], version: int) -> list[int]:
        return [i for i, sample in enumerate(samples) if self._is_overage(sample, version)]

    def limit(
        self,
        samples: Sequence[Sample],
        version: int,
        measured: Mapping[int, Sequence[float]],
        metrics: MetricsAggregator,
    ) -> list[Sample]:
        bound = self.bound
        if not measured:
            return list(samples)
        if bound is None:  # too few young rows for a bound: fall back to age
            return super().limit(samples, version, measured, metrics)
        metrics.record("staleness/divergence_bound", bound)
        return [
            self._near_part(sample, measured[i], bound, metrics) if i in measured else sample
            for i, sample in enumerate(samples)
        ]

    def observe(self, samples: Sequence[Sample], logprobs: Sequence[Sequence[float]], version: int) -> None:
        for sample, row in zip(samples, logprobs, strict=True) if self.max_staleness else ():
            if not self._is_overage(sample, version) and oldest_version(sample) is not None:
                trained = [lp for lp, m in zip(sample.logprobs, sample.loss_mask, strict=True) if m]
                self._seen.append(float(np.mean(_divergences(row, trained))))

    def _near_part(self, sample: Sample, logprobs: Sequence[float], bound: float, metrics: MetricsAggregator) -> Sample:
        mask = np.array(sample.loss_mask, dtype=bool)
        moved_T = np.where(mask, _divergences(logprobs, sample.logprobs), np.inf)
        metrics.record("staleness/divergence_old", float(moved_T[mask].mean()))
        order = np.argsort(moved_T, kind="stable")[: int(mask.sum())]
        means = np.cumsum(moved_T[order]) / np.arange(1, len(order) + 1)  # increasing: sorted by divergence
        near = np.zeros(len(mask), dtype=bool)
        near[order[: int(np.searchsorted(means, bound, side="right"))]] = True
        return _masked(sample, near.tolist(), metrics)


def _divergences(learner: Sequence[float], sampler: Sequence[float]) -> np.ndarray:
    """Per token, the k2 estimate of the divergence: never negative, and additive."""
    return 0.5 * (np.asarray(learner) - np.asarray(sampler)) ** 2


def _masked(sample: Sample, keep: Sequence[bool], metrics: MetricsAggregator) -> Sample:
    mask = tuple(int(m and k) for m, k in zip(sample.loss_mask, keep, strict=True))
    metrics.record("staleness/masked_tokens", sample.trained_tokens - sum(mask))
    metrics.record("staleness/overage_rows", 1)
    return replace(sample, loss_mask=mask)
