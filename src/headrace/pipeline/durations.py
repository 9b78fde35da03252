"""How long things take in a simulation: as the run file says, or as a recorded run measured it."""

from __future__ import annotations

import math
import random
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple, Protocol

from headrace.config import RunConfig, SimulateSection
from headrace.errors import ConfigError
from headrace.track.jsonl import FILE_NAME, read_rows

QUANTILES = (0, 10, 25, 50, 75, 90, 95, 99, 100)
_SLOWEST = 0.9  # of a recorded run, the slowest tenth counts as slow


class Duration(NamedTuple):
    """Seconds of one group, and whether its task counts as slow."""

    seconds: float
    slow: bool


class Durations(Protocol):
    """Where a simulation takes its durations from."""

    failed_share: float
    filtered_share: float

    def group(self, rng: random.Random) -> Duration:
        """One more group, from its start until it is whole."""
        ...

    def learn_s(self, rng: random.Random) -> float:
        """One more training step."""
        ...


def durations_of(config: RunConfig) -> Durations:
    """What `[simulate]` asks for."""
    section = config.simulate
    return GivenDurations(section) if section.from_run is None else RecordedDurations.read(section.from_run)


class GivenDurations:
    """Lognormal durations around a median, a share of them longer by a factor; steps that all take the same time."""

    def __init__(self, section: SimulateSection) -> None:
        self._section = section
        self.failed_share = section.failed_share
        self.filtered_share = section.filtered_share

    def group(self, rng: random.Random) -> Duration:
        section = self._section
        slow = rng.random() < section.slow_share
        seconds = section.group_s * math.exp(section.group_spread * rng.gauss(0.0, 1.0))
        return Duration(seconds * section.slow_factor if slow else seconds, slow)

    def learn_s(self, rng: random.Random) -> float:
        return self._section.learn_s


@dataclass(frozen=True, slots=True)
class _Recorded:
    """The durations of the groups that one step of a run saw become whole, by their quantiles."""

    count: int
    quantiles: tuple[float, ...]

    def nth(self, place: int) -> float:
        """Roughly the n-th shortest of them; exact where a quantile was recorded."""
        percent = 50.0 if self.count == 1 else 100.0 * place / (self.count - 1)
        right = max(1, bisect_left(QUANTILES, percent))
        share = (percent - QUANTILES[right - 1]) / (QUANTILES[right] - QUANTILES[right - 1])
        low, high = self.quantiles[right - 1], self.quantiles[right]
        # between logarithms: a straight line would put a heavy tail's weight into the gap before it
        return low * (high / low) ** share


class RecordedDurations:
    """Durations of a run, drawn from what its steps measured."""

    def __init__(self, groups: Sequence[_Recorded], learn_s: Sequence[float], failed: float, filtered: float) -> None:
        self._groups = groups
        self._until = list(accumulate(step.count for step in groups))
        self._learn_s = learn_s
        self.failed_share = failed
        self.filtered_share = filtered
        everything = sorted(step.nth(place) for step in groups for place in range(step.count))
        self._slow_from = everything[int(_SLOWEST * (len(everything) - 1))]

    @classmethod
    def read(cls, run_dir: Path) -> RecordedDurations:
        """From the run's metrics."""
        rows = list(read_rows(run_dir / FILE_NAME).values())
        groups = [recorded for row in rows if (recorded := _recorded(row)) is not None]
        learn_s = [row["time/train_s"] for row in rows if row.get("time/train_s")]
        if not groups or not learn_s:
            raise ConfigError(
                f"{run_dir / FILE_NAME} holds no step with time/group_s and time/train_s to simulate from; "
                f'give the folder of a run that has trained, with tracker "jsonl", or set simulate.group_s and learn_s'
            )
        last = next(row for row in reversed(rows) if "time/train_s" in row)
        settled = last.get("episodes/dispatched", 0.0) - last.get("episodes/pending", 0.0)
        failed, filtered = (last.get(f"episodes/{end}", 0.0) / settled if settled else 0.0 for end in _COME_TO_NOTHING)
        return cls(groups, learn_s, failed, filtered)

    def group(self, rng: random.Random) -> Duration:
        index = rng.randrange(self._until[-1])
        step = self._groups[bisect_right(self._until, index)]
        seconds = step.nth(rng.randrange(step.count))
        return Duration(seconds, seconds > self._slow_from)

    def learn_s(self, rng: random.Random) -> float:
        return rng.choice(self._learn_s)


_COME_TO_NOTHING = ("failed", "filtered")


def _recorded(row: Mapping[str, float]) -> _Recorded | None:
    count = int(row.get("time/group_s/count", 0))
    quantiles = tuple(row.get(f"time/group_s/q{quantile:02d}", 0.0) for quantile in QUANTILES)
    return _Recorded(count, quantiles) if count > 0 and min(quantiles) > 0 else None
