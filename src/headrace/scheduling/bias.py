"""Selection bias: trained against submitted tasks, by source, length and duration.

An asynchronous run that drops or masks slow work trains on another mix of tasks than it was given. These metrics show
it: 1 is no bias, below 1 is under-represented.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from headrace.scheduling.buffer import FinishedGroup
from headrace.tracking.metrics import MetricsAggregator


class SelectionBias:
    """Counts over the run."""

    def __init__(self) -> None:
        self._submitted: Counter[str] = Counter()
        self._trained: Counter[str] = Counter()
        self._finished = _Sums()
        self._used = _Sums()
        self._duration_s: dict[int, float] = {}

    def submitted(self, source: str) -> None:
        """A task was started."""
        self._submitted[source] += 1

    def finished(self, group: FinishedGroup, duration_s: float) -> None:
        """All episodes of a group have finished; whether it will be trained is open."""
        self._finished.add(group, duration_s)
        if group.dropped_because is None:
            self._duration_s[group.group_id] = duration_s

    def dropped(self, group: FinishedGroup) -> None:
        """A complete group will not be trained."""
        self._duration_s.pop(group.group_id, None)

    def trained(self, groups: Iterable[FinishedGroup]) -> None:
        """Groups were trained; a reused one counts once."""
        for group in groups:
            duration_s = self._duration_s.pop(group.group_id, None)
            if duration_s is not None:
                self._used.add(group, duration_s)
                self._trained[group.episodes[0].source] += 1

    def metrics(self) -> MetricsAggregator:
        """Ratios of trained to submitted."""
        metrics = MetricsAggregator()
        if not self._used.groups:
            return metrics
        metrics.record("bias/length", _ratio(self._used.length, self._finished.length))
        metrics.record("bias/duration", _ratio(self._used.duration_s, self._finished.duration_s))
        submitted, trained = self._submitted.total(), self._trained.total()
        for source, count in self._submitted.items() if len(self._submitted) > 1 else ():
            share = _ratio(self._trained[source] / trained, count / submitted)
            metrics.record(f"bias/source/{source}", share)
        return metrics


class _Sums:
    """Means over groups."""

    def __init__(self) -> None:
        self.groups = 0
        self._length = self._duration_s = 0.0

    def add(self, group: FinishedGroup, duration_s: float) -> None:
        self.groups += 1
        self._length += sum(episode.response_tokens for episode in group.episodes) / len(group.episodes)
        self._duration_s += duration_s

    @property
    def length(self) -> float:
        return self._length / self.groups

    @property
    def duration_s(self) -> float:
        return self._duration_s / self.groups


def _ratio(part: float, total: float) -> float:
    return part / total if total else 1.0
