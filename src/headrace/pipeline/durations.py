"""How long things take in a simulation: as the run file says, or as a recorded run measured it."""

from __future__ import annotations

import math
import random
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple, Protocol

from headrace.config import RunConfig, SimulateSection
from headrace.errors import ConfigError
from headrace.track.jsonl import FILE_NAME, read_rows

QUANTILES = (0, 10, 25, 50, 75, 90, 95, 99, 100)
_SLOWEST = 0.9  # of a recorded run, the slowest tenth counts as slow
_COME_TO_NOTHING = ("failed", "filtered")
_MOST_BENT, _HALVINGS = 64, 16


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


class RecordedDurations:
    """Durations of a run, drawn from what it measured."""

    def __init__(self, groups_s: Sequence[float], learn_s: Sequence[float], failed: float, filtered: float) -> None:
        self._groups_s = groups_s
        self._learn_s = learn_s
        self.failed_share = failed
        self.filtered_share = filtered
        self._slow_from = sorted(groups_s)[int(_SLOWEST * (len(groups_s) - 1))]

    @classmethod
    def read(cls, run_dir: Path) -> RecordedDurations:
        """From the run's metrics."""
        rows = list(read_rows(run_dir / FILE_NAME).values())
        groups_s = [seconds for row in rows for seconds in recorded_groups(row)]
        learn_s = [row["time/train_s"] for row in rows if row.get("time/train_s")]
        if not groups_s or not learn_s:
            raise ConfigError(
                f"{run_dir / FILE_NAME} holds no step with time/group_s and time/train_s to simulate from; "
                f'give the folder of a run that has trained, with tracker "jsonl", or set simulate.group_s and learn_s'
            )
        last = next(row for row in reversed(rows) if "time/train_s" in row)
        settled = last.get("episodes/dispatched", 0.0) - last.get("episodes/pending", 0.0)
        failed, filtered = (last.get(f"episodes/{end}", 0.0) / settled if settled else 0.0 for end in _COME_TO_NOTHING)
        return cls(groups_s, learn_s, failed, filtered)

    def group(self, rng: random.Random) -> Duration:
        seconds = rng.choice(self._groups_s)
        return Duration(seconds, seconds > self._slow_from)

    def learn_s(self, rng: random.Random) -> float:
        return rng.choice(self._learn_s)


def recorded_groups(row: Mapping[str, float]) -> list[float]:
    """The durations of the groups that a step saw become whole, as far as their quantiles and mean tell."""
    count = int(row.get("time/group_s/count", 0))
    quantiles = [row.get(f"time/group_s/q{quantile:02d}", 0.0) for quantile in QUANTILES]
    if count <= 0 or min(quantiles) <= 0:
        return []
    mean, low, high = row.get("time/group_s/mean"), 1 / _MOST_BENT, float(_MOST_BENT)
    if mean is None:
        return _between(count, quantiles, 1.0)
    for _ in range(_HALVINGS):
        bend = math.sqrt(low * high)
        if fmean(_between(count, quantiles, bend)) > mean:
            low = bend
        else:
            high = bend
    return _between(count, quantiles, math.sqrt(low * high))


def _between(count: int, quantiles: Sequence[float], bend: float) -> list[float]:
    """So many durations with these quantiles. Those in between lie nearer to the lower one the larger `bend` is."""
    found: list[float] = []
    for place in range(count):
        percent = 50.0 if count == 1 else 100.0 * place / (count - 1)
        right = max(1, bisect_left(QUANTILES, percent))
        share = (percent - QUANTILES[right - 1]) / (QUANTILES[right] - QUANTILES[right - 1])
        shorter, longer = quantiles[right - 1], quantiles[right]
        # between logarithms: a straight line would put a heavy tail's weight into the gap before it
        found.append(shorter * (longer / shorter) ** (share**bend))
    return found
