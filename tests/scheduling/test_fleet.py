"""Simulated machines: replicas, losses, weight syncs and prices."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest
from test_simulate import small

from headrace.cli.main import run
from headrace.config import FleetSection
from headrace.errors import ConfigError
from headrace.scheduling.simulation.fleet import Fleet, sync_seconds
from headrace.scheduling.simulation.simulator import simulate
from headrace.scheduling.simulation.tally import Outcome


def outcome(*settings: str, **fleet: object) -> Outcome:
    words = [f"--simulate.fleet.{key}={value}" for key, value in fleet.items()]
    return simulate(small(*settings, *words))


def test_a_fleet_without_losses_syncs_and_prices_changes_nothing() -> None:
    assert outcome() == outcome(engines=4, learners=2)


def test_a_lost_engine_costs_time_and_no_episode() -> None:
    usual, lossy = outcome(engines=4), outcome(engines=4, mtbf_h=0.05, recovery_s=20)
    assert lossy.lost_nodes > 5 and 0 < lossy.lost_time < 1
    assert lossy.groups_per_s < usual.groups_per_s and lossy.steps == usual.steps
    account = lossy.account
    ends = account.trained + account.filtered + account.failed + account.stale + account.pending
    assert account.dispatched == ends


def test_a_lost_learner_is_waited_for() -> None:
    few = outcome(learners=50, mtbf_h=1, recovery_s=30)
    assert few.lost_nodes > 3 and few.steps_per_s < outcome().steps_per_s


def test_a_lost_learner_repeats_the_steps_since_its_last_checkpoint() -> None:
    lossy = {"learners": 50, "mtbf_h": 1, "recovery_s": 30}
    never, often = (outcome("--trainer.save_every_s=0", f"--trainer.save_every={n}", **lossy) for n in (0, 1))
    assert never.steps_per_s < 0.9 * often.steps_per_s


def test_a_node_that_is_down_is_not_lost_again() -> None:
    found = outcome(engines=20, mtbf_h=0.05, recovery_s=100)  # each engine lives 180 s, and is away for 100
    engines, learner = 20 / (180 + 100), 1 / 180
    assert found.lost_nodes == pytest.approx((engines + learner) * found.seconds, rel=0.15)


@pytest.mark.parametrize("nodes", [{"engines": 4}, {"learners": 3}])
def test_nodes_that_are_lost_before_any_step_ends_are_an_error(nodes: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=r"no step ends .*mtbf_h = 0\.0001 and recovery_s = 300 .*; raise"):
        outcome(mtbf_h=0.0001, recovery_s=300, **nodes)


def test_the_same_seed_loses_the_same_nodes() -> None:
    assert outcome(engines=3, mtbf_h=0.1) == outcome(engines=3, mtbf_h=0.1)


@pytest.mark.parametrize(
    ("transport", "engines", "expected"),
    [("direct", 1, 0.8), ("direct", 100, 80.0), ("tree", 1, 1.6), ("tree", 1023, 1.6 * (1 + 9 / 32)),
     ("file", 1, 1.6), ("file", 10, 4.8), ("file", 1000, 0.8 + 400.0)],
)  # fmt: skip
def test_how_long_a_sync_takes(transport: str, engines: int, expected: float) -> None:
    given = {"weights_gb": 10, "bandwidth_gbps": 100, "transport": transport, "engines": engines}
    fleet = FleetSection.model_validate(given)
    assert sync_seconds(fleet) == pytest.approx(expected)
    assert sync_seconds(fleet.model_copy(update={"sent_share": 0.1})) == pytest.approx(expected / 10)


def test_a_sync_makes_a_synchronous_step_longer_by_its_seconds() -> None:
    synchronous = ("--trainer.max_staleness=0", "--simulate.group_spread=0", "--simulate.slow_share=0")
    usual, slow = outcome(*synchronous), outcome(*synchronous, weights_gb=10, bandwidth_gbps=20, engines=1)
    assert slow.sync_s == 4.0
    assert 1 / slow.steps_per_s == pytest.approx(1 / usual.steps_per_s + 4.0)


def test_the_price_is_of_all_nodes_for_the_time_of_a_million_trained_tokens() -> None:
    found = outcome(engines=4, learners=2, engine_price=3, learner_price=6)
    hours = 1e6 / found.trained_tokens_per_s / 3600
    assert found.cost_per_million == pytest.approx((4 * 3 + 2 * 6) * hours)
    assert outcome().cost_per_million == 0


def test_slots_are_shared_evenly_and_those_of_a_lost_engine_are_gone() -> None:
    fleet = Fleet(FleetSection(engines=3), 7, random.Random(0))
    taken = [fleet.take(number) for number in range(8)]
    assert taken[7] is None and sorted(taken[:7].count(index) for index in range(3)) == [2, 2, 3]  # type: ignore[arg-type]
    lost = fleet.lose(0)
    assert lost == [number for number, index in enumerate(taken) if index == 0]
    assert fleet.take(9) is None
    fleet.replace(0)
    assert [fleet.take(10 + number) for number in range(4)] == [0, 0, 0, None]


def test_losses_come_as_often_as_they_should() -> None:
    losses = Fleet(FleetSection(engines=9, mtbf_h=10), 9, random.Random(0)).losses()
    found = [next(losses) for _ in range(4000)]
    assert math.isclose(sum(seconds for seconds, _ in found) / 4000, 3600, rel_tol=0.1)
    assert {node for _, node in found} == set(range(10))


def test_the_command_shows_what_the_fleet_costs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[rollout]\ngroup_size = 2\n[trainer]\nbatch_size = 4\n[simulate]\nsteps = 20\n")
    fleet = ["--simulate.fleet.engine_price=2.5", "--simulate.fleet.mtbf_h=1", "--simulate.fleet.weights_gb=4"]
    assert run(["simulate", str(file)]) == 0
    assert "cost" not in capsys.readouterr().out
    assert run(["simulate", str(file), *fleet]) == 0
    out = capsys.readouterr().out
    assert "cost per" in out and "sync (s)" in out and "lost" in out
