"""Durations of groups: what a run records of them, and what a simulation reads."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes import examples, step
from headrace.data.episode import Episode, Trajectory
from headrace.scheduling.buffer import FinishedGroup
from headrace.scheduling.durations import QUANTILES, GroupDurations, RecordedDurations, recorded_groups


def group(*versions: int) -> FinishedGroup:
    """A whole group of one episode, whose tokens were sampled under these versions."""
    episode = Episode("t", (Trajectory((step([1], range(len(versions)), versions=versions),)),))
    return FinishedGroup(0, (episode,), (), 1)


def recorded_row(seconds: np.ndarray, **more: float) -> dict[str, float]:
    quantiles = {f"time/group_s/q{q:02d}": float(np.percentile(seconds, q)) for q in QUANTILES}
    return {"time/group_s/count": len(seconds), "time/group_s/mean": float(seconds.mean()), **quantiles, **more}


@examples
@given(st.lists(st.floats(0.1, 100.0), min_size=1, max_size=6))
def test_the_durations_of_few_groups_are_recovered_exactly(seconds: list[float]) -> None:
    assert recorded_groups(recorded_row(np.array(seconds))) == pytest.approx(sorted(seconds), rel=1e-6)


@examples
@given(st.lists(st.floats(0.1, 100.0), min_size=7, max_size=200))
def test_the_durations_of_many_groups_keep_their_number_range_and_nearly_their_mean(seconds: list[float]) -> None:
    found = recorded_groups(recorded_row(np.array(seconds)))
    assert len(found) == len(seconds)
    assert (found[0], found[-1]) == pytest.approx((min(seconds), max(seconds)))
    assert float(np.mean(found)) == pytest.approx(float(np.mean(seconds)), rel=0.1)


def test_durations_come_in_the_order_in_which_groups_were_started() -> None:
    rows = [
        recorded_row(np.array([1.0, 2.0]), **{"time/step_s": 4.0, "time/train_s": 0.5}),
        recorded_row(np.array([1.5, 7.9]), **{"time/step_s": 4.0, "time/train_s": 0.75}),
    ]
    recorded = RecordedDurations(rows)
    rng = random.Random(0)
    dealt = [recorded.group(rng).seconds for _ in range(5)]
    assert dealt == pytest.approx([7.9, 1.0, 2.0, 1.5, 7.9]), "the long one ended last and began first"
    assert [recorded.learn_s(rng) for _ in range(3)] == [0.5, 0.75, 0.5]


def test_a_run_records_when_within_a_group_its_tokens_were_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    recorder = GroupDurations()
    for version in (1, 2):
        now[0] += 10.0
        recorder.metrics(version)
    now[0] = 30.0  # version 0 until 10, version 1 until 20, version 2 since
    recorder.add(30.0, group(0, 0, 1, 2))
    recorder.add(10.0, group(2, 2))
    recorder.add(8.0, group(2))
    found = recorder.metrics(3).reduce()
    assert found["time/group_s/count"] == 3 and found["time/group_s/q100"] == 30.0
    assert found["time/group_s/token_place"] == pytest.approx(0.5)
    assert found["time/group_s/long_token_place"] == pytest.approx((5 + 5 + 15 + 25) / 4 / 30)
    assert recorder.metrics(4).reduce() == {"time/group_s/count": 0.0}


def test_recorded_tokens_are_placed_where_the_run_placed_them() -> None:
    row = recorded_row(np.array([1.0, 1.1, 9.0]), **{"time/step_s": 10.0, "time/train_s": 1.0})
    row |= {"time/group_s/token_place": 0.4, "time/group_s/long_token_place": 0.1}
    recorded = RecordedDurations([row])
    dealt = sorted(recorded.group(random.Random(0)) for _ in range(3))
    assert [(round(seconds, 6), place) for seconds, _, place in dealt] == [(1.0, 0.4), (1.1, 0.4), (9.0, 0.1)]
