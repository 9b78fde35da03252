"""The simulator: the loops on a virtual clock, against closed forms, its own account, and the trainer itself."""

from __future__ import annotations

import asyncio
import json
import random
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from staleness_policies import against, scenario

from fakes import examples
from headrace.config import RunConfig
from headrace.config.loading import build_config
from headrace.data.task import Task
from headrace.errors import ConfigError
from headrace.scheduling.durations import Duration, durations_of
from headrace.scheduling.simulation.simulator import Simulation, simulate
from headrace.scheduling.simulation.tally import Outcome
from null_backend import Null, null_run, some_tasks

POLICIES = ("count", "drop", "wait", "mask", "trust")
SMALL: dict[str, Any] = {
    "rollout": {"group_size": 2, "max_concurrent": 64},
    "trainer": {"batch_size": 4, "max_staleness": 2},
    "simulate": {"group_s": 10.0, "slow_share": 0.15, "slow_factor": 8.0, "learn_s": 4.0, "steps": 60, "tokens": 8},
}


def small(*words: str) -> RunConfig:
    return build_config(SMALL, words, may_be_idle=True)


def even(*words: str) -> RunConfig:
    """Every group takes 10 seconds, every step 4."""
    return small("--simulate.group_spread=0", "--simulate.slow_share=0", *words)


def simulated(*words: str) -> Outcome:
    return simulate(small(*words))


# ---- whatever the settings -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
@examples
@given(
    seed=st.integers(0, 10**6),
    bound=st.integers(0, 4),
    partial=st.booleans(),
    stream=st.booleans(),
    order=st.sampled_from(["fifo", "oldest_version", "newest"]),
    failed=st.sampled_from([0.0, 0.3]),
    filtered=st.sampled_from([0.0, 0.4]),
    ends=st.booleans(),
    learn_s=st.sampled_from([0.5, 4.0, 40.0]),
)
def test_every_simulation_makes_its_steps_and_accounts_for_every_episode(
    policy: str, seed: int, bound: int, partial: bool, stream: bool, order: str, failed: float, filtered: float,
    ends: bool, learn_s: float,
) -> None:  # fmt: skip
    words = {
        "run.seed": seed, "trainer.staleness": policy, "trainer.max_staleness": bound, "produce.order": order,
        "trainer.partial_rollouts": json.dumps(partial), "trainer.stream": json.dumps(stream),
        "simulate.failed_share": failed, "simulate.filtered_share": filtered, "filters.drop_uniform": "true",
        "simulate.learn_s": learn_s, "simulate.steps": 15,
    }  # fmt: skip
    config = small(*(f"--{key}={value}" for key, value in words.items()))
    outcome = simulate(config, ends=ends)
    account = outcome.account
    settled = account.trained + account.filtered + account.failed + account.stale
    assert account.dispatched == settled + account.pending
    assert outcome.steps + outcome.warmup == 15
    assert account.stale == 0 or policy == "drop"
    if not failed:
        assert account.trained >= 15 * 4 * 2
    in_order = order != "newest" and not partial  # else groups may wait for ever while others come after them
    if policy in ("drop", "wait", "mask") or not bound or in_order:
        assert outcome.staleness_max <= bound
    assert outcome.rows_too_far == 0
    assert 0 <= outcome.learner_busy <= 1 + 1e-9 and 0 <= outcome.generation_busy <= 1 + 1e-9
    assert 0 <= outcome.wasted_tokens <= 1 and 0 <= outcome.wasted_time <= 1
    if ends and account.dispatched == account.trained + account.pending and policy != "trust":  # nothing was replaced
        most_due = 4 * bound if policy == "wait" else 0  # more than a batch may fall due at once
        assert account.dispatched <= (15 * 4 + most_due + 4) * 2, "nothing is started that no step needs"


@pytest.mark.parametrize("words", [(), ("--trainer.staleness=drop",), ("--trainer.stream=true",)])
def test_the_same_seed_gives_the_same_metrics_and_another_seed_others(words: tuple[str, ...]) -> None:
    assert simulated(*words) == simulated(*words)
    assert simulated(*words) != simulated("--run.seed=1", *words)


@pytest.mark.parametrize("policy", POLICIES)
def test_at_every_event_the_account_holds_and_no_more_runs_than_may(policy: str) -> None:
    config = small(f"--trainer.staleness={policy}", "--produce.capacity=15", "--rollout.max_concurrent=20")
    simulation = Simulation(config, durations_of(config))
    while simulation.coordinator.version < 30:
        simulation.advance()
        coordinator = simulation.coordinator
        pending = 2 * (coordinator.in_flight + coordinator.waiting + len(simulation._step))
        assert coordinator.account().pending == pending
        assert coordinator.in_flight + coordinator.waiting <= 15
        assert simulation._running <= 10 and coordinator.waiting == len(simulation.buffer)


# ---- closed forms ----------------------------------------------------------------------------------------------------


def test_synchronous_a_batch_takes_as_long_as_its_slowest_group_and_the_learning() -> None:
    outcome = simulate(even("--trainer.max_staleness=0"))
    assert outcome.steps_per_s == pytest.approx(1 / (10 + 4))
    assert outcome.groups_per_s == pytest.approx(4 / (10 + 4))
    assert outcome.learner_busy == pytest.approx(4 / 14)
    assert outcome.generation_busy == pytest.approx(10 / 14 * 4 / 32)
    assert (outcome.staleness_mean, outcome.staleness_max, outcome.ages) == (0.0, 0, (45 * 4 * 2 * 8,))


def test_synchronous_with_few_slots_groups_queue_for_them() -> None:
    outcome = simulate(even("--trainer.max_staleness=0", "--rollout.max_concurrent=6"))  # 3 groups: two rounds
    assert outcome.steps_per_s == pytest.approx(1 / (2 * 10 + 4))
    assert outcome.generation_busy == pytest.approx((3 * 10 + 10) / (24 * 3))


def test_synchronous_the_slowest_of_random_groups_sets_the_pace() -> None:
    words = ("--trainer.max_staleness=0", "--simulate.slow_share=0.2", "--simulate.group_spread=0")
    outcome = simulated(*words, "--simulate.slow_factor=5", "--simulate.steps=1500", "--simulate.warmup=0")
    some_slow = 1 - 0.8**4
    expected_s = (1 - some_slow) * 10 + some_slow * 50 + 4
    assert outcome.steps_per_s == pytest.approx(1 / expected_s, rel=0.05)


def test_a_learner_that_is_the_bottleneck_is_always_busy() -> None:
    outcome = simulated("--simulate.learn_s=60", "--trainer.max_staleness=4")
    assert outcome.learner_busy == pytest.approx(1.0)
    assert outcome.steps_per_s == pytest.approx(1 / 60)


def test_generation_that_is_the_bottleneck_is_always_busy() -> None:
    words = ("--rollout.max_concurrent=8", "--simulate.learn_s=0.5", "--trainer.max_staleness=8")
    outcome = simulate(even(*words, "--trainer.staleness=count"))
    assert outcome.generation_busy == pytest.approx(1.0)
    assert outcome.groups_per_s == pytest.approx(4 / 10)  # by Little's law


def test_learning_on_the_first_groups_hides_all_but_the_last_piece() -> None:
    words = ("--trainer.max_staleness=0", "--rollout.max_concurrent=6")
    assert simulate(even(*words, "--trainer.stream=true")).steps_per_s == pytest.approx(1 / (2 * 10 + 4 / 4))


def test_without_partial_rollouts_nothing_runs_at_a_weight_sync() -> None:
    config = small("--trainer.partial_rollouts=false")
    simulation = Simulation(config, durations_of(config))
    seen: list[int] = []
    while simulation.coordinator.version < 20:
        before = simulation.coordinator.version
        simulation.advance()
        if simulation.coordinator.version > before:
            seen.append(simulation.coordinator.in_flight)
    drained = simulation.tally.outcome(simulation.now_s, simulation.coordinator.account())
    assert drained.staleness_max <= 2 and not drained.rows_too_old
    assert len(seen) == 20 and drained.steps_per_s < simulated("--simulate.steps=20").steps_per_s
    # weights go out when the last group has finished; only what starts then runs at the end of the event
    assert max(seen) <= 4


def test_tokens_are_spread_over_the_versions_that_pass_while_a_group_runs() -> None:
    # steps of 4 s; 20 groups run ahead of the learner, who is the bottleneck: each waits for 4 steps and runs for 2.5
    words = ("--trainer.max_staleness=4", "--trainer.staleness=count", "--simulate.tokens=40")
    outcome = simulate(even(*words))
    assert outcome.learner_busy == pytest.approx(1.0)
    assert outcome.staleness_max == 4
    spread = simulate(even(*words, "--simulate.token_place=0")).staleness_mean - outcome.staleness_mean
    assert spread == pytest.approx(1.0, abs=0.3), "half of the 2.5 versions that pass"


# ---- what it says of policies ----------------------------------------------------------------------------------------


def test_policies_differ_as_they_should_on_slow_tasks() -> None:
    found = {policy: simulate(scenario(policy, 130)) for policy in POLICIES}
    assert found["count"].rows_too_old > 0.05 and found["count"].wasted_tokens == 0
    assert found["drop"].slow_groups == 0 and found["drop"].wasted_time > 0.4
    assert found["wait"].learner_busy < 0.3 and found["wait"].wasted_tokens == 0
    assert found["mask"].slow_tokens < 0.4 and found["mask"].staleness_max == 4
    assert found["trust"].learner_busy > 0.95 and found["trust"].wasted_tokens < 0.05
    assert found["trust"].rows_too_far == 0 and found["trust"].slow_tokens > 0.8


def test_trust_does_not_depend_on_the_speed_of_the_drift_but_on_how_tasks_differ() -> None:
    def wasted(sigma: float, spread: float) -> float:
        words = (f"--simulate.drift.sigma={sigma}", f"--simulate.drift.spread={spread}", "--simulate.drift.power=1")
        return simulated(*words, "--simulate.learn_s=2", "--simulate.steps=200").wasted_tokens

    assert wasted(0.01, 0.0) == pytest.approx(wasted(0.5, 0.0), abs=1e-6)
    assert wasted(0.05, 1.0) < wasted(0.05, 0.0)


def test_failed_and_filtered_work_is_wasted_and_replaced() -> None:
    filtered = simulated("--filters.drop_uniform=true", "--simulate.filtered_share=0.5", "--simulate.steps=200")
    assert filtered.wasted_tokens == pytest.approx(0.5, abs=0.05)
    failed = simulated("--simulate.failed_share=0.25", "--simulate.steps=200")
    assert failed.wasted_tokens == pytest.approx(0.25, abs=0.05)
    assert failed.account.failed == pytest.approx(0.25 * failed.account.dispatched, rel=0.1)


def test_groups_that_are_trained_again_count_once() -> None:
    once, twice = (simulated("--simulate.learn_s=30", f"--produce.reuse={reuse}") for reuse in (1, 2))
    assert twice.steps_per_s == pytest.approx(once.steps_per_s)
    assert twice.groups_per_s == pytest.approx(once.groups_per_s / 2)


# ---- against the trainer itself --------------------------------------------------------------------------------------


def heavy_tail(seed: int) -> float:
    return 1.0 + random.Random(seed).random()


async def slow_tool(task: Task, model: Any) -> float:
    """One task in ten waits fifteen seconds for its tool, after the model has answered."""
    reply = await model.chat(task.messages)
    if int(task.id.split()[1]) % 10 == 0:
        await asyncio.sleep(15.0)
    return float(sum(reply.completion_ids) % 5)


@pytest.mark.parametrize(
    "trainer",
    [
        {"max_staleness": 0},
        {"max_staleness": 4, "staleness": "count"},
        {"max_staleness": 4, "staleness": "wait"},
        {"max_staleness": 4, "staleness": "wait", "stream": True},
        {"max_staleness": 2, "staleness": "count", "partial_rollouts": False},
        {"max_staleness": 1, "staleness": "trust"},
    ],
    ids=str,
)
def test_the_simulator_predicts_what_the_trainer_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trainer: dict[str, Any]
) -> None:
    real = time.perf_counter

    def virtual() -> float:
        try:
            return asyncio.get_running_loop().time()
        except RuntimeError:
            return real()

    monkeypatch.setattr(time, "perf_counter", virtual)
    separate = {"placement": "separate", "stream": False, "steps": 60, "batch_size": 8, **trainer}
    ran = null_run(tmp_path, slow_tool, some_tasks(200), null=Null(heavy_tail, 0.4), trainer=separate)
    found = against(ran.result.run_dir)
    assert found["groups_per_s"]["ratio"] == pytest.approx(1.0, abs=0.1)
    assert found["staleness_mean"]["ratio"] == pytest.approx(1.0, abs=0.1)


def test_what_can_never_progress_is_an_error_and_not_a_hang() -> None:
    class Nothing:
        failed_share = filtered_share = 0.0
        include_queueing = False

        def group(self, rng: random.Random) -> Duration:
            return Duration(1.0, False, 0.5)

        def learn_s(self, rng: random.Random) -> float:
            return 1.0

    config = small()
    simulation = Simulation(config, Nothing())
    simulation.coordinator.needs(0)
    with pytest.raises(ConfigError, match="nothing can happen any more after 0 simulated steps"):
        simulation.run()
