"""What must hold of a run that was killed and gone on with, looked at from outside: its files alone."""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from itertools import accumulate
from pathlib import Path
from typing import Any

from headrace.config import RunConfig
from headrace.evaluation.evaluate import config_of
from headrace.ledger import LedgerReader
from headrace.run.checkpoint import TrainerState, list_checkpoints

ENDS = ("trained", "filtered", "failed", "stale", "pending")

_PASSING = (
    "time/",
    "utilisation/",
    "memory/",
    "bias/",
    "reward/before_filters/",
    "episodes/dispatched",
    "episodes/filtered",
    "episodes/pending",
)
"""Metrics of the process, and not of what was trained; and counts that know more when a step is made again."""

_SAME = (
    "SELECT step, steps, version FROM batches ORDER BY 1",
    "SELECT b.step, b.place, b.group_id, again, epoch, g.place FROM batch_groups b JOIN groups g USING (group_id) "
    "ORDER BY 1, 2",
    "SELECT group_id, epoch, place, state, trained, filtered, failed FROM groups ORDER BY 1",
    "SELECT step, body FROM batch_rows ORDER BY 1",
    "SELECT step, part, body FROM batch_tokens ORDER BY 1, 2",
    "SELECT version, fingerprint, step FROM publications ORDER BY 1",
    "SELECT step, name, metrics FROM evaluations ORDER BY 1, 2",
    "SELECT group_id, rollout_idx, reward, termination FROM episodes WHERE state = 'finished' ORDER BY 1, 2",
)


def check_run(run_dir: Path, tasks: int) -> None:
    """A finished run: nothing lost, nothing trained twice, every step and evaluation told once."""
    assert (run_dir / "finished").exists()
    assert not list((run_dir / "checkpoints").glob(".*"))
    config = config_of(run_dir)
    check_account(run_dir)
    check_tasks(run_dir, config, tasks)
    check_batches(run_dir, config)
    check_tokens(run_dir, config)
    check_metrics(run_dir, config)
    check_evaluations(run_dir, config)


def check_account(run_dir: Path) -> None:
    """Every dispatched episode is in one place, by the counts and by the groups themselves."""
    with LedgerReader.read(run_dir) as ledger:
        account = asdict(ledger.account())
    assert account["dispatched"] == sum(account[end] for end in ENDS), account
    (found,) = rows(run_dir, "SELECT sum(size), sum(trained), sum(filtered), sum(failed), sum(stale) FROM groups")
    assert found == tuple(account[key] for key in ("dispatched", *ENDS[:4])), account
    assert rows(run_dir, "PRAGMA integrity_check") == [("ok",)]


def check_tasks(run_dir: Path, config: RunConfig, tasks: int) -> None:
    """The tasks that were dispatched are the beginning of the stream, without gaps, each under one id."""
    found = rows(run_dir, "SELECT group_id, epoch, place FROM groups ORDER BY 1")
    assert [row[0] for row in found] == list(range(len(found)))
    places = sorted(row[1:] for row in found)
    assert len(set(places)) == len(places)
    if not config.data.drop_last:  # else a gap may be where an epoch ends
        assert places == [divmod(number, tasks) for number in range(len(found))]


def check_batches(run_dir: Path, config: RunConfig) -> None:
    """As many optimizer steps as were asked for, one batch after the other, and no group fresh in two of them."""
    batches = rows(run_dir, "SELECT step, steps FROM batches ORDER BY 1")
    assert all(made is not None for _, made in batches), batches
    ends = list(accumulate(made for _, made in batches))
    assert [step for step, _ in batches] == [0, *ends[:-1]] and ends[-1] == config.trainer.steps
    trained = [group for (group,) in rows(run_dir, "SELECT group_id FROM batch_groups WHERE NOT again")]
    assert len(set(trained)) == len(trained), Counter(trained).most_common(3)
    assert sorted(trained) == [g for (g,) in rows(run_dir, "SELECT group_id FROM groups WHERE state = 'trained'")]
    uses = Counter(group for (group,) in rows(run_dir, "SELECT group_id FROM batch_groups"))
    assert max(uses.values()) <= config.produce.reuse
    versions = rows(run_dir, "SELECT version, step FROM publications ORDER BY 1")
    assert versions == [(version + 1, end) for version, end in enumerate(ends)]


def check_tokens(run_dir: Path, config: RunConfig) -> None:
    """What the learner computed is there for every row of every batch that is kept."""
    with LedgerReader.read(run_dir) as ledger:
        kept = [step for (step,) in ledger.rows("SELECT step FROM batch_rows ORDER BY 1")]
        assert kept and (config.ledger.keep_steps or len(kept) == ledger.batch_count())
        for step in kept:
            found = ledger.learner_rows(step)
            assert found is not None and None not in found, step


def check_metrics(run_dir: Path, config: RunConfig) -> None:
    """Every step once, in metrics.jsonl and for TensorBoard; the account and the bound hold at each."""
    told = metrics(run_dir)
    ends = accumulate(made for (made,) in rows(run_dir, "SELECT steps FROM batches ORDER BY step"))
    first = [0] if config.eval.sets and config.eval.before else []  # with an evaluation before the first step
    assert [row["step"] for row in told] == [*first, *ends]
    steps = told[len(first) :]
    for row in steps:
        assert row["episodes/dispatched"] == sum(row[f"episodes/{end}"] for end in ENDS), row
        if config.trainer.staleness in ("drop", "mask", "wait"):
            assert row["staleness/max"] <= config.trainer.max_staleness, row
    trained = [row["episodes/trained"] for row in steps]
    assert trained == sorted(trained)
    shown = tensorboard(run_dir)
    assert [step for step, _ in shown] == [row["step"] for row in told]
    assert [tags for _, tags in shown] == [row.keys() - {"step"} for row in told]


def check_evaluations(run_dir: Path, config: RunConfig) -> None:
    """Each evaluation once: in the ledger, in the metrics, and in the last checkpoint."""
    due = [float(step) for step in (*range(0, config.trainer.steps, config.eval.every), config.trainer.steps)]
    recorded = [float(step) for (step,) in rows(run_dir, "SELECT step FROM evaluations ORDER BY 1")]
    told = [row["eval/step"] for row in metrics(run_dir) if "eval/step" in row]
    state = TrainerState.read(list_checkpoints(run_dir)[-1])
    assert recorded == due
    assert [found["eval/step"] for found in state.evaluations] == due
    if config.trainer.max_staleness and told != due:  # one that ends only with the last step is told by that one's own
        due = [*due[:-2], due[-1]]
    assert told == due


def check_same(run_dir: Path, reference: Path) -> None:
    """Trained in step: the same groups in the same batches, the same figures, the same weights to the bit."""
    for query in _SAME:
        assert rows(run_dir, query) == rows(reference, query), query
    for ours, theirs in zip(metrics(run_dir), metrics(reference), strict=True):
        pairs = {key: (ours.get(key), theirs.get(key)) for key in {*ours, *theirs}}
        lasting = {key: pair for key, pair in pairs.items() if not key.startswith(_PASSING) and "per_s" not in key}
        different = {key: (one, two) for key, (one, two) in lasting.items() if one != two}
        assert not different, (ours["step"], different)
    assert weights(run_dir) == weights(reference)


def weights(run_dir: Path) -> dict[str, bytes]:
    """Weights and optimizer of the last checkpoint."""
    folder = list_checkpoints(run_dir)[-1]
    own = ("checkpoint.json", "trainer.json", "random.json")
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.name not in own}


def rows(run_dir: Path, query: str) -> list[tuple[Any, ...]]:
    """What its ledger answers."""
    connection = sqlite3.connect(f"file:{run_dir / 'ledger.sqlite'}?mode=ro", uri=True)
    try:
        return connection.execute(query).fetchall()
    finally:
        connection.close()


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Every line, in order."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def tensorboard(run_dir: Path) -> list[tuple[int, set[str]]]:
    """Steps and their tags as TensorBoard shows them: a session that starts at a step makes it forget what it has."""
    shown: list[tuple[int, set[str]]] = []
    for event in (event for path in sorted((run_dir / "tensorboard").iterdir()) for event in _events(path)):
        if event.HasField("session_log"):
            shown = [(step, tags) for step, tags in shown if step < event.step]
        elif event.HasField("summary") and not event.summary.value[0].HasField("tensor"):  # settings, episodes
            shown.append((event.step, {value.tag for value in event.summary.value}))
    return shown


def _events(path: Path) -> Iterator[Any]:
    """A record is: length, its checksum, the event, its checksum. A kill may have cut the last."""
    from tensorboardX.proto import event_pb2

    data = path.read_bytes()
    while len(data) >= 16:
        length = int.from_bytes(data[:8], "little")
        if len(data) < 16 + length:
            return
        yield event_pb2.Event.FromString(data[12 : 12 + length])  # pyright: ignore[reportAttributeAccessIssue]
        data = data[16 + length :]
