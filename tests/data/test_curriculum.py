"""The curriculum: what is drawn more often, and that a run which is gone on with draws what it would have drawn."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes import examples
from headrace.config import CurriculumSection
from headrace.config.loading import build_config
from headrace.data.curriculum import Curriculum, CurriculumSampler, Outcome, key_function
from headrace.data.episode import Episode, Step, Trajectory
from headrace.data.mixture import MixtureOrder
from headrace.data.sampler import Position, TaskSampler
from headrace.data.task import Task
from headrace.errors import ConfigError
from headrace.ledger import GroupState, LedgerReader
from headrace.rollout.model_client import Model
from headrace.run.checkpoint import TrainerState, list_checkpoints
from null_backend import null_trainer, reported, some_tasks

TASKS = [Task(str(i), instruction=f"Do {i}.", source="ab"[i % 2], metadata={"level": i % 3}) for i in range(12)]


def curriculum(target: float = 0.5, **settings: Any) -> Curriculum:
    return Curriculum(CurriculumSection(target=target, **settings), target)


def sampler(seed: int = 0, batch_size: int = 4, **settings: Any) -> CurriculumSampler:
    return CurriculumSampler(CurriculumSection(**{"target": 0.5, **settings}), TASKS, batch_size, seed)


def attempt(right: bool, failed: bool = False) -> Episode:
    step = Step((1,), (2,), text="x")
    return Episode("t", (Trajectory((step,), reward=float(right)),), error="broke" if failed else None)


# ---- the rates -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "rate", "chance"),
    [(0.5, 0.5, 1.0), (0.5, 0.0, 0.1), (0.5, 1.0, 0.1), (0.5, 0.75, 0.55), (0.8, 0.8, 1.0), (0.8, 0.0, 0.1)],
)
def test_the_further_from_the_target_the_less_often_a_task_is_drawn(target: float, rate: float, chance: float) -> None:
    found = curriculum(target)
    found.rates["t"] = rate
    assert found.chance("t") == pytest.approx(chance)


def test_what_was_never_tried_is_drawn_as_often_as_what_is_at_the_target() -> None:
    assert curriculum().chance("new") == 1.0


def test_the_first_group_sets_the_rate_and_later_ones_move_it() -> None:
    found = curriculum(memory=0.75)
    for number, success in enumerate((1.0, 0.0)):
        found.observe(Outcome(number, number, "t", success))
        found.count(number)
    assert found.rates == {"t": 0.75}


@examples
@given(st.permutations(range(5)))
def test_rates_do_not_depend_on_the_order_in_which_groups_finish(order: list[int]) -> None:
    in_order, mixed = curriculum(), curriculum()
    for found, ids in ((in_order, range(5)), (mixed, order)):
        for group_id in ids:
            found.observe(Outcome(0, group_id, "t", group_id / 4))
        found.count(0)
    assert in_order.rates == mixed.rates


def test_an_outcome_counts_when_its_version_has_ended_and_not_before() -> None:
    found = curriculum()
    found.observe(Outcome(1, 7, "t", 1.0))
    found.count(0)
    assert found.rates == {} and 7 in found.pending
    found.count(1)
    assert found.rates == {"t": 1.0} and not found.pending


def test_the_state_goes_through_json_exactly() -> None:
    found, again = curriculum(memory=0.3), curriculum(memory=0.3)
    for number in range(20):
        found.observe(Outcome(number, number, f"t{number % 3}", number / 19))
        found.count(number - 1)
    again.restore(json.loads(json.dumps(found.state())))
    assert again == found and again.pending


# ---- the stream ------------------------------------------------------------------------------------------------------


def told(source: CurriculumSampler, solved: Any, batches: int, first: int = 0) -> list[list[tuple[Position, str]]]:
    """Draw batches, and tell how each of their tasks went."""
    drawn = []
    for version in range(first, first + batches):
        batch = source.next_batch()
        drawn.append([(draw.position, draw.task.id) for draw in batch])
        for place, draw in enumerate(batch):
            rate = solved(draw.task)
            episodes = [attempt(number < rate * 10) for number in range(10)]
            source.observe(version, version * 100 + place, draw, episodes)
        source.curriculum.count(version)
    return drawn


def by_number(task: Task) -> float:
    return {0: 0.0, 1: 0.5, 2: 1.0}[int(task.id) % 3]


def test_tasks_near_the_target_are_drawn_more_often_and_no_task_is_lost() -> None:
    drawn = [task_id for batch in told(sampler(), by_number, 300) for _, task_id in batch]
    counts = Counter(int(task_id) % 3 for task_id in drawn)
    assert counts[1] > 5 * counts[0] and counts[1] > 5 * counts[2]
    assert set(drawn) == {task.id for task in TASKS}


@pytest.mark.parametrize(("by", "kinds"), [("source", 2), ("metadata.level", 3), ("task", 12)])
def test_rates_may_be_those_of_sources_and_of_levels(by: str, kinds: int) -> None:
    source = sampler(by=by)
    told(source, by_number, 20)
    assert len(source.curriculum.rates) == kinds


def test_a_recorded_draw_is_found_by_its_position_whatever_the_rates_are() -> None:
    drawn = told(sampler(seed=3), by_number, 30)
    plain = TaskSampler(TASKS, 4, 3)
    for batch in drawn:
        assert [plain.draw_at(position).task.id for position, _ in batch] == [task_id for _, task_id in batch]


def test_batches_are_full_and_go_forward() -> None:
    drawn = told(sampler(batch_size=5), by_number, 40)
    assert {len(batch) for batch in drawn} == {5}
    positions = [position for batch in drawn for position, _ in batch]
    assert positions == sorted(set(positions))


@examples
@given(st.integers(0, 30), st.integers(0, 5))
def test_position_and_state_are_all_that_the_rest_of_the_stream_depends_on(cut: int, seed: int) -> None:
    whole = told(sampler(seed), by_number, 30)
    first, second = sampler(seed), sampler(seed)
    assert told(first, by_number, cut) == whole[:cut]
    second.position = first.position
    second.curriculum.restore(json.loads(json.dumps(first.state())))
    assert told(second, by_number, 30 - cut, first=cut) == whole[cut:]


def test_a_mixture_has_a_curriculum_too() -> None:
    order = MixtureOrder([6, 6], [1.0, 1.0], seed=1)
    source = CurriculumSampler(CurriculumSection(target=0.5), TASKS, 4, 1, order=order)
    drawn = told(source, by_number, 10)
    assert [source.draw_at(position).task.id for batch in drawn for position, _ in batch] == [
        task_id for batch in drawn for _, task_id in batch
    ]


def test_failed_episodes_say_nothing_of_how_hard_a_task_is() -> None:
    source = sampler()
    (draw, other, *_) = source.next_batch()
    source.observe(0, 0, draw, [attempt(True), attempt(False, failed=True)])
    source.observe(0, 1, other, [attempt(False, failed=True)])
    source.curriculum.count(0)
    assert source.curriculum.rates == {draw.task.id: 1.0}


@pytest.mark.parametrize(
    ("by", "says"),
    [("levle", 'is "task", "source" or "metadata.NAME", got "levle"'), ("metadata.levle", 'task "0" has no "levle"')],
)
def test_what_no_task_has_is_an_error(by: str, says: str) -> None:
    with pytest.raises(ConfigError) as raised:
        key_function(by, TASKS)
    assert says in str(raised.value)


def test_a_setting_that_a_curriculum_makes_idle_is_refused() -> None:
    with pytest.raises(ConfigError, match="drop_last = false has no effect: the batches of a curriculum are all full"):
        build_config({"data": {"curriculum": {"target": 0.5}, "drop_last": False}})


# ---- whole runs ------------------------------------------------------------------------------------------------------

calls = 0
dies_at = 0


async def sometimes(task: Task, model: Model) -> float:
    """Tasks of different difficulty; groups whose rewards are all equal are common. May be killed."""
    global calls
    reply = await model.chat(task.messages)
    calls += 1
    if calls == dies_at:
        os.kill(os.getpid(), signal.SIGKILL)
    number = int(task.id.split()[1])
    return float(sum(reply.completion_ids) % 6 >= number % 6)


PAIRS: dict[str, Any] = {"algorithm": {"objective": "dpo"}, "filters": {"drop_uniform": False}}
"""Batches in which all groups are uniform hold no pair, so that there is nothing to train."""
AHEAD: dict[str, Any] = {"placement": "separate", "max_staleness": 2}


def train(run_dir: Path, save_every: int = 0, ledger: bool = True, trainer: Any = (), **sections: Any) -> Path:
    usual: dict[str, Any] = {
        "run": {"dir": str(run_dir), "name": "run"},
        "data": {"curriculum": {"target": 0.5}},
        "filters": {"drop_uniform": True},
        "ledger": {"enabled": ledger},
        "trainer": {"steps": 10, "batch_size": 3, "save_every": save_every, "save_last": True, **dict(trainer)},
    }
    with redirect_stdout(StringIO()):
        return null_trainer(run_dir, sometimes, some_tasks(12), **{**usual, **sections}).fit().run_dir


def train_and_die(run_dir: Path, at: int, **given: Any) -> None:
    """A life of the run that ends by SIGKILL at the given model call."""
    global calls, dies_at
    child = os.fork()
    if child == 0:
        calls, dies_at = 0, at
        train(run_dir, **given)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


def groups(run_dir: Path) -> list[tuple[int, Position, str]]:
    """What was drawn, by group id."""
    with LedgerReader.read(run_dir) as reader:
        last = reader.last_group_id()
        assert last is not None
        found = [reader.group_record(group_id) for group_id in range(last + 1)]
    return [(group.group_id, group.position, group.task_id) for group in found if group is not None]


def rates(run_dir: Path) -> dict[str, Any]:
    return TrainerState.read(list_checkpoints(run_dir)[-1]).extra["curriculum"]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("whole"))


@pytest.fixture(scope="module")
def uninterrupted_pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("pairs"), **PAIRS)


def test_a_run_passes_places_over_and_says_how_many(uninterrupted: Path) -> None:
    drawn = groups(uninterrupted)
    assert len({position for _, position, _ in drawn}) == len(drawn)
    rows = reported(uninterrupted)
    assert rows[0]["curriculum/passed_over"] == 0
    assert any(row["curriculum/passed_over"] > 0 for row in rows) and rows[-1]["curriculum/known"] > 6
    assert len(drawn) > 35  # some were dropped and replaced


@pytest.mark.parametrize("save_every", [0, 3])
@pytest.mark.parametrize("at", [1, 20, 33, 47, 60])
def test_a_killed_run_draws_what_it_would_have_drawn(
    uninterrupted: Path, tmp_path: Path, save_every: int, at: int
) -> None:
    train_and_die(tmp_path, at, save_every=save_every)
    run_dir = train(tmp_path, save_every)
    assert groups(run_dir) == groups(uninterrupted)
    assert rates(run_dir) == rates(uninterrupted)


@pytest.mark.parametrize("save_every", [0, 3])
@pytest.mark.parametrize("at", [11, 40, 61])
def test_batches_that_held_nothing_to_train_are_remembered_too(
    uninterrupted_pairs: Path, tmp_path: Path, save_every: int, at: int
) -> None:
    with LedgerReader.read(uninterrupted_pairs) as reader:
        found = [reader.group_record(group_id) for group_id, _, _ in groups(uninterrupted_pairs)]
    assert any(group.state == GroupState.FILTERED for group in found if group is not None)
    train_and_die(tmp_path, at, save_every=save_every, **PAIRS)
    run_dir = train(tmp_path, save_every, **PAIRS)
    assert groups(run_dir) == groups(uninterrupted_pairs)
    assert rates(run_dir) == rates(uninterrupted_pairs)


def test_a_run_without_a_ledger_resumes_from_its_checkpoint(uninterrupted: Path, tmp_path: Path) -> None:
    train_and_die(tmp_path, 50, save_every=3, ledger=False)
    assert rates(train(tmp_path, 3, ledger=False)) == rates(uninterrupted)


@pytest.mark.parametrize("save_every", [0, 3])
@pytest.mark.parametrize("at", [15, 45, 60])
def test_where_generation_runs_ahead_every_draw_of_a_killed_run_is_found_again(
    tmp_path: Path, save_every: int, at: int
) -> None:
    train_and_die(tmp_path, at, save_every=save_every, trainer=AHEAD)
    run_dir = train(tmp_path, save_every, trainer=AHEAD)
    drawn, plain = groups(run_dir), TaskSampler(some_tasks(12), 3)
    assert len({position for _, position, _ in drawn}) == len(drawn)
    assert [plain.draw_at(position).task.id for _, position, _ in drawn] == [task_id for _, _, task_id in drawn]
    assert len(reported(run_dir)) == 10
