"""How long groups and steps take: written by a run, read by a simulation, or as the run file says."""

from __future__ import annotations

import math
import random
import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple, Protocol

import numpy as np

from headrace.config import RunConfig, SimulateSection
from headrace.errors import ConfigError
from headrace.scheduling.buffer import FinishedGroup
from headrace.tracking.jsonl import FILE_NAME, read_rows
from headrace.tracking.metrics import MetricsAggregator, Reducer

QUANTILES = (0, 10, 25, 50, 75, 90, 95, 99, 100)
_SLOWEST = 0.9  # of a recorded run, the slowest tenth counts as slow
LONG = 2.0
"""Groups that took more than so many times the median took long."""
_REMEMBERED = 1000  # publications
_LATELY = 512  # groups; those of one step may be two, a usual and a slow one
_BINS = 20


class Duration(NamedTuple):
    """Seconds of one group, whether its task counts as slow, and where its tokens are sampled."""

    seconds: float
    slow: bool
    place: float
    """The mean place of its tokens within the seconds, from 0 to 1."""


class Durations(Protocol):
    """Where a simulation takes its durations from."""

    failed_share: float
    filtered_share: float
    include_queueing: bool
    """Whether the wait for a place to run in (`rollout.max_concurrent`) is in the durations already."""

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

    include_queueing = False

    def __init__(self, section: SimulateSection) -> None:
        self._section = section
        self.failed_share = section.failed_share
        self.filtered_share = section.filtered_share

    def group(self, rng: random.Random) -> Duration:
        section = self._section
        slow = rng.random() < section.slow_share
        seconds = section.group_s * math.exp(section.group_spread * rng.gauss(0.0, 1.0))
        if not slow:
            return Duration(seconds, False, section.token_place)
        place = section.token_place if section.slow_token_place is None else section.slow_token_place
        return Duration(seconds * section.slow_factor, True, place)

    def learn_s(self, rng: random.Random) -> float:
        return self._section.learn_s


class GroupDurations:
    """What a run records of its groups, step by step.

    Groups that took long are told apart: they may be slow because they say more, or because they wait for a tool.
    """

    def __init__(self) -> None:
        self._groups: list[tuple[float, list[tuple[float, float]]]] = []
        self._published_s: dict[int, float] = {}
        self._lately_s: deque[float] = deque(maxlen=_LATELY)
        self._places = {"token_place": _TokenPositions(), "long_token_place": _TokenPositions()}

    def add(self, seconds: float, group: FinishedGroup) -> None:
        """A group became whole just now, so many seconds after its start."""
        begun_s = time.perf_counter() - seconds
        steps = (step for episode in group.episodes for t in episode.trajectories for step in t.steps)
        tokens = Counter(version for step in steps for version in step.versions or ())
        seen: list[tuple[float, float]] = []
        for published, published_s in reversed(self._published_s.items()) if tokens else ():
            if published_s <= begun_s:
                break
            later = sum(count for version, count in tokens.items() if version >= published)
            seen.append(((published_s - begun_s) / seconds, later / tokens.total()))
        self._groups.append((seconds, seen))

    def metrics(self, version: int) -> MetricsAggregator:
        """Of the groups that were added since this was last asked; `version` has been published just now."""
        self._published_s[version] = time.perf_counter()
        if len(self._published_s) > _REMEMBERED:
            del self._published_s[next(iter(self._published_s))]
        metrics, groups = MetricsAggregator(), self._groups
        self._groups = []
        metrics.record("time/group_s/count", len(groups), Reducer.LAST)
        if not groups:
            return metrics
        seconds = [group_s for group_s, _ in groups]
        metrics.record("time/group_s/mean", fmean(seconds), Reducer.LAST)
        for quantile, value in zip(QUANTILES, np.percentile(seconds, QUANTILES).tolist(), strict=True):
            metrics.record(f"time/group_s/q{quantile:02d}", value, Reducer.LAST)
        self._lately_s.extend(seconds)
        long_s = LONG * median(self._lately_s)
        for group_s, seen in groups:
            self._places["long_token_place" if group_s > long_s else "token_place"].add(seen)
        for name, places in self._places.items():
            metrics.record(f"time/group_s/{name}", places.mean(), Reducer.LAST)
        return metrics


class _TokenPositions:
    """Where in the duration of groups their tokens are sampled, told by the publications that fell into it.

    A publication at place x of a group's duration splits its tokens by their versions. The share after it is, over many
    groups, 1 - F(x) with F the distribution of the tokens' places; and the area under 1 - F is their mean place.
    """

    def __init__(self) -> None:
        self._bins = [(0, 0.0, 0.0)] * _BINS

    def add(self, seen: Iterable[tuple[float, float]]) -> None:
        """Publications within one group: their places, and the share of its tokens that came after."""
        for place, later in seen:
            bin_ = min(int(place * _BINS), _BINS - 1)
            count, places, laters = self._bins[bin_]
            self._bins[bin_] = (count + 1, places + place, laters + later)

    def mean(self) -> float:
        """The mean place; half, where nothing was seen."""
        known = [(places / count, laters / count) for count, places, laters in self._bins if count]
        xs, ys = zip((0.0, 1.0), *known, (1.0, 0.0), strict=True)
        return float(np.trapezoid(ys, xs))


class RecordedDurations:
    """Durations of a run, dealt in the order in which its groups were started, and from the first again at the end."""

    include_queueing = True

    def __init__(self, rows: Sequence[Mapping[str, float]]) -> None:
        self._groups_s = _in_order_of_start(rows)
        self._learn_s = [row["time/train_s"] for row in rows if row.get("time/train_s")]
        self._groups_dealt = self._steps_dealt = 0
        ordered = sorted(self._groups_s)
        self._slow_s = ordered[int(_SLOWEST * (len(ordered) - 1))] if ordered else 0.0
        self._long_s = LONG * median(ordered) if ordered else 0.0
        self._place, self._long_place = (_last(rows, f"time/group_s/{kind}token_place", 0.5) for kind in ("", "long_"))
        ends = [row for row in rows if "episodes/dispatched" in row]
        settled = ends[-1]["episodes/dispatched"] - ends[-1].get("episodes/pending", 0.0) if ends else 0.0
        self.failed_share, self.filtered_share = (
            ends[-1].get(f"episodes/{end}", 0.0) / settled if settled else 0.0 for end in ("failed", "filtered")
        )

    @classmethod
    def read(cls, run_dir: Path) -> RecordedDurations:
        """From the run's metrics."""
        durations = cls(list(read_rows(run_dir / FILE_NAME).values()))
        if not durations._groups_s or not durations._learn_s:
            raise ConfigError(
                f"{run_dir / FILE_NAME} holds no step with time/group_s and time/train_s to simulate from; "
                f'give the folder of a run that has trained, with tracker "jsonl", or set simulate.group_s and learn_s'
            )
        return durations

    def group(self, rng: random.Random) -> Duration:
        seconds = self._groups_s[self._groups_dealt % len(self._groups_s)]
        self._groups_dealt += 1
        return Duration(seconds, seconds > self._slow_s, self._long_place if seconds > self._long_s else self._place)

    def learn_s(self, rng: random.Random) -> float:
        self._steps_dealt += 1
        return self._learn_s[(self._steps_dealt - 1) % len(self._learn_s)]


def _in_order_of_start(rows: Sequence[Mapping[str, float]]) -> list[float]:
    """All durations. Groups became whole at some time within a step, the shortest first, and began so much earlier."""
    now_s = 0.0
    started: list[tuple[float, float]] = []
    for row in rows:
        step_s, groups_s = row.get("time/step_s", 0.0), recorded_groups(row)
        for place, seconds in enumerate(groups_s, start=1):
            started.append((now_s + place / len(groups_s) * step_s - seconds, seconds))
        now_s += step_s
    return [seconds for _, seconds in sorted(started)]


def _last(rows: Sequence[Mapping[str, float]], key: str, otherwise: float) -> float:
    return next((row[key] for row in reversed(rows) if key in row), otherwise)


def recorded_groups(row: Mapping[str, float]) -> list[float]:
    """The durations of the groups that a step saw become whole, as far as their quantiles and mean tell; sorted.

    Few groups are told exactly: a quantile lies between two neighbours, so these are linear equations.
    """
    count = int(row.get("time/group_s/count", 0))
    known = np.array([row.get(f"time/group_s/q{quantile:02d}", 0.0) for quantile in QUANTILES])
    if count <= 0 or known.min() <= 0:
        return []
    place_N = np.arange(count) / max(count - 1, 1) * 100
    # between logarithms: a straight line would put a heavy tail's weight into the gap before it
    guess_N = np.exp(np.interp(place_N, QUANTILES, np.log(known)))
    weight_QN = np.array([np.interp(QUANTILES, place_N, unit) for unit in np.eye(count)]).T
    if "time/group_s/mean" in row:
        weight_QN = np.vstack([weight_QN, np.full(count, 1 / count)])
        known = np.append(known, row["time/group_s/mean"])
    mended_N = guess_N + np.linalg.lstsq(weight_QN, known - weight_QN @ guess_N)[0]
    return np.sort(np.clip(mended_N, known[0], known[len(QUANTILES) - 1])).tolist()
