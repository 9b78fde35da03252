"""The advantages that were trained with: in the ledger, one body per batch, and in what is exported from it."""

from __future__ import annotations

import json
import math
import sqlite3
import struct
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from itertools import compress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crash_checks import rows as ask
from crash_scenarios import RememberingNull
from headrace import Task, Trajectory, TrajectoryGroup
from headrace.algorithms.advantages.assign import assign_advantages
from headrace.algorithms.batching import pack, to_samples
from headrace.config import LedgerSection, RunConfig
from headrace.config.loading import build_config
from headrace.data.episode import Episode, Step
from headrace.data.sample import Sample, TrainBatch
from headrace.evaluation.evaluate import config_of
from headrace.ledger import Ledger, LedgerReader, TrainedRow, schema
from headrace.ledger.export import export_episodes
from headrace.ledger.rows import pack_rows, unpack_rows
from headrace.rollout.model_client import Model
from headrace.scheduling.buffer import TrajectoryGroupBuffer
from headrace.tracking.metrics import MetricsAggregator
from headrace.trainer.callbacks import Callback, Metrics
from ledger_data import dispatch, play, simple_episode
from null_backend import Null, NullBackend, Ran, null_run, scattered, some_tasks

RECORDED: dict[str, Any] = {"ledger": {"enabled": True}}
ALGORITHM = build_config({}).algorithm

# ---- bodies ----------------------------------------------------------------------------------------------------------

numbers = st.floats() | st.sampled_from([0.0, -0.0, 0.1, math.nan])


@st.composite
def samples(draw: st.DrawFn) -> Sample:
    mask = draw(st.lists(st.sampled_from([0, 1]), min_size=1, max_size=6))
    alike = st.sampled_from([0.0, -0.0, 1 / 3]).map(lambda value: [value] * len(mask))
    advantages = draw(alike | st.lists(numbers, min_size=len(mask), max_size=len(mask)))
    zeros = (0.0,) * len(mask)
    row = Sample(tuple(range(len(mask) + 1)), tuple(mask), zeros, (0,) * len(mask), tuple(advantages))
    place = (draw(st.integers(0, 2**40)), draw(st.integers(-1, 70_000)))
    return replace(row, group_id=place[0], rollout_idx=place[1], role=draw(st.sampled_from(["agent", "ü\ud800", ""])))


def batch_of(rows: Sequence[Sample], together: int = 1) -> TrainBatch:
    return pack(rows, ALGORITHM, 100, together)


def bits(values: Sequence[float] | None) -> bytes | None:
    return None if values is None else struct.pack(f"{len(values)}d", *values)


@given(st.lists(st.lists(samples(), max_size=5), max_size=3))
def test_rows_come_back_to_the_bit(batches: list[list[Sample]]) -> None:
    found = unpack_rows(pack_rows([batch_of(batch) for batch in batches]))
    wanted = [row for batch in batches for row in batch]
    assert len(found) == len(wanted)
    for row, sample in zip(found, wanted, strict=True):
        assert (row.group_id, row.rollout_idx, row.role) == (sample.group_id, sample.rollout_idx, sample.role)
        assert row.tokens == sample.trained_tokens and row.preferred is None
        assert bits(row.advantages) == bits(tuple(compress(sample.advantages, sample.loss_mask)))


def test_a_long_row_of_one_advantage_takes_no_more_than_a_short_one() -> None:
    def size(tokens: int) -> int:
        row = Sample((1,) * (tokens + 1), (1,) * tokens, (0.0,) * tokens, (0,) * tokens, (1 / 3,) * tokens)
        return len(pack_rows([batch_of([replace(row, group_id=n) for n in range(20)])]))

    assert size(3000) == size(300) < 600


def test_rows_of_a_pair_have_no_advantages_but_a_side() -> None:
    row = Sample((1, 2), (1,), (0.0,), (0,), (0.0,), group_id=3, rollout_idx=1)
    found = unpack_rows(pack_rows([batch_of([row, replace(row, rollout_idx=0)], together=2)]))
    assert found == (TrainedRow(3, 1, "agent", 1, None, True), TrainedRow(3, 0, "agent", 1, None, False))


# ---- runs ------------------------------------------------------------------------------------------------------------


def exported(run_dir: Path, ending: str = "jsonl") -> list[dict[str, Any]]:
    out = run_dir / f"out.{ending}"
    with LedgerReader.read(run_dir) as reader:
        export_episodes(reader, out)
    if ending == "parquet":
        return pytest.importorskip("pyarrow.parquet").read_table(out).to_pylist()
    return [json.loads(line) for line in out.read_text().splitlines()]


def advantages_of(entry: dict[str, Any]) -> list[list[float]]:
    """Per row and token, however they are written."""
    if entry["advantage"] is None:
        return entry["advantages"]
    assert entry["advantages"] is None
    return [[entry["advantage"]] * tokens for tokens in entry["tokens"]]


def assigned(run_dir: Path) -> dict[tuple[int, int, int, str], list[list[float]]]:
    """What `assign_advantages` gives for the recorded episodes: by step, group, rollout and role."""
    config = config_of(run_dir)
    buffer = TrajectoryGroupBuffer(config)
    found: dict[tuple[int, int, int, str], list[list[float]]] = {}
    with LedgerReader.read(run_dir) as reader:
        for batch in reader.batches_from(0):
            formed = [buffer.form(group_id, reader.group(group_id)) for group_id in (*batch.group_ids, *batch.again)]
            groups = assign_advantages([group for one in formed for group in one.groups], config.algorithm)
            for row in to_samples(groups):
                values = list(compress(row.advantages, row.loss_mask))
                found.setdefault((batch.step, row.group_id, row.rollout_idx, row.role), []).append(values)
    return found


def check_export(run_dir: Path) -> list[dict[str, Any]]:
    """What is exported is what the recorded rewards give, once; the rows."""
    rows = exported(run_dir)
    found = [
        ((entry["step"] - 1, row["group_id"], row["rollout_idx"], entry["role"]), advantages_of(entry))
        for row in rows
        for entry in row["trained"]
    ]
    assert len(dict(found)) == len(found) and dict(found) == assigned(run_dir)
    assert all(bool(row["trained"]) == (row["decision"] == "trained") for row in rows)
    steps = ask(run_dir, "SELECT step FROM batches ORDER BY 1")
    assert steps and ask(run_dir, "SELECT step FROM batch_rows ORDER BY 1") == steps
    return rows


AHEAD = {"max_staleness": 2, "staleness": "wait", "placement": "separate"}
RUNS: dict[str, dict[str, Any]] = {
    "in step": {},
    "ahead, in pieces": {"trainer": AHEAD, "null": Null(lambda seed: 1.0 + seed % 7, 1.0)},
    "rloo": {"algorithm": {"estimator": "rloo"}},
    "whole batch": {"algorithm": {"estimator": "reinforce_plus_plus_baseline"}},
    "several updates": {"trainer": {"updates_per_batch": 2}},
}


def recorded_run(folder: Path, run: Any = scattered, **sections: Any) -> Ran:
    """A short run with a ledger."""
    return null_run(folder, run, some_tasks(9), **{**RECORDED, "rollout": {"group_size": 3}, **sections})


@pytest.mark.parametrize("name", RUNS)
def test_what_is_exported_is_what_the_recorded_rewards_give(tmp_path: Path, name: str) -> None:
    rows = check_export(recorded_run(tmp_path, **RUNS[name]).result.run_dir)
    entries = [entry for row in rows for entry in row["trained"]]
    assert len({entry["advantage"] for entry in entries}) > 2 and all(len(e["tokens"]) == 1 for e in entries)
    assert all(entry["advantages"] is None and entry["preferred"] is None for entry in entries)


def test_a_group_that_is_trained_again_reports_every_step(tmp_path: Path) -> None:
    ran = recorded_run(tmp_path, produce={"reuse": 2}, trainer={"batch_size": 4, **AHEAD})
    rows = check_export(ran.result.run_dir)
    steps = [[entry["step"] for entry in row["trained"]] for row in rows]
    assert max(map(len, steps)) == 2 and all(found == sorted(set(found)) for found in steps)
    trained_last = [(row["step"], found[-1]) for row, found in zip(rows, steps, strict=True) if found]
    assert all(step == last for step, last in trained_last)


class AfterTheStep(Callback):
    """As if the machine were gone."""

    def on_batch_end(self, step: int, metrics: Metrics) -> None:
        if step == 3:
            raise ConnectionError("the machine is gone")


class BeforeTheUpdate(RememberingNull):
    """The third batch is recorded, and its update not made."""

    def __call__(self, config: RunConfig) -> NullBackend:
        backend = super().__call__(config)
        update, made = backend.optim_step, 0

        async def optim_step(lr: float, grad_scale: float) -> MetricsAggregator:
            nonlocal made
            made += 1
            if made == 3:
                raise ConnectionError("the machine is gone")
            return await update(lr, grad_scale)

        backend.optim_step = optim_step
        return backend


@pytest.mark.parametrize("save_every", [0, 2])
@pytest.mark.parametrize(
    "crash", [{"callbacks": [AfterTheStep()]}, {"null": BeforeTheUpdate()}], ids=["after the step", "before the update"]
)
def test_after_a_crash_every_batch_is_reported_once_and_as_without_one(
    tmp_path: Path, crash: dict[str, Any], save_every: int
) -> None:
    def run(name: str, **given: Any) -> Path:
        trainer = {"steps": 5, "batch_size": 2, "save_every": save_every}
        return recorded_run(tmp_path / name, trainer=trainer, **{"null": RememberingNull(), **given}).result.run_dir

    with pytest.raises(ConnectionError):
        run("cut", **crash)
    (broken,) = (tmp_path / "cut").glob("*/ledger.sqlite")
    assert ask(broken.parent, "SELECT max(step) FROM batch_rows") == [(2,)]
    cut, whole = run("cut"), run("whole")
    check_export(cut)
    bodies = "SELECT step, body FROM batch_rows ORDER BY step"
    assert len(ask(cut, bodies)) == 5 and ask(cut, bodies) == ask(whole, bodies)
    with LedgerReader.read(cut) as reader:
        assert [process.resumed_from for process in reader.processes()] == [None, save_every]


async def own_advantages(task: Task, model: Model) -> Trajectory:
    """A workflow that says itself how good each token is; in its second conversation, all the same."""
    reply = await model.chat(task.messages)
    await model.chat([{"role": "user", "content": "Something else."}])
    (made,) = model.trajectories(reward=float(sum(reply.completion_ids) % 5))
    first, second = made.steps
    counted = tuple(place / 3 - 1 for place in range(len(first.response_ids)))
    steps = (replace(first, advantage=counted), replace(second, advantage=(0.1,) * len(second.response_ids)))
    return replace(made, steps=steps)


def test_advantages_that_differ_are_a_list_per_row(tmp_path: Path) -> None:
    ran = recorded_run(tmp_path, own_advantages, algorithm={"use_precomputed_advantage": True})
    rows = check_export(ran.result.run_dir)
    for row in rows:
        for entry in row["trained"]:
            steps = row["trajectories"][0]["steps"]
            assert entry["advantage"] is None and entry["advantages"] == [step["advantage"] for step in steps]
            assert entry["tokens"] == [len(step["response_ids"]) for step in steps]


async def two_roles(task: Task, model: Model) -> list[Trajectory]:
    reply = await model.chat(task.messages, role="solver")
    said = await model.chat(task.messages, role="critic")
    rewards = {"solver": float(sum(reply.completion_ids) % 5), "critic": float(sum(said.completion_ids) % 3)}
    return [replace(trajectory, reward=rewards[trajectory.name]) for trajectory in model.trajectories()]


def test_every_trained_role_reports_its_own(tmp_path: Path) -> None:
    both = check_export(recorded_run(tmp_path / "both", two_roles).result.run_dir)
    roles = [[entry["role"] for entry in row["trained"]] for row in both if row["trained"]]
    assert roles and all(found == ["solver", "critic"] for found in roles)
    algorithm = {"roles": {"critic": {"train": False}}}
    one = check_export(recorded_run(tmp_path / "one", two_roles, algorithm=algorithm).result.run_dir)
    assert {entry["role"] for row in one for entry in row["trained"]} == {"solver"}


async def two_turns(task: Task, model: Model) -> Trajectory:
    messages = list(task.messages)
    for _ in range(2):
        reply = await model.chat(messages)
        messages += [reply.message, {"role": "user", "content": "Go on."}]
    (made,) = model.trajectories()
    rewarded = [replace(step, reward=float(sum(step.response_ids) % 5)) for step in made.steps]
    return replace(made, steps=tuple(rewarded))


def test_steps_that_are_compared_on_their_own_are_rows_of_their_rollout(tmp_path: Path) -> None:
    rows = check_export(recorded_run(tmp_path, two_turns, workflow={"grouping": "by_step"}).result.run_dir)
    assert all(len(entry["tokens"]) == 2 for row in rows for entry in row["trained"])


def in_pairs(episodes: Sequence[Episode]) -> list[TrajectoryGroup]:
    """Two rollouts at a time, with the episodes' own trajectories."""
    pairs = [episodes[start : start + 2] for start in range(0, len(episodes), 2)]
    return [TrajectoryGroup("t", "agent", tuple(e.trajectories[0] for e in pair), pair[0].group_id) for pair in pairs]


def anonymous(episodes: Sequence[Episode]) -> list[TrajectoryGroup]:
    """A hook that makes trajectories anew, and does not say whose they are."""
    made = tuple(Trajectory(e.trajectories[0].steps, reward=e.trajectories[0].reward) for e in episodes)
    return [TrajectoryGroup("t", "agent", made)]


def test_a_hooks_groups_report_their_rollouts_unless_it_makes_trajectories_of_its_own(tmp_path: Path) -> None:
    def run(hook: str) -> Path:
        grouping = {"grouping": f"test_ledger_rows:{hook}"}
        sections = {"workflow": grouping, "rollout": {"group_size": 4}}
        return recorded_run(tmp_path / hook, **sections).result.run_dir

    check_export(run("in_pairs"))
    unknown = run("anonymous")
    assert all(row["trained"] is None for row in exported(unknown))
    with LedgerReader.read(unknown) as reader:
        found = reader.trained_rows(0) or ()
        assert found and all(row.rollout_idx == -1 and row.advantages for row in found)


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_preference_pairs_report_which_side_they_were(tmp_path: Path, ending: str) -> None:
    rows = exported(recorded_run(tmp_path, algorithm={"objective": "dpo"}).result.run_dir, ending)
    sides: dict[int, dict[bool, float]] = {}
    for row in rows:
        for entry in row["trained"]:
            assert entry["advantage"] is None and entry["advantages"] is None
            (side,) = entry["preferred"]
            sides.setdefault(row["group_id"], {})[side] = row["reward"]
    assert sides and all(found[True] > found[False] for found in sides.values())
    assert any(row["decision"] == "trained" and row["trained"] == [] for row in rows)  # of three, two are a pair


def test_demonstrations_have_advantage_one(tmp_path: Path) -> None:
    said = ({"role": "user", "content": "Well?"}, {"role": "assistant", "content": "Yes."})
    tasks = [Task(str(number), messages=said) for number in range(9)]
    null = Null(checks=False)  # its rows are to be sampled ones
    ran = null_run(tmp_path, None, tasks, null=null, algorithm={"objective": "sft"}, **RECORDED)
    found = [entry["advantage"] for row in exported(ran.result.run_dir) for entry in row["trained"]]
    assert len(found) == 6 * 3 and set(found) == {1.0}


def test_parquet_has_the_same_numbers(tmp_path: Path) -> None:
    ran = recorded_run(tmp_path, own_advantages, algorithm={"use_precomputed_advantage": True})
    one, two = (exported(ran.result.run_dir, ending) for ending in ("jsonl", "parquet"))
    assert [row["trained"] for row in one] == [row["trained"] for row in two]


# ---- the file --------------------------------------------------------------------------------------------------------


def rows_of(group_id: int, *advantages: float) -> tuple[TrainBatch, ...]:
    """A batch of one group with a rollout per advantage."""
    step = Step((1,), (2, 3))
    made = tuple(
        Trajectory((replace(step, advantage=(value,) * 2),), rollout_idx=number)
        for number, value in enumerate(advantages)
    )
    return (batch_of(to_samples([TrajectoryGroup("t", "agent", made, group_id)])),)


def test_a_replay_changes_nothing(tmp_path: Path) -> None:
    with Ledger.open(tmp_path) as ledger:
        ledger.batch(0, 0, [7], trained=rows_of(7, 0.25, -0.25))
        ledger.batch(0, 0, [7], trained=rows_of(7, 9.0, 9.0))
        found = ledger.trained_rows(0)
    assert found == tuple(TrainedRow(7, n, "agent", 2, (value, value)) for n, value in enumerate((0.25, -0.25)))


def record(ledger: Ledger, step: int, trained: Sequence[TrainBatch] = ()) -> None:
    """A step on the group of its number."""
    dispatch(ledger, step)
    play(ledger, simple_episode(step))
    ledger.batch(step, step, [step], trained=trained)
    ledger.decided(step, "trained", step=step, trained=1)
    ledger.committed(step, 1)


def make_version_one(folder: Path) -> None:
    """A ledger with the tables of the first version, and what they held of the same run."""
    with Ledger.open(folder) as ledger:
        record(ledger, 0)
    (folder / "ledger.sqlite").rename(folder / "newer.sqlite")
    with closing(sqlite3.connect(folder / "ledger.sqlite", isolation_level=None)) as older:
        for statement in schema.MIGRATIONS[0]:
            older.execute(statement)
        older.execute("ATTACH ? AS newer", (str(folder / "newer.sqlite"),))
        older.execute("DELETE FROM flushes")
        for (table,) in older.execute("SELECT name FROM main.sqlite_schema WHERE type = 'table'").fetchall():
            columns = ", ".join(name for (name,) in older.execute("SELECT name FROM pragma_table_info(?)", (table,)))
            older.execute(f"INSERT INTO main.{table} ({columns}) SELECT {columns} FROM newer.{table}")
        older.execute("PRAGMA main.journal_mode = WAL")
        older.execute(f"PRAGMA main.application_id = {schema.APPLICATION_ID}")
        older.execute("PRAGMA main.user_version = 1")


def test_a_ledger_of_version_one_is_resumed_and_does_not_know_the_older_advantages(tmp_path: Path) -> None:
    make_version_one(tmp_path)
    assert ask(tmp_path, "PRAGMA user_version") == [(1,)]
    assert [row["trained"] for row in exported(tmp_path)] == [None]
    assert ask(tmp_path, "PRAGMA user_version") == [(len(schema.MIGRATIONS),)]
    with Ledger.open(tmp_path) as ledger:
        assert ledger.group(0) == [simple_episode(0).episode] and ledger.account().trained == 1
        record(ledger, 1, rows_of(1, 0.5))
    told = [row["trained"] for row in exported(tmp_path)]
    assert told[0] is None and [(e["step"], e["advantage"], e["tokens"]) for e in told[1]] == [(2, 0.5, [2])]


def test_retention_drops_the_rows_of_old_steps(tmp_path: Path) -> None:
    with Ledger.open(tmp_path, LedgerSection(keep_steps=2)) as ledger:
        for step in range(6):
            record(ledger, step, rows_of(step, float(step)))
        ledger.prune(before_step=3)
        assert [ledger.trained_rows(step) is not None for step in range(6)] == [False] * 3 + [True] * 3
        ledger.prune(before_step=6)
    assert ask(tmp_path, "SELECT step FROM batch_rows") == [(4,), (5,)]
    rows = exported(tmp_path)
    assert [row["trained"] is None for row in rows] == [row["pruned"] for row in rows] == [True] * 4 + [False] * 2
