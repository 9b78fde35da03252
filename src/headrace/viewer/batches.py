"""What the pages of a step and of a group show."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace.data.episode import Episode
from headrace.errors import LedgerError
from headrace.ledger.export import plain
from headrace.ledger.reader import LedgerReader
from headrace.viewer.store import Missing, RunView
from headrace.viewer.texts import short

_BINS = 20
_MOST_GROUPS = 600  # of one page
_MOST_TOKENS = 600  # of one rollout, side by side with others
_OTHER_STEPS = 60
_GROUP = "group_id, task_id, source, size, version, state, reason, step, trained, filtered, failed, stale, pruned"
_EPISODE = (
    "group_id, rollout_idx, attempt, state, reward, is_correct, termination, error, generated_tokens, duration_s, "
    "oldest_version, newest_version, seed"
)
Row = dict[str, Any]


def steps_page(view: RunView, before: int | None, limit: int) -> Row:
    """Batches, the newest first, in pages: `next` is the step to ask for the page after."""
    limit = max(1, min(limit, 500))
    with view.ledger() as reader:
        rows = reader.rows(
            "SELECT step, steps, version, recorded_at, committed_at, "
            "(SELECT count(*) FROM batch_groups m WHERE m.step = b.step), "
            "(SELECT sum(again) FROM batch_groups m WHERE m.step = b.step) "
            "FROM batches b WHERE step < ? ORDER BY step DESC LIMIT ?",
            (2**62 if before is None else before - 1, limit + 1),
        )
    names = ("step", "steps", "version", "recorded_at", "committed_at", "groups", "again")
    found: list[Row] = [dict(zip(names, row, strict=True)) for row in rows[:limit]]
    with view.metrics() as table:
        for row in found:
            row["step"] += 1  # people count from 1
            metrics = table.row(row["step"])
            row["reward"] = metrics.get("reward/mean")
            row["length"] = metrics.get("response/length_mean")
    return {"steps": found, "next": found[-1]["step"] if len(rows) > limit else None}


def step_page(view: RunView, step: int) -> Row:
    """One step: its batch, and the groups that were dropped at it."""
    made = step - 1
    with view.ledger() as reader:
        batch = reader.rows(
            "SELECT version, steps, recorded_at, committed_at, pieces FROM batches WHERE step = ?", (made,)
        )
        members = dict(reader.rows("SELECT group_id, again FROM batch_groups WHERE step = ?", (made,)))
        groups = _groups_at(reader, made, list(members))
        if not batch and not groups:
            raise Missing(f"step {step} is not on record")
        episodes = _episodes_of(reader, [group["group_id"] for group in groups])
        last = reader.rows("SELECT max(step) + 1 FROM batches")[0][0]
        trained, masked = _trained_tokens(reader, made)
    for group in groups:
        _describe(group, episodes.get(group["group_id"], []), members)
    with view.metrics() as table:
        metrics = table.row(step)
    rewards = [reward for group in groups if group["again"] is not None for reward in group["rewards"]]
    version, steps, recorded_at, committed_at, _ = batch[0] if batch else (None,) * 5
    return {
        "step": step,
        "last": last,
        "version": version,
        "updates": steps,
        "recorded_at": recorded_at,
        "committed_at": committed_at,
        "metrics": metrics,
        "groups": groups,
        "cut": len(groups) >= _MOST_GROUPS,
        "histogram": histogram([reward for reward in rewards if reward is not None]),
        "trained_tokens": trained,
        "masked_tokens": masked,
    }


def _groups_at(reader: LedgerReader, made: int, members: Sequence[int]) -> list[Row]:
    """Groups of the batch, and those that ended otherwise at the same step."""
    found: dict[int, Row] = {}
    for start in range(0, len(members), 500):
        some = members[start : start + 500]
        query = f"SELECT {_GROUP} FROM groups WHERE group_id IN ({', '.join('?' * len(some))})"
        found |= {row[0]: _named(_GROUP, row) for row in reader.rows(query, some)}
    query = f"SELECT {_GROUP} FROM groups WHERE step = ? ORDER BY group_id LIMIT {_MOST_GROUPS}"
    found |= {row[0]: _named(_GROUP, row) for row in reader.rows(query, (made,))}
    ordered = [found.pop(group_id) for group_id in members if group_id in found]
    return [*ordered, *found.values()]


def _named(columns: str, row: Sequence[Any]) -> Row:
    return dict(zip(columns.split(", "), row, strict=True))


def _episodes_of(reader: LedgerReader, group_ids: Sequence[int]) -> dict[int, list[Row]]:
    """The last attempt of every rollout, by group."""
    found: dict[int, dict[int, Row]] = {}
    for start in range(0, len(group_ids), 500):
        some = group_ids[start : start + 500]
        query = (
            f"SELECT {_EPISODE} FROM episodes WHERE group_id IN ({', '.join('?' * len(some))}) "
            "ORDER BY group_id, rollout_idx, attempt"
        )
        for row in reader.rows(query, some):
            found.setdefault(row[0], {})[row[1]] = _named(_EPISODE, row)
    return {group_id: list(rollouts.values()) for group_id, rollouts in found.items()}


def _describe(group: Row, episodes: list[Row], members: dict[int, int]) -> None:
    group |= {name: short(str(group[name])) for name in ("task_id", "source")} | {"reason": short(group["reason"])}
    group["again"] = bool(members[group["group_id"]]) if group["group_id"] in members else None
    group["rewards"] = [plain(row["reward"]) if row["state"] == "finished" else None for row in episodes]
    group["correct"] = [None if row["is_correct"] is None else bool(row["is_correct"]) for row in episodes]
    group["states"] = [row["state"] for row in episodes]
    group["tokens"] = sum(row["generated_tokens"] or 0 for row in episodes)
    group["seconds"] = max((row["duration_s"] or 0.0 for row in episodes), default=0.0)
    if group["step"] is not None:
        group["step"] += 1


def _trained_tokens(reader: LedgerReader, made: int) -> tuple[int | None, int | None]:
    """Trained tokens of a batch, and sampled ones of its groups that were masked."""
    try:
        rows = reader.trained_rows(made)
    except LedgerError:
        rows = None
    if rows is None:
        return None, None
    trained = sum(row.tokens for row in rows)
    places = {(row.group_id, row.rollout_idx) for row in rows}
    sampled = sum(
        tokens or 0
        for group_id, rollout, tokens in reader.rows(
            "SELECT e.group_id, e.rollout_idx, e.generated_tokens FROM batch_groups m JOIN episodes e USING (group_id) "
            "WHERE m.step = ? AND e.state = 'finished'",
            (made,),
        )
        if (group_id, rollout) in places
    )
    return trained, max(0, sampled - trained)


def histogram(values: Sequence[float]) -> Row:
    """Counts in equal bins; a bin has its lower edge, the last one both."""
    if not values:
        return {"low": 0.0, "high": 0.0, "counts": []}
    low, high = min(values), max(values)
    if low == high:
        return {"low": low, "high": high, "counts": [len(values)]}
    counts = [0] * _BINS
    for value in values:
        counts[min(_BINS - 1, int((value - low) / (high - low) * _BINS))] += 1
    return {"low": low, "high": high, "counts": counts}


# ---- one group -------------------------------------------------------------------------------------------------------


def group_page(view: RunView, group_id: int) -> Row:
    """The rollouts of one task side by side, the best first, and the same task at other steps."""
    with view.ledger() as reader:
        rows = reader.rows(f"SELECT {_GROUP} FROM groups WHERE group_id = ?", (group_id,))
        if not rows:
            raise Missing(f"group {group_id} is not on record")
        group = _named(_GROUP, rows[0])
        members = dict(reader.rows("SELECT group_id, again FROM batch_groups WHERE group_id = ?", (group_id,)))
        episodes = _episodes_of(reader, [group_id]).get(group_id, [])
        _describe(group, episodes, members)
        steps = [step + 1 for step in reader.steps_of(group_id)]
        others = _same_task(reader, rows[0][1], group_id)
        rollouts = [_rollout(view, reader, row) for row in episodes]
        advantages = _advantages(reader, group_id, steps)
        neighbours = [
            (reader.rows(query, (group_id,)) or [(None,)])[0][0]
            for query in (
                "SELECT max(group_id) FROM groups WHERE group_id < ?",
                "SELECT min(group_id) FROM groups WHERE group_id > ?",
            )
        ]
    for row in rollouts:
        row["advantage"] = advantages.get(row["rollout_idx"])
    rollouts.sort(key=lambda row: (row["reward"] is None, -(row["reward"] or 0.0), row["rollout_idx"]))
    _mark_parting(rollouts)
    messages = next((row.pop("messages") for row in rollouts if row.get("messages")), [])
    for row in rollouts:
        row.pop("messages", None)
    return {
        "group": group,
        "steps": steps,
        "messages": plain(messages),
        "rollouts": rollouts,
        "same_task": others,
        "previous": neighbours[0],
        "next": neighbours[1],
    }


def _same_task(reader: LedgerReader, task_id: Any, group_id: int) -> list[Row]:
    """Groups of the same task, with their rewards: how was it learned?"""
    query = (
        f"SELECT {_GROUP} FROM groups WHERE task_id = ? AND (group_id = ? OR state != 'dispatched') "
        f"ORDER BY group_id DESC LIMIT {_OTHER_STEPS}"
    )
    groups = [_named(_GROUP, row) for row in reader.rows(query, (task_id, group_id))]
    episodes = _episodes_of(reader, [group["group_id"] for group in groups])
    for group in groups:
        _describe(group, episodes.get(group["group_id"], []), {})
    return groups[::-1]


def _rollout(view: RunView, reader: LedgerReader, row: Row) -> Row:
    found = {name: short(plain(value)) for name, value in row.items()}
    found["is_correct"] = None if row["is_correct"] is None else bool(row["is_correct"])
    if row["state"] == "running":
        return {**found, "text": "", "tokens": [], "ids": [], "turns": 0, "pruned": False}
    record = reader.episode_record(row["group_id"], row["rollout_idx"], row["attempt"])
    if record is None or record.pruned:
        return {**found, "text": "", "tokens": [], "ids": [], "turns": 0, "pruned": True}
    episode = record.episode
    ids = said_ids(episode)
    texts = view.texts
    first = next((step for t in episode.trajectories for step in t.steps), None)
    return {
        **found,
        "text": episode.text[:4000],
        "ids": ids[:_MOST_TOKENS],
        "tokens": texts.texts(ids[:_MOST_TOKENS]) if texts else [],
        "cut": len(ids) > _MOST_TOKENS,
        "turns": sum(len(t.steps) for t in episode.trajectories),
        "metrics": plain(episode.metrics),
        "messages": list(first.messages) if first else [],
        "pruned": False,
    }


def said_ids(episode: Episode) -> list[int]:
    """All that the model said, in the order of the calls."""
    steps = sorted((step for t in episode.trajectories for step in t.steps), key=lambda step: step.call)
    return [token for step in steps for token in step.response_ids]


def _mark_parting(rollouts: list[Row]) -> None:
    """For each rollout the place of the first token that differs from the best one's."""
    said = [row["ids"] for row in rollouts]
    base = next((ids for ids in said if ids), [])
    for row, ids in zip(rollouts, said, strict=True):
        same = 0
        for ours, theirs in zip(ids, base, strict=False):
            if ours != theirs:
                break
            same += 1
        row["parts_at"] = same
    shared = [row["parts_at"] for row in rollouts[1:] if row["ids"]]
    if rollouts and shared:
        rollouts[0]["parts_at"] = min(shared)


def _advantages(reader: LedgerReader, group_id: int, steps: Sequence[int]) -> dict[int, float | None]:
    """The advantage of each rollout's first trained token, in the batch that held it last."""
    try:
        rows = reader.trained_rows(steps[-1] - 1) if steps else None
    except LedgerError:
        rows = None
    found: dict[int, float | None] = {}
    for row in rows or ():
        if row.group_id == group_id and row.advantages:
            found.setdefault(row.rollout_idx, plain(row.advantages[0]))
    return found
