"""A grid of settings, each simulated: `[simulate.grid]` of a run file."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from operator import attrgetter
from typing import Any

from headrace.config import RunConfig
from headrace.config.effect import idle_settings
from headrace.config.loading import build_config, field_paths
from headrace.errors import ConfigError
from headrace.registry import nearest
from headrace.scheduling.durations import durations_of
from headrace.scheduling.simulation.simulator import check_simulated, simulate
from headrace.scheduling.simulation.tally import Outcome

# the settings that a simulation reads: varying another one would repeat the same row
_READ = {
    "trainer": ("batch_size", "placement", "max_staleness", "staleness", "partial_rollouts", "stream"),
    "produce": ("over_sample", "order", "capacity", "reuse"),
    "rollout": ("group_size", "max_concurrent"),
    "filters": ("drop_uniform", "min_trajectories"),
    "run": ("seed",),
}


@dataclass(frozen=True, slots=True)
class GridPoint:
    """One combination of settings: what it changes, and the resulting configuration."""

    settings: dict[str, Any]
    config: RunConfig

    @property
    def label(self) -> str:
        """A short text of its settings."""
        return ", ".join(f"{key.rsplit('.', 1)[-1]}={value}" for key, value in self.settings.items())


@dataclass(frozen=True, slots=True)
class Simulated:
    """A combination of settings and its outcome."""

    point: GridPoint
    outcome: Outcome
    wall_s: float
    """Seconds of the simulation itself."""


def grid_points(config: RunConfig) -> list[GridPoint]:
    """Every combination of the values in `simulate.grid`; without a grid, the run file itself."""
    grid = config.simulate.grid
    for key, values in grid.items():
        _check_key(key, values)
    if "rollout.max_concurrent" in grid and config.simulate.from_run is not None:
        raise ConfigError(
            'simulate.grid: "rollout.max_concurrent" changes nothing with simulate.from_run: the measured '
            "durations include the wait for a slot; remove it, or set simulate.group_s instead"
        )
    given = config.model_dump(mode="json")
    points: list[GridPoint] = []
    for values in product(*grid.values()):
        settings = dict(zip(grid, values, strict=True))
        words = [f"--{key}={json.dumps(value, ensure_ascii=False)}" for key, value in settings.items()]
        where = " ".join(["simulate.grid", *words]) if words else "simulate"
        point = GridPoint(settings, build_config(given, words, where, laid_by=where, may_be_idle=True))
        check_simulated(point.config)
        points.append(point)
    for key in grid:
        _check_effect(key, points)
    return points


def simulate_grid(points: list[GridPoint]) -> Iterator[Simulated]:
    """Simulate one after the other."""
    for point in points:
        durations = durations_of(point.config)  # before the timer: reading a run is not simulating
        started = time.perf_counter()
        outcome = simulate(point.config, durations)
        yield Simulated(point, outcome, time.perf_counter() - started)


def _check_key(key: str, values: tuple[Any, ...]) -> None:
    if not values:
        raise ConfigError(f'simulate.grid: "{key}" has no values; give a list of them')
    if key in _known_keys():
        return
    exists = key in {path for path, _ in field_paths()}
    problem = "changes nothing in a simulation" if exists else f"is no setting{nearest(key, _known_keys())}"
    raise ConfigError(f'simulate.grid: "{key}" {problem}; what can vary is {", ".join(_known_keys())}')


def _check_effect(key: str, points: list[GridPoint]) -> None:
    """Refuse a setting that has no effect in any combination; in some combinations it may have none."""
    usual = attrgetter(key)(RunConfig())
    changed = [point for point in points if attrgetter(key)(point.config) != usual]
    idle = [found.text for point in changed for found in idle_settings(point.config) if found.key == key]
    if idle and len(idle) == len(changed):
        raise ConfigError(f"simulate.grid: {idle[0]}")


def _known_keys() -> list[str]:
    own = [path for path, _ in field_paths() if path.startswith("simulate.") and path != "simulate.grid"]
    return [f"{section}.{key}" for section, keys in _READ.items() for key in keys] + own
