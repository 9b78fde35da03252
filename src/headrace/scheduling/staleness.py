"""Staleness policies: the one place that decides what becomes of work older than `max_staleness`.

Pure logic, like the coordinator that asks them: no clock, no I/O. A policy acts in up to four places:

- admission: whether running groups that are overdue keep a place that a new group could have (`excuses_overdue`);
- before a step: whether the learner waits for groups that would otherwise grow too old (`waits_for_due`);
- at hand-out: whether a whole group is dropped (`is_stale`);
- on the rows of a step: which tokens are left out of the loss (`to_measure`, `limit`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import compress
from typing import Any

import numpy as np

from headrace.data.sample import NO_VERSION, Sample
from headrace.tracking.metrics import MetricsAggregator, Reducer

_WINDOW = 1024
_FEWEST = 32
_QUANTILE = 0.99


def oldest_version(sample: Sample) -> int | None:
    """The version of the oldest token that is trained; None where no policy sampled any."""
    return min(set(compress(sample.versions, sample.loss_mask)) - {NO_VERSION}, default=None)


class StalenessPolicy:
    """`count`: admission alone bounds how far generation runs ahead; slow groups may come back older than the bound."""

    excuses_overdue = False
    waits_for_due = False

    def __init__(self, max_staleness: int) -> None:
        self.max_staleness = max_staleness

    def is_stale(self, age: int) -> bool:
        """Whether a whole group whose oldest token is `age` versions old is not trained at all."""
        return False

    def to_measure(self, samples: Sequence[Sample], version: int) -> list[int]:
        """Rows whose log-probabilities under the current policy `limit` wants to know."""
        return []

    def limit(
        self,
        samples: Sequence[Sample],
        version: int,
        measured: Mapping[int, Sequence[float]],
        metrics: MetricsAggregator,
    ) -> list[Sample]:
        """The rows as they are trained at `version`; `measured` holds log-probabilities by row."""
        return list(samples)

    def observe(self, samples: Sequence[Sample], logprobs: Sequence[Sequence[float]], version: int) -> None:
        """Learn from log-probabilities that training computed anyway; one number per trained token of each row."""

    def state(self) -> Any:
        """What it has learned, as JSON, for a checkpoint."""

    def restore(self, state: Any) -> None:
        """Take up what `state` gave."""

    def _is_overage(self, sample: Sample, version: int) -> bool:
        oldest = oldest_version(sample)
        return oldest is not None and version - oldest > self.max_staleness


Count = StalenessPolicy


class Drop(StalenessPolicy):
    """`drop`: a group older than the bound is thrown away, and another task takes its place."""

    def is_stale(self, age: int) -> bool:
        return age > self.max_staleness


class Wait(StalenessPolicy):
    """`wait`: a step is not made before every group that would then be too old is in it. The bound is hard."""

    waits_for_due = True


class Mask(StalenessPolicy):
    """`mask`: tokens older than the bound are not trained; the rest of their episode is."""

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
    """`trust`: what counts is how far the policy has moved on the tokens, not how old they are.

    Every row within the age bound that is trained shows a divergence: the mean over its tokens of d²/2, with d the
    learner's minus the sampler's log-probability (the k2 estimate of their KL). What 99% of the last 1,024 such rows
    stay below is the bound. An older row is measured before it is trained: within the bound it is trained whole;
    else its tokens that diverged most are masked until the others' mean is within it. So no row is trained beyond a
    divergence that is usual among young rows, no row is lost because its task was slow, and nobody waits: a running
    group that is overdue gives its place in the admission back.
    """

    excuses_overdue = True

    def __init__(self, max_staleness: int) -> None:
        super().__init__(max_staleness)
        self._seen: deque[float] = deque(maxlen=_WINDOW)

    @property
    def bound(self) -> float | None:
        """The largest divergence that is trained; None while too few young rows were seen."""
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
        if bound is None:  # too early to know what is usual: age is all there is to go by
            return super().limit(samples, version, measured, metrics)
        metrics.record("staleness/divergence_bound", bound, Reducer.LAST)
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
        metrics.record("staleness/divergence_old", float(moved_T[mask].mean()), Reducer.MEAN)
        order = np.argsort(moved_T, kind="stable")[: int(mask.sum())]
        means = np.cumsum(moved_T[order]) / np.arange(1, len(order) + 1)  # rises: the largest come last
        near = np.zeros(len(mask), dtype=bool)
        near[order[: int(np.searchsorted(means, bound, side="right"))]] = True
        return _masked(sample, near.tolist(), metrics)


def _divergences(learner: Sequence[float], sampler: Sequence[float]) -> np.ndarray:
    """Per token, the k2 estimate of the divergence: never negative, and additive."""
    return 0.5 * (np.asarray(learner) - np.asarray(sampler)) ** 2


def _masked(sample: Sample, kept: Sequence[bool], metrics: MetricsAggregator) -> Sample:
    mask = tuple(int(m and k) for m, k in zip(sample.loss_mask, kept, strict=True))
    metrics.record("staleness/masked_tokens", sample.trained_tokens - sum(mask), Reducer.SUM)
    metrics.record("staleness/overage_rows", 1, Reducer.SUM)
    return replace(sample, loss_mask=mask)
