"""Two sides on the same tasks: flips, differences, and where their episodes are found."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from headrace.data.episode import Episode, Step, Trajectory
from headrace.errors import ConfigError
from headrace.evaluation import evaluator
from headrace.evaluation.compare import compare
from headrace.evaluation.evaluator import bootstrap_interval
from headrace.evaluation.results_file import read_evaluation
from headrace.evaluation.sides import compare_sides, evaluation_side, training_side
from headrace.ledger import Ledger, LedgerReader
from null_backend import null_run, scattered, some_tasks


def episode(task_id: str, reward: float, rollout: int = 0, error: str | None = None) -> Episode:
    trajectory = Trajectory((Step((1,), (2,), (-1.0,), (0,), text="x"),), reward=reward)
    return Episode(task_id, (trajectory,), group_id=int(task_id), rollout_idx=rollout, error=error)


@pytest.fixture
def reader(tmp_path: Path) -> LedgerReader:
    with Ledger.open(tmp_path) as ledger:
        before = [episode("1", 1.0), episode("2", 0.0), episode("3", 1.0), episode("4", 0.25)]
        after = [episode("1", 0.0), episode("2", 1.0), episode("3", 1.0), episode("4", 0.5)]
        ledger.evaluated(0, "dev", {}, before)
        ledger.evaluated(8, "dev", {}, [*after, episode("9", 1.0)])
        ledger.evaluated(9, "dev", {}, [episode("1", 1.0), episode("1", 0.0, 1), episode("2", 1.0, error="broke")])
    return LedgerReader.read(tmp_path)


def test_flips_come_first_and_the_difference_is_that_of_compare(reader: LedgerReader) -> None:
    found = compare_sides(evaluation_side(reader, 0, "dev"), evaluation_side(reader, 8, "dev"), "dev")
    assert [(task.id, task.flip) for task in found.tasks] == [("1", "broken"), ("2", "fixed"), ("4", None), ("3", None)]
    assert (found.tasks_in_common, found.only_first, found.only_second, found.fixed, found.broken) == (4, 0, 1, 1, 1)
    results = [read_evaluation(f"{reader.path.parent}@{step}") for step in (0, 8)]
    assert compare(*results, common=True) == [found.pass_rate]
    assert (found.reward.first, found.reward.second) == (0.5625, 0.625)
    assert found.reward.low <= found.reward.difference == 0.0625 <= found.reward.high


def test_with_several_attempts_half_of_them_make_a_task_right_and_a_failed_one_is_wrong(reader: LedgerReader) -> None:
    found = compare_sides(evaluation_side(reader, 8, "dev"), evaluation_side(reader, 9, "dev"))
    assert {task.id: (task.second, task.flip) for task in found.tasks} == {"1": (0.5, "fixed"), "2": (0.0, "broken")}


def test_episodes_are_found_by_their_number(reader: LedgerReader) -> None:
    side = evaluation_side(reader, 9, "dev")
    numbers = [one.eval_episode_id for one in side["1"].episodes]
    records = [reader.eval_episode_record(number) for number in numbers if number is not None]
    assert [record and record.episode.rollout_idx for record in records] == [0, 1]


def test_trained_steps_are_compared_where_they_have_tasks_in_common(tmp_path: Path) -> None:
    ran = null_run(
        tmp_path, scattered, some_tasks(4), ledger={"enabled": True}, rollout={"group_size": 3},
        trainer={"steps": 4, "batch_size": 4}, filters={"drop_uniform": False},
    )  # fmt: skip
    with LedgerReader.read(ran.result.run_dir) as ledger:
        found = compare_sides(training_side(ledger, 0), training_side(ledger, 3))
        assert found.tasks_in_common == 4 and {len(task.first_episodes) for task in found.tasks} == {3}
        rewards = [one.reward for task in found.tasks for one in task.second_episodes]
        assert found.reward.second == pytest.approx(np.mean(rewards))
        assert training_side(ledger, 0, 2).keys() == training_side(ledger, 0).keys()
        with pytest.raises(ConfigError, match="no episodes of step 100"):
            training_side(ledger, 99)


def test_what_is_not_there_is_said_with_what_is(reader: LedgerReader) -> None:
    with pytest.raises(
        ConfigError, match=r'no evaluation of "test" at step 0; it has "dev" at step 0, "dev" at step 8'
    ):
        evaluation_side(reader, 0, "test")
    one = evaluation_side(reader, 0, "dev")
    with pytest.raises(ConfigError, match="no task in common"):
        compare_sides({"1": one["1"]}, {"2": one["2"]})


def test_an_interval_is_the_same_however_many_resamples_are_drawn_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(1).normal(size=57).tolist()
    found = bootstrap_interval(values)
    monkeypatch.setattr(evaluator, "_MOST_DRAWN", 200)
    assert bootstrap_interval(values) == found
