"""The crash matrix: runs are killed at every boundary and at random moments, gone on with, and nothing is lost.

Each case is a run in a folder of its own: one life after another, each in a process of its own (crash.py), until one
comes to the end. What then must hold is in crash_checks.py.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from crash import EVENTS, WHEN, Kill, Life, Lives
from crash_checks import check_run, check_same
from crash_scenarios import SCENARIOS, TASKS
from headrace.trainer.replay import Replay

MODEL = ("synchronous", "synchronous_separate", "ahead", "ahead_separate")
NULL = ("null_synchronous", "null_ahead")
EPOCHS = tuple(name for name in SCENARIOS if name.startswith("epochs_"))
OTHERS = tuple(name for name in SCENARIOS if name not in (*MODEL, *NULL, *EPOCHS))


@dataclass(frozen=True)
class Case:
    """A run and how its lives end. Seconds of kills are shares of what an uninterrupted run takes to train."""

    scenario: str
    kills: tuple[Kill, ...]
    nth: float = 0.0
    """Of the first kill's event, as a share of how often it comes in an uninterrupted run."""

    def __str__(self) -> str:
        kill = self.kills[0]
        if kill.event:
            return f"{self.scenario}-{kill.when}-{kill.event}-{self.nth}"
        moments = [f"{k.after_s:.2f}" for k in self.kills if k.after_s is not None]
        engine = [f"engine{moment:.2f}" for k in self.kills for moment in k.engine_s]
        return "-".join([self.scenario, *moments, *engine])


def at_boundary(scenario: str, event: str, when: str, nth: float) -> Case:
    return Case(scenario, (Kill(event, when=when),), nth)


def at_random(scenario: str, seed: int) -> Case:
    """Killed once, twice or three times."""
    rng = random.Random(f"{scenario} {seed}")
    return Case(scenario, tuple(Kill(after_s=rng.uniform(0.0, 0.95)) for _ in range(rng.choice([1, 1, 2, 3]))))


def engine_killed(scenario: str, seed: int, controller_too: bool) -> Case:
    rng = random.Random(f"engine {scenario} {seed}")
    moments = tuple(rng.uniform(0.05, 0.8) for _ in range(rng.choice([1, 2])))
    return Case(scenario, (Kill(after_s=max(moments) + 0.15 if controller_too else None, engine_s=moments),))


SLICE = [
    *(at_boundary("null_synchronous", event, WHEN[i % 3], 0.5) for i, event in enumerate(EVENTS)),
    *(at_boundary("null_ahead", event, WHEN[(i + 1) % 3], 0.5) for i, event in enumerate(EVENTS)),
    *(at_boundary(EPOCHS[i], event, "kept", 0.6) for i, event in enumerate(("dispatched", "whole", "called") * 2)),
    *(at_boundary("synchronous", event, "kept", 0.6) for event in ("called", "batch", "update", "checkpoint")),
    *(at_random("synchronous", seed) for seed in (100, 101)),
    at_random("ahead", 100),
]
BOUNDARIES = [
    *(at_boundary(scenario, event, when, nth) for scenario in NULL for event in EVENTS for when in WHEN
      for nth in (0.0, 0.5, 1.0)),
    *(at_boundary("synchronous", event, when, 0.4) for event in EVENTS for when in WHEN),
    *(at_boundary("synchronous_separate", event, "kept", 0.7) for event in EVENTS),
    *(at_boundary("ahead", event, "before", 0.3) for event in EVENTS),
    *(at_boundary("ahead_separate", event, "kept", 0.6) for event in EVENTS),
    *(at_boundary(scenario, event, "kept", nth) for scenario in (*EPOCHS, *OTHERS)
      for event in ("dispatched", "whole", "trained", "update") for nth in (0.3, 0.8)),
]  # fmt: skip
RANDOM = [*(at_random(name, seed) for name in (*MODEL, *NULL) for seed in range(8)), *(at_random(n, 0) for n in OTHERS)]
ENGINE = [
    engine_killed(name, seed, seed % 2 == 1) for name in MODEL if name.endswith("separate") for seed in range(4)
]  # fmt: skip


@dataclass
class Outcome:
    """What became of a case."""

    run_dir: Path
    reference: Path
    lives: list[Life] = field(default_factory=list)


class Matrix:
    """Runs cases on all cores, each core with a server of its own."""

    def __init__(self, work: Path, lanes: int) -> None:
        self._work = work
        self._servers: SimpleQueue[Lives] = SimpleQueue()
        self._all = [Lives() for _ in range(lanes)]
        for server in self._all:
            self._servers.put(server)
        self._pool = ThreadPoolExecutor(lanes)
        self._references: dict[str, Future[Life]] = {}

    def start(self, case: Case) -> Future[Outcome]:
        """Have it run, after an uninterrupted run of its scenario."""
        if case.scenario not in self._references:
            self._references[case.scenario] = self._pool.submit(self._whole, case.scenario)
        return self._pool.submit(self._run, case)

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        for server in self._all:
            server.close()

    def _whole(self, scenario: str) -> Life:
        server = self._servers.get()
        try:
            return server.live(scenario, self._work / scenario)
        finally:
            self._servers.put(server)

    def _run(self, case: Case) -> Outcome:
        whole = self._references[case.scenario].result()  # it was submitted before, so it has begun
        outcome = Outcome(self._work / str(case), self._work / case.scenario)
        kills = [scaled(kill, case.nth, whole) for kill in case.kills]
        server = self._servers.get()
        try:
            for kill in (*kills, None):
                outcome.lives.append(server.live(case.scenario, outcome.run_dir, kill))
                if not outcome.lives[-1].killed:
                    break
        finally:
            self._servers.put(server)
        return outcome


def scaled(kill: Kill, nth: float, whole: Life) -> Kill:
    """Shares become seconds, and places among the events of an uninterrupted run."""
    return Kill(
        event=kill.event,
        nth=max(1, round(nth * whole.events.get(kill.event, 0))),
        when=kill.when,
        after_s=None if kill.after_s is None else kill.after_s * whole.trained_s,
        engine_s=tuple(moment * whole.trained_s for moment in kill.engine_s),
    )


Outcomes = dict[str, Future[Outcome]]


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outcomes]:
    """Of all cases that are collected: they run beside each other, whatever is waited for."""
    items: list[Any] = [item for item in request.session.items if "outcomes" in getattr(item, "fixturenames", ())]
    matrix = Matrix(tmp_path_factory.mktemp("crash"), min(len(os.sched_getaffinity(0)), 4))
    cases = {str(case): case for case in (item.callspec.params["case"] for item in items)}
    yield {name: matrix.start(case) for name, case in cases.items()}
    matrix.close()


def check(case: Case, outcomes: Outcomes) -> None:
    outcome = outcomes[str(case)].result()
    assert outcome.lives[0].killed or not case.kills[0].event
    check_run(outcome.run_dir, TASKS)
    if not SCENARIOS[case.scenario].get("trainer", {}).get("max_staleness"):
        check_same(outcome.run_dir, outcome.reference)


@pytest.mark.parametrize("case", SLICE, ids=str)
def test_a_slice_of_the_matrix(case: Case, outcomes: Outcomes) -> None:
    check(case, outcomes)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [case for case in RANDOM if case.scenario in ("ahead", "ahead_separate")][::4], ids=str
)
def test_what_a_killed_run_recorded_gives_its_weights_again(case: Case, outcomes: Outcomes) -> None:
    run_dir = outcomes[str(case)].result().run_dir
    made = list(Replay(run_dir))
    assert [(step.step, step.same) for step in made] == [(step, True) for step in range(1, 7)]


@pytest.mark.slow
@pytest.mark.parametrize("case", BOUNDARIES, ids=str)
def test_a_kill_at_every_boundary(case: Case, outcomes: Outcomes) -> None:
    check(case, outcomes)


@pytest.mark.slow
@pytest.mark.parametrize("case", RANDOM, ids=str)
def test_kills_at_random_moments(case: Case, outcomes: Outcomes) -> None:
    check(case, outcomes)


@pytest.mark.slow
@pytest.mark.parametrize("case", ENGINE, ids=str)
def test_kills_of_the_engine(case: Case, outcomes: Outcomes) -> None:
    check(case, outcomes)
