"""What the learner computed of trained tokens: recorded with the batch, read with the tokens of an episode."""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crash_checks import rows as ask
from headrace import Task
from headrace.algorithms.batching import pack, rows_of_shares, split
from headrace.config import LedgerSection
from headrace.config.loading import build_config
from headrace.data.episode import Episode, ModelOutput, Step, Trajectory
from headrace.data.sample import ClipState, LearnedShare, LearnerValues, Sample, TrainBatch
from headrace.errors import LedgerError
from headrace.ledger import Ledger, LedgerReader, schema
from headrace.ledger.audit import find_contradiction
from headrace.ledger.episode_tokens import TokenRow, episode_tokens
from headrace.ledger.tokens import pack_tokens, unpack_tokens
from headrace.rollout.model_client import Model
from null_backend import Ran, logprob, null_run, scattered, some_tasks

ALGORITHM = build_config({}).algorithm
SHORT: dict[str, Any] = {"ledger": {"enabled": True}, "rollout": {"group_size": 3}}


# ---- bodies ----------------------------------------------------------------------------------------------------------

logprobs = st.floats(width=32, max_value=0, allow_nan=False) | st.sampled_from([-0.0, 0.1, -math.inf])


@st.composite
def learned_batches(draw: st.DrawFn) -> TrainBatch:
    masks = draw(st.lists(st.lists(st.sampled_from([0, 1]), min_size=1, max_size=7), min_size=1, max_size=4))
    samples = [
        Sample(tuple(range(len(m) + 1)), tuple(m), (0.0,) * len(m), (0,) * len(m), (0.0,) * len(m)) for m in masks
    ]
    counts = [sum(mask) for mask in masks]
    rows: list[Any] = [
        tuple(tuple(draw(st.lists(kind, min_size=n, max_size=n))) for n in counts)
        for kind in (logprobs, st.floats(0, 12, width=16), st.sampled_from(list(ClipState)))
    ]
    known: Any = draw(st.sampled_from([rows, [rows[0], (), ()], [rows[0], (), rows[2]]]))
    return replace(pack(samples, ALGORITHM, 100), learned=LearnerValues(*known))


@given(st.lists(learned_batches(), min_size=1, max_size=3))
def test_values_come_back(batches: list[TrainBatch]) -> None:
    found = list(unpack_tokens(pack_tokens(batches)))
    samples = [sample for batch in batches for sample in batch.samples]
    assert [place for place, _ in found] == list(range(len(samples)))
    assert [row.mask for _, row in found] == [sample.loss_mask for sample in samples]
    values = [batch.learned for batch in batches if batch.learned]
    assert [repr(row.logprobs) for _, row in found] == [repr(row) for one in values for row in one.logprobs]
    for name in ("entropies", "clip_states"):
        rows = [row for one in values for row in getattr(one, name)]
        if len(rows) == len(samples):
            assert [getattr(row, name) for _, row in found] == rows
        else:  # one backend that does not know them leaves out all
            assert {getattr(row, name) for _, row in found} == {None}


@pytest.mark.parametrize("together", [1, 2])
@pytest.mark.parametrize("shares", [2, 3, 9])
def test_a_share_has_the_rows_that_it_says(shares: int, together: int) -> None:
    rows = [Sample((1, number), (1,), (0.0,), (0,), (0.0,)) for number in range(8)]
    whole = pack(rows, ALGORITHM, 100, together)
    made = split(whole, ALGORITHM, 100, shares)
    places = rows_of_shares(whole, shares)
    assert [list(one.samples) for one in made] == [[rows[place] for place in share] for share in places]
    assert sorted(place for share in places for place in share) == list(range(8))


# ---- runs ------------------------------------------------------------------------------------------------------------


def token_rows(reader: LedgerReader, step: int | None = None) -> list[tuple[int, int, TokenRow]]:
    """Of all episodes that were trained."""
    return [
        (record.episode.group_id, record.episode.rollout_idx, row)
        for record in list(reader.episodes())
        if record.decision == "trained"
        for row in episode_tokens(reader, record, step)
    ]


def check_trained(row: TokenRow, weights: float) -> None:
    """What the null backend computes at these weights; whatever was not sampled was not trained."""
    assert len({len(column) for column in (row.ids, row.steps, row.sampled, row.trained, row.entropies)}) == 1
    for place, trained in enumerate(row.trained):
        expected = logprob(row.ids[place], weights) if trained else None
        assert trained == row.sampled[place]
        assert row.learner_logprobs[place] == expected
        assert (row.advantages[place] is None) == (not trained)
        if expected is None:
            assert row.ratios[place] is row.entropies[place] is row.clip_states[place] is None
            continue
        sampler, ratio = row.logprobs[place], row.ratios[place]
        assert sampler is not None and ratio == pytest.approx(math.exp(expected - sampler))
        assert row.entropies[place] == pytest.approx(expected / 2 + weights, rel=2e-3, abs=1e-3)
        assert row.clip_states[place] == ("clipped" if expected < -3 else "kept")


def run(folder: Path, agent: Any = scattered, **sections: Any) -> Ran:
    return null_run(folder, agent, some_tasks(9), **{**SHORT, **sections})


@pytest.mark.parametrize("stream", [False, True])
def test_every_trained_token_has_what_the_learner_computed(tmp_path: Path, stream: bool) -> None:
    ran = run(tmp_path, trainer={"steps": 4, "batch_size": 2, "stream": stream})
    with LedgerReader.read(ran.result.run_dir) as reader:
        found = token_rows(reader)
        assert len(found) >= 4 * 2 * 2
        for group_id, _, row in found:
            check_trained(row, weights=float(reader.steps_of(group_id)[-1]))


def test_several_updates_are_recorded_share_by_share(tmp_path: Path) -> None:
    ran = run(tmp_path, trainer={"steps": 4, "batch_size": 2, "updates_per_batch": 2})
    with LedgerReader.read(ran.result.run_dir) as reader:
        assert ask(ran.result.run_dir, "SELECT step, part FROM batch_tokens ORDER BY 1, 2") == [
            (0, 0), (0, 1), (2, 0), (2, 1),
        ]  # fmt: skip
        for step in (0, 2):
            rows = reader.learner_rows(step)
            places = rows_of_shares(
                pack([Sample((1, 2), (1,), (0.0,), (0,), (0.0,))] * len(rows or ()), ALGORITHM, 9), 2
            )
            assert rows is not None and None not in rows
            for made, share in enumerate(places):
                for place in share:
                    row = rows[place]
                    assert row is not None and row.entropies is not None
                    # entropy = log-probability / 2 + weights: which tells the update that it comes from
                    assert {round(e - p / 2) for e, p in zip(row.entropies, row.logprobs, strict=True)} == {step + made}


async def two_turns(task: Task, model: Model) -> float:
    first = await model.chat([{"role": "user", "content": "one"}])
    await model.chat([{"role": "user", "content": "one"}, first.message, {"role": "user", "content": "two"}])
    reply = await model.chat([{"role": "user", "content": "something else"}])
    return float(len(reply.text) % 3)


def test_a_broken_prefix_is_a_row_of_its_own(tmp_path: Path) -> None:
    ran = run(tmp_path, two_turns)
    with LedgerReader.read(ran.result.run_dir) as reader:
        found = token_rows(reader)
        by_episode: dict[tuple[int, int], list[TokenRow]] = {}
        for group_id, rollout, row in found:
            by_episode.setdefault((group_id, rollout), []).append(row)
        assert by_episode
        for rows in by_episode.values():
            assert [(row.broken, sorted({*row.steps})) for row in rows] == [(False, [0, 1]), (True, [2])]


def test_tokens_that_the_staleness_policy_masks_are_not_trained(tmp_path: Path) -> None:
    record_one(tmp_path, mask=(0, 0, 1, 1), sampled=4)
    with LedgerReader.read(tmp_path) as reader:
        record = reader.episode_record(0, 0)
        assert record is not None
        (row,) = episode_tokens(reader, record)
        assert row.sampled == (False, True, True, True, True)
        assert row.trained == (False, False, False, True, True)
        assert row.learner_logprobs == (None, None, None, -1.0, -2.0)
        assert row.advantages == (None, None, None, 0.5, 0.5)


def record_one(folder: Path, mask: Sequence[int], sampled: int, steps: int = 1, **changes: Any) -> None:
    """A ledger with one episode, a prompt token and so many sampled ones, that was trained at each step."""
    ids = tuple(range(10, 10 + sampled))
    said = ModelOutput("x", (7,), ids, (-0.5,) * sampled, (-0.5,) * sampled, (0,) * sampled)
    episode = Episode("t", (Trajectory((Step.from_model_output(said, []),), reward=1.0),))
    with Ledger.open(folder, LedgerSection(**changes)) as ledger:
        ledger.dispatched(0, (0, 0), "t", "default", 1, 0)
        ledger.started(0, 0, 0, 1)
        ledger.called(0, 0, 0, said, role="agent", seed=1, request_digest="", messages=[])
        ledger.finished(episode)
        for step in range(steps):
            ledger.batch(step, step, [0] if step == 0 else [], [0] if step else [], trained=[batch(mask)])
            ledger.decided(0, "trained", step=step, trained=1)
            ledger.committed(step, 1)
        ledger.prune(before_step=steps)


def batch(mask: Sequence[int]) -> TrainBatch:
    size = len(mask)
    row = Sample((7, *range(10, 10 + size)), tuple(mask), (-0.5,) * size, (0,) * size, (0.5,) * size, rollout_idx=0)
    values = tuple(-float(place + 1) for place in range(sum(mask)))
    return replace(pack([row], ALGORITHM, 100), learned=LearnerValues((values,)))


# ---- the file --------------------------------------------------------------------------------------------------------


def test_a_repeated_step_stays_as_it_was_recorded(tmp_path: Path) -> None:
    record_one(tmp_path, (1, 1), 2)
    with Ledger.open(tmp_path) as ledger:
        other = replace(batch((1, 1)), learned=LearnerValues(((-9.0, -9.0),)))
        ledger.batch(0, 0, [0], trained=[other])
        ledger.learned(0, 0, LearnedShare((0,), other))
        (row,) = ledger.learner_rows(0) or (None,)
        assert row is not None and row.logprobs == (-1.0, -2.0) and row.entropies is row.clip_states is None


def test_retention_drops_them_with_the_rows(tmp_path: Path) -> None:
    record_one(tmp_path, (1, 1), 2, steps=5, keep_steps=2)
    assert ask(tmp_path, "SELECT step FROM batch_tokens") == [(3,), (4,)]
    with LedgerReader.read(tmp_path) as reader:
        assert [reader.learner_rows(step) is None for step in range(5)] == [True] * 3 + [False] * 2


def test_a_ledger_of_an_older_program_has_none_and_goes_on(tmp_path: Path) -> None:
    record_one(tmp_path, (1, 1), 2)
    with closing(sqlite3.connect(tmp_path / "ledger.sqlite")) as older:
        older.executescript("DROP TABLE batch_tokens; PRAGMA user_version = 5")
    with Ledger.open(tmp_path) as ledger:
        assert ask(tmp_path, "PRAGMA user_version") == [(len(schema.MIGRATIONS),)]
        assert ledger.learner_rows(0) is None
        record = ledger.episode_record(0, 0)
        assert record is not None
        (row,) = episode_tokens(ledger, record)
        assert row.trained == (False, True, True) and row.advantages == (None, 0.5, 0.5)
        assert {*row.learner_logprobs} == {None}


def test_damage_is_reported_with_its_step(tmp_path: Path) -> None:
    record_one(tmp_path, (1, 1), 2)
    with closing(sqlite3.connect(tmp_path / "ledger.sqlite")) as ours:
        ((body,),) = ours.execute("SELECT body FROM batch_tokens").fetchall()
        ours.execute("UPDATE batch_tokens SET body = ?", (body[:-1] + bytes([body[-1] ^ 1]),))
        ours.commit()
    with LedgerReader.read(tmp_path) as reader:
        with pytest.raises(LedgerError, match=r"the learner's values of the batch of step 1: its checksum differs"):
            reader.learner_rows(0)
        assert reader.trained_rows(0) is not None


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ("DELETE FROM batch_rows", "there are the learner's values of a batch of step 1, and no rows"),
        ("UPDATE batch_rows SET step = 3", "there are rows of a batch of step 4, and no batch"),
    ],
)
def test_the_audit_finds_what_belongs_to_nothing(tmp_path: Path, change: str, found: str) -> None:
    record_one(tmp_path, (1, 1), 2)
    with closing(sqlite3.connect(tmp_path / "ledger.sqlite")) as ours:
        assert find_contradiction(lambda query, values: ours.execute(query, tuple(values)).fetchall()) is None
        ours.execute(change)
        assert find_contradiction(lambda query, values: ours.execute(query, tuple(values)).fetchall()) == found
