"""Whole runs in every schedule, on the null backend and a virtual clock: milliseconds each."""

from __future__ import annotations

import asyncio
import gc
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import compress, product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes import examples
from headrace.data.episode import Episode
from headrace.data.sampler import TaskSampler
from headrace.data.task import Task
from headrace.rollout.model_client import Model
from headrace.run.checkpoint import list_checkpoints
from headrace.trainer.callbacks import Callback, Metrics, TrainerHandle
from null_backend import Null, NullBackend, Ran, null_run, scattered, some_tasks

POLICIES = ("count", "drop", "wait", "mask", "trust")
ENDS = ("trained", "filtered", "failed", "stale", "pending")


def schedules(**fixed: Any) -> Iterator[dict[str, Any]]:
    """Settings of [trainer] in every combination, but for what is fixed."""
    dials: dict[str, Sequence[Any]] = {
        "max_staleness": (0, 1, 4),
        "staleness": POLICIES,
        "partial_rollouts": (True, False),
        "stream": (True, False),
        "placement": ("colocate", "separate"),
    }
    free = {key: values for key, values in dials.items() if key not in fixed}
    for chosen in product(*free.values()):
        yield {**dict(zip(free, chosen, strict=True)), **fixed}


def heavy_tail(seed: int, share: float = 0.1, factor: float = 20.0) -> float:
    """A second or two; some requests take far longer."""
    rng = random.Random(seed)
    return (1.0 + rng.random()) * (factor if rng.random() < share else 1.0)


class Watcher(Callback):
    """Looks into the trainer after each step: the account, and what it must be equal to."""

    def __init__(self, group_size: int = 2) -> None:
        self._group_size = group_size
        self.held: list[int] = []

    def on_train_start(self, trainer: TrainerHandle) -> None:
        self._trainer: Any = trainer

    def on_batch_end(self, step: int, metrics: Metrics) -> None:
        coordinator = self._trainer._run.coordinator
        account = {end: metrics[f"episodes/{end}"] for end in ENDS}
        assert metrics["episodes/dispatched"] == sum(account.values()), account
        self.held.append(coordinator.in_flight + coordinator.waiting)
        if not account["failed"]:  # else some of the episodes that wait are settled already
            assert account["pending"] == self._group_size * self.held[-1], account


def trained_groups(backend: NullBackend) -> list[list[int]]:
    """The groups of each optimizer step."""
    return [sorted({sample.group_id for sample in samples}) for _, samples in backend.steps]


def check(ran: Ran, steps: int, bound: int, policy: str) -> None:
    """What holds in every schedule."""
    backend = ran.backend
    assert ran.result.steps == steps == len(backend.steps)
    assert [row["step"] for row in ran.rows] == list(range(1, steps + 1))
    assert backend.synced == list(range(steps + 1))
    assert [row["staleness/max"] for row in ran.rows] == backend.ages
    assert all(row.get("drift/same_version", 0.0) == 0.0 for row in ran.rows)  # sampler and learner agree to the bit
    if policy in ("drop", "wait", "mask") or not bound:
        assert max(backend.ages) <= bound
    rows = Counter(sample.group_id for sample in backend.rows)
    assert max(rows.values()) <= 2  # the two rollouts of a group, once


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("bound", [0, 1, 4])
def test_every_schedule_makes_its_steps_and_accounts_for_every_episode(tmp_path: Path, policy: str, bound: int) -> None:
    for number, trainer in enumerate(schedules(max_staleness=bound, staleness=policy)):
        watcher = Watcher()
        ran = null_run(tmp_path / str(number), null=Null(heavy_tail, 1.5), callbacks=[watcher], trainer=trainer)
        check(ran, 6, bound, policy)
        engine = ran.backend.engine
        assert len(watcher.held) == 6
        if not (bound and trainer["partial_rollouts"]):  # no sequence has seen a change of weights
            assert all(len(set(compress(row.versions, row.loss_mask))) == 1 for row in ran.backend.rows)
        assert (engine.tokens_while_learning > 0) == (bound > 0 or trainer["stream"])
        assert engine.caches_released == (6 if not bound and engine.shares_weights and not trainer["stream"] else 0)


@examples
@given(
    seed=st.integers(0, 10**6),
    policy=st.sampled_from(["drop", "wait", "mask"]),
    bound=st.integers(0, 4),
    batch_size=st.integers(1, 4),
    partial=st.booleans(),
    stream=st.booleans(),
    placement=st.sampled_from(["colocate", "separate"]),
    order=st.sampled_from(["fifo", "oldest_version", "newest"]),
    learn_s=st.sampled_from([0.0, 0.5, 5.0]),
)
def test_no_token_older_than_the_bound_is_trained_whatever_the_delays(
    seed: int, policy: str, bound: int, batch_size: int, partial: bool, stream: bool, placement: str, order: str,
    learn_s: float,
) -> None:  # fmt: skip
    def takes_s(request: int) -> float:
        return min(random.Random(request ^ seed).paretovariate(0.7), 500.0)

    trainer = {"steps": 15, "batch_size": batch_size, "max_staleness": bound, "staleness": policy, "stream": stream,
               "partial_rollouts": partial, "placement": placement}  # fmt: skip
    with TemporaryDirectory() as folder:
        ran = null_run(
            Path(folder), null=Null(takes_s, learn_s), callbacks=[Watcher()], trainer=trainer,
            produce={"order": order}, rollout={"timeout_s": 1e4},
        )  # fmt: skip
    check(ran, 15, bound, policy)


def test_synchronous_every_placement_and_piecing_trains_the_same_rows(tmp_path: Path) -> None:
    runs = [
        null_run(tmp_path / f"{number}", null=Null(heavy_tail, 1.0), trainer=trainer, run={"deterministic": True})
        for number, trainer in enumerate(schedules(max_staleness=0))
    ]
    assert len({tuple(ran.backend.rows) for ran in runs}) == 1


def test_a_policy_of_one_bound_gives_the_same_run_each_time(tmp_path: Path) -> None:
    trainer = {"max_staleness": 2, "placement": "separate"}
    runs = [null_run(tmp_path / name, null=Null(heavy_tail, 1.0), trainer=trainer) for name in ("one", "two")]
    assert runs[0].backend.rows == runs[1].backend.rows


def test_drop_starts_others_in_place_of_what_it_throws_away(tmp_path: Path) -> None:
    trainer = {"steps": 20, "max_staleness": 1, "staleness": "drop", "placement": "separate"}
    ran = null_run(tmp_path, null=Null(heavy_tail, 0.5), callbacks=[Watcher()], trainer=trainer)
    last = ran.rows[-1]
    assert last["episodes/stale"] > 0
    assert last["episodes/trained"] == 20 * 3 * 2


def test_trust_trains_old_rows_completely_while_the_policy_has_hardly_moved(tmp_path: Path) -> None:
    trainer = {"steps": 40, "max_staleness": 1, "placement": "separate"}
    ran = null_run(tmp_path, null=Null(heavy_tail, 0.1), trainer=trainer)
    old = [row for row in ran.rows if row.get("staleness/overage_rows")]
    assert ran.backend.scored and old and max(ran.backend.ages) > 1
    assert any(row["staleness/masked_tokens"] == 0 for row in old)


def test_wait_continues_after_steps_that_took_more_groups_than_their_batch_has(tmp_path: Path) -> None:
    trainer = {"steps": 60, "batch_size": 1, "max_staleness": 4, "staleness": "wait", "placement": "separate"}
    ran = null_run(tmp_path, null=Null(heavy_tail, 0.1), callbacks=[Watcher()], trainer=trainer)
    check(ran, 60, 4, "wait")
    assert max(map(len, trained_groups(ran.backend))) > 1


@pytest.mark.parametrize("policy", POLICIES)
def test_a_run_keeps_nothing_that_it_is_done_with(tmp_path: Path, policy: str) -> None:
    class Counts(Callback):
        def __init__(self) -> None:
            self.alive: list[int] = []

        def on_batch_end(self, step: int, metrics: Metrics) -> None:
            gc.collect()
            self.alive.append(sum(isinstance(thing, Episode) for thing in gc.get_objects()))

    counts = Counts()
    trainer = {"steps": 40, "max_staleness": 2, "staleness": policy, "placement": "separate"}
    null_run(tmp_path, null=Null(heavy_tail, 0.5, remembers=False), callbacks=[counts], trainer=trainer)
    # what runs ahead (at most twice, as slow groups are excused), what is trained, and what was just trained
    assert max(counts.alive) <= 2 * 3 * (2 * 3 + 2)


# ---- produce settings -----------------------------------------------------------------------------------------------


def most_running(tmp_path: Path, **produce: Any) -> int:
    """Groups that ran side by side at most, with batches of four and a bound of two."""
    trainer = {"batch_size": 4, "max_staleness": 2, "staleness": "count", "placement": "separate"}
    null = Null(heavy_tail, 1.0)
    watcher = Watcher()
    null_run(tmp_path / "run", null=null, callbacks=[watcher], trainer=trainer, produce=produce)
    assert max(watcher.held) <= produce.get("capacity", 12)
    return null.made[-1].engine.most_running // 2


def test_as_many_groups_run_as_over_sample_or_the_bound_allow(tmp_path: Path) -> None:
    assert most_running(tmp_path) == 12
    assert most_running(tmp_path / "half", over_sample=0.5) == 6
    assert most_running(tmp_path / "none", over_sample=0.0) == 4


def test_capacity_bounds_the_groups_that_run_or_wait(tmp_path: Path) -> None:
    assert most_running(tmp_path, capacity=5) == 5


def test_groups_are_trained_in_the_order_that_was_asked_for(tmp_path: Path) -> None:
    async def later_and_later(task: Task, model: Model) -> float:
        await asyncio.sleep(int(task.id.split()[1]) / 10)
        return await scattered(task, model)

    def order(name: str) -> list[int]:
        trainer = {"steps": 5, "batch_size": 1, "max_staleness": 3, "staleness": "count", "placement": "separate"}
        ran = null_run(
            tmp_path / name, later_and_later, null=Null(learn_s=9.0), trainer=trainer, produce={"order": name},
            data={"shuffle": False},
        )  # fmt: skip
        return [group for groups in trained_groups(ran.backend) for group in groups]

    assert order("fifo") == order("oldest_version") == [0, 1, 2, 3, 4]
    assert order("newest") == [0, 3, 4, 2, 1]  # the first as soon as it is there; then what became whole last


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_group_is_reused_as_often_as_allowed_and_no_more(tmp_path: Path, policy: str, stream: bool) -> None:
    trainer = {"steps": 12, "batch_size": 6, "max_staleness": 3, "staleness": policy, "stream": stream}
    ran = null_run(tmp_path, null=Null(heavy_tail, 1.0), callbacks=[Watcher()], trainer=trainer, produce={"reuse": 3})
    steps = trained_groups(ran.backend)
    uses = Counter(group for groups in steps for group in groups)
    assert max(uses.values()) == 3
    assert max(map(len, steps)) >= 6
    assert ran.rows[-1]["episodes/trained"] == 2 * len(uses)  # counted once
    # 2 episodes of 5 tokens at most of each group that is new: what is trained again was not generated again
    for row in ran.rows if policy != "wait" else ():
        assert row["tokens/generated"] <= 5 * (12 - row["episodes/reused"])


def test_rewards_are_reported_as_they_were_before_filters(tmp_path: Path) -> None:
    async def mostly_uniform(task: Task, model: Model) -> float:
        reward = await scattered(task, model)
        return reward if int(task.id.split()[1]) % 3 else 50.0

    ran = null_run(tmp_path, mostly_uniform, filters={"drop_uniform": True}, trainer={"steps": 4})
    assert all(row["reward/mean"] < 10 for row in ran.rows)
    assert max(row["reward/before_filters/mean"] for row in ran.rows) > 10
    plain = null_run(tmp_path / "plain", trainer={"steps": 4})
    assert [row["reward/before_filters/mean"] for row in plain.rows] == [row["reward/mean"] for row in plain.rows]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("batch_size", "reuse", "bound"), [(8, 2, 1), (5, 2, 1), (6, 3, 2), (6, 3, 4)])
@pytest.mark.parametrize("policy", ["wait", "drop", "count"])
def test_a_batch_is_full_though_nothing_can_be_reused(
    tmp_path: Path, policy: str, batch_size: int, reuse: int, bound: int, stream: bool
) -> None:
    trainer = {"steps": 9, "batch_size": batch_size, "max_staleness": bound, "staleness": policy, "stream": stream}
    for number, produce in enumerate(({}, {"over_sample": 0.25}, {"capacity": batch_size})):
        ran = null_run(
            tmp_path / str(number), null=Null(heavy_tail, 1.0), callbacks=[Watcher()], trainer=trainer,
            produce={"reuse": reuse, **produce},
        )  # fmt: skip
        steps = trained_groups(ran.backend)
        assert len(steps) == 9 and min(map(len, steps)) >= batch_size
        assert policy == "wait" or max(map(len, steps)) == batch_size  # what is due comes on top
        seen: set[Any] = set()
        for row, groups in zip(ran.rows, steps, strict=True):
            assert row["episodes/reused"] == 2 * len(seen & set(groups))
            seen |= set(groups)
        assert policy != "count" or sum(row["episodes/reused"] for row in ran.rows) > 0


# ---- batches --------------------------------------------------------------------------------------------------------


def test_two_updates_per_batch_are_two_steps_and_one_version(tmp_path: Path) -> None:
    for number, trainer in enumerate(schedules(stream=None, updates_per_batch=2, staleness="wait", steps=5)):
        ran = null_run(tmp_path / str(number), null=Null(heavy_tail, 1.0), callbacks=[Watcher()], trainer=trainer)
        assert len(ran.backend.steps) == ran.result.steps == 5
        assert [row["step"] for row in ran.rows] == [2, 4, 5]
        assert ran.backend.synced == [0, 1, 2, 3]
        assert max(ran.backend.ages) <= trainer["max_staleness"]


def test_a_batch_of_fewer_rows_than_updates_makes_fewer_and_the_run_continues(tmp_path: Path) -> None:
    ran = null_run(tmp_path, trainer={"steps": 8, "batch_size": 1, "updates_per_batch": 3})
    assert len(ran.backend.steps) == ran.result.steps == 8
    assert [row["step"] for row in ran.rows] == [2, 4, 6, 8]  # two rows each


def test_groups_that_are_reused_take_part_in_every_update_of_their_batch(tmp_path: Path) -> None:
    trainer = {"steps": 8, "batch_size": 4, "updates_per_batch": 2, "max_staleness": 1, "staleness": "count"}
    ran = null_run(tmp_path, trainer=trainer, produce={"reuse": 2})
    assert [len(samples) for _, samples in ran.backend.steps[2:]] == [4] * 6  # half of 8 rows


def test_a_short_last_batch_of_an_epoch_is_trained_short_when_synchronous(tmp_path: Path) -> None:
    ran = null_run(tmp_path, scattered, some_tasks(7), data={"drop_last": False})
    assert [row["batch/rows"] for row in ran.rows] == [6, 6, 2, 6, 6, 2]


@pytest.mark.parametrize("policy", POLICIES)
def test_short_batches_leave_no_step_without_groups(tmp_path: Path, policy: str) -> None:
    for number, trainer in enumerate(schedules(staleness=policy, steps=9, max_staleness=2)):
        ran = null_run(
            tmp_path / str(number), scattered, some_tasks(7), null=Null(heavy_tail, 1.0), callbacks=[Watcher()],
            trainer=trainer, data={"drop_last": False},
        )  # fmt: skip
        assert ran.result.steps == 9


@pytest.mark.parametrize("policy", POLICIES)
def test_uniform_groups_are_replaced_and_counted(tmp_path: Path, policy: str) -> None:
    async def often_uniform(task: Task, model: Model) -> float:
        reward = await scattered(task, model)
        return reward if int(task.id.split()[1]) % 3 else 1.0

    for number, trainer in enumerate(schedules(staleness=policy)):
        ran = null_run(
            tmp_path / str(number), often_uniform, null=Null(heavy_tail, 1.0), callbacks=[Watcher()],
            trainer=trainer, filters={"drop_uniform": True},
        )  # fmt: skip
        assert ran.result.steps == 6
        assert ran.rows[-1]["episodes/filtered"] > 0
        assert all(int(sample.task_id.split()[1]) % 3 for sample in ran.backend.rows)


def test_partly_solved_tasks_are_looked_for_beside_reuse(tmp_path: Path) -> None:
    async def seldom_partly_solved(task: Task, model: Model) -> float:
        reward = await scattered(task, model)
        return reward if int(task.id.split()[1]) % 4 == 0 else 1.0

    trainer = {"batch_size": 4, "max_staleness": 2, "placement": "separate"}
    ran = null_run(
        tmp_path, seldom_partly_solved, null=Null(heavy_tail, 1.0), callbacks=[Watcher()], trainer=trainer,
        produce={"reuse": 2}, filters={"min_partial_tasks": 2},
    )  # fmt: skip
    fresh = set[int]()
    for (_, samples), groups in zip(ran.backend.steps, trained_groups(ran.backend), strict=True):
        partly = {s.task_id for s in samples if s.group_id not in fresh and int(s.task_id.split()[1]) % 4 == 0}
        assert len(partly) >= 2
        assert len(groups) <= max(4, len(set(groups) - fresh))  # what is trained again only fills the batch up
        fresh |= set(groups)


# ---- interrupted runs -----------------------------------------------------------------------------------------------


class At(Callback):
    """Does something after a step."""

    def __init__(self, step: int, act: Callable[[TrainerHandle], None]) -> None:
        self._step, self._act = step, act

    def on_train_start(self, trainer: TrainerHandle) -> None:
        self._trainer = trainer

    def on_batch_end(self, step: int, metrics: Metrics) -> None:
        if step == self._step:
            self._act(self._trainer)


def crash(trainer: TrainerHandle) -> None:
    raise ConnectionError("the machine is gone")


def state_of(run_dir: Path) -> dict[str, Any]:
    return json.loads((list_checkpoints(run_dir)[-1] / "trainer.json").read_text())


def drawn(state: dict[str, Any], tasks: Sequence[Task], batch_size: int) -> Counter[str]:
    """How often each task was drawn, up to the position that a checkpoint has."""
    sampler, (last, place) = TaskSampler(tasks, batch_size), state["sampler_position"]
    positions = [(epoch, i) for epoch in range(last + 1) for i in range(place if epoch == last else len(tasks))]
    return Counter(sampler.draw_at(position).task.id for position in positions)


def unfinished(state: dict[str, Any], tasks: Sequence[Task], batch_size: int) -> Counter[str]:
    sampler = TaskSampler(tasks, batch_size)
    return Counter(sampler.draw_at((epoch, place)).task.id for _, (epoch, place) in state["unfinished"])


@pytest.mark.parametrize("ledger", [False, True])
@pytest.mark.parametrize("policy", ["count", "wait"])
def test_a_resumed_run_trains_every_task_that_was_unfinished(tmp_path: Path, policy: str, ledger: bool) -> None:
    """A crash at step 5 goes back to the checkpoint of step 4; a stop at step 7 saves there."""
    tasks, steps = some_tasks(11), {"steps": 16, "save_every": 2, "save_last": True}
    for number, trainer in enumerate(schedules(max_staleness=2, staleness=policy, **steps)):
        folder, null = tmp_path / str(number), Null(heavy_tail, 1.0)
        given: dict[str, Any] = {"trainer": trainer, "data": {"drop_last": False}, "null": null}
        given["ledger"] = {"enabled": ledger}
        with pytest.raises(ConnectionError):
            null_run(folder, scattered, tasks, callbacks=[At(5, crash)], **given)
        assert state_of(folder / "run")["step"] == 4
        stopped = null_run(folder, scattered, tasks, callbacks=[At(7, lambda t: t.stop())], **given)
        assert stopped.result.interrupted and stopped.result.steps == 7
        before = state_of(folder / "run")
        assert before["unfinished"]
        whole = null_run(folder, scattered, tasks, callbacks=[Watcher()], **given)
        assert whole.result.steps == 16 == whole.backend.weights and not whole.result.interrupted
        lineage = [*null.made[0].steps[:4], *stopped.backend.steps, *whole.backend.steps]
        if ledger:  # step 5 was recorded before it was made, and is made again just so
            assert stopped.backend.steps[0] == null.made[0].steps[4]
        groups = Counter((sample.group_id, sample.task_id) for _, samples in lineage for sample in samples)
        assert max(groups.values()) == 2  # its two rollouts, once
        assert {group for group, _ in before["unfinished"]} <= {sample.group_id for sample in whole.backend.rows}
        state = state_of(folder / "run")
        assert Counter(task for _, task in groups) + unfinished(state, tasks, 3) == drawn(state, tasks, 3)


def test_a_stopped_synchronous_run_resumes_to_the_same_rows(tmp_path: Path) -> None:
    for number, trainer in enumerate(schedules(max_staleness=0, staleness="count", steps=6)):
        given: dict[str, Any] = {"trainer": trainer, "null": Null(heavy_tail, 1.0), "run": {"deterministic": True}}
        one = null_run(tmp_path / f"{number} whole", **given)
        two = null_run(tmp_path / f"{number} cut", callbacks=[At(3, lambda t: t.stop())], **given)
        three = null_run(tmp_path / f"{number} cut", **given)
        assert one.backend.rows == [*two.backend.rows, *three.backend.rows]
        assert [row["step"] for row in three.rows] == [1, 2, 3, 4, 5, 6]
