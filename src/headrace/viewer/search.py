"""Search over all episodes of a run, page by page, each within a time budget.

Filters on columns are SQL over ranges of row ids; what is in bodies (text, advantages) is looked at one episode at a
time. A page ends when it is full or its time is up; it says how far it got, and the next one continues there. So
a search through a million episodes needs no index, and no request takes long.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from headrace.data.episode import Episode
from headrace.errors import ConfigError, LedgerError
from headrace.ledger.export import plain
from headrace.ledger.reader import LedgerReader
from headrace.viewer.store import RunView, has_times
from headrace.viewer.texts import short

BUDGET_S = 0.25
_CHUNK = 20_000  # rows looked at by one statement
_FULL_CHUNK = 200  # the same where bodies have to be read
_COLUMNS = (
    "episode_id", "group_id", "rollout_idx", "attempt", "state", "reward", "is_correct", "termination", "error",
    "generated_tokens", "duration_s", "oldest_version", "newest_version", "task_id", "source", "group_state", "reason",
    "step",
)  # fmt: skip
_TRAIN = (
    "e.episode_id, e.group_id, e.rollout_idx, e.attempt, e.state, e.reward, e.is_correct, e.termination, e.error, "
    "e.generated_tokens, e.duration_s, e.oldest_version, e.newest_version, g.task_id, g.source, g.state, g.reason, "
    "g.step"
)
_EVAL = (
    "e.eval_episode_id, e.group_id, e.rollout_idx, e.attempt, CASE WHEN e.error IS NULL THEN 'finished' ELSE 'failed' "
    "END, e.reward, e.is_correct, e.termination, e.error, e.generated_tokens, NULL, e.oldest_version, "
    "e.newest_version, e.task_id, e.source, v.name, NULL, v.step"
)
Keep = Callable[[LedgerReader, dict[str, Any]], bool]


@dataclass(frozen=True, slots=True)
class Filters:
    """What is looked for; None is anything."""

    kind: str = "train"
    text: str | None = None
    task: str | None = None
    state: str | None = None
    decision: str | None = None
    termination: str | None = None
    source: str | None = None
    role: str | None = None
    correct: bool | None = None
    failed: bool | None = None
    step: int | None = None
    version: int | None = None
    reward_min: float | None = None
    reward_max: float | None = None
    tokens_min: int | None = None
    tokens_max: int | None = None
    advantage_min: float | None = None
    advantage_max: float | None = None

    @classmethod
    def from_query(cls, query: Mapping[str, str]) -> Filters:
        """From the parameters of a URL; ConfigError for one that is no number."""
        found: dict[str, Any] = {}
        for name, value in query.items():
            kind = _KINDS.get(name)
            if kind is None or value == "":
                continue
            try:
                found[name] = kind(value)
                if isinstance(found[name], int | float) and not abs(found[name]) < 2**63:  # SQLite's; nan is none
                    raise ValueError(name)
            except ValueError:
                raise ConfigError(f'"{name}" must be a number, got "{value[:80]}"') from None
        if found.get("kind", "train") not in ("train", "eval"):
            raise ConfigError(f'"kind" must be train or eval, got "{found["kind"][:80]}"')
        return cls(**found)


def _truth(value: str) -> bool:
    return value in ("1", "true", "yes")


_KINDS: dict[str, Callable[[str], Any]] = {
    **dict.fromkeys(("kind", "text", "task", "state", "decision", "termination", "source", "role"), str),
    **dict.fromkeys(("correct", "failed"), _truth),
    **dict.fromkeys(("step", "version", "tokens_min", "tokens_max"), int),
    **dict.fromkeys(("reward_min", "reward_max", "advantage_min", "advantage_max"), float),
}


def search_page(view: RunView, filters: Filters, before: int | None, limit: int) -> dict[str, Any]:
    """Episodes that pass, the newest first. `next` continues where the page ended; None: everything was looked at."""
    limit, until = max(1, min(limit, 200)), time.monotonic() + BUDGET_S
    with view.ledger() as reader:
        key, table = ("episode_id", "episodes") if filters.kind == "train" else ("eval_episode_id", "eval_episodes")
        newest = reader.rows(f"SELECT coalesce(max({key}), 0) FROM {table}")[0][0]
        start = newest + 1 if before is None else min(before, newest + 1)
        keep = _inner_filter(filters)
        found: list[dict[str, Any]] = []
        reached = start
        for lower, rows in _chunks(reader, filters, start, _FULL_CHUNK if keep else _CHUNK):
            reached = lower
            for row in rows:
                if keep is None or keep(reader, row):
                    found.append(row)
                if len(found) >= limit or (keep is not None and time.monotonic() > until):
                    reached = row["episode_id"]
                    break
            else:
                if time.monotonic() < until:
                    continue
            break
    for row in found:
        _polish(row, filters.kind)
    left = max(0, reached - 1)
    return {"episodes": found, "next": reached if left else None, "searched": newest - left, "total": newest}


def _chunks(
    reader: LedgerReader, filters: Filters, start: int, size: int
) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """Rows that pass the filters on columns, by ranges of ids from `start` (not included) down."""
    conditions, values = _conditions(filters)
    if filters.kind == "train":
        key, columns, tables = "e.episode_id", _TRAIN, "episodes e JOIN groups g USING (group_id)"
    else:
        key, columns, tables = "e.eval_episode_id", _EVAL, "eval_episodes e JOIN evaluations v USING (evaluation_id)"
    upper = start
    while upper > 1:
        lower = max(1, upper - size)
        query = (
            f"SELECT {columns} FROM {tables} WHERE {key} >= ? AND {key} < ? {conditions} ORDER BY {key} DESC LIMIT 400"
        )
        rows: list[dict[str, Any]] = [
            dict(zip(_COLUMNS, row, strict=True)) for row in reader.rows(query, (lower, upper, *values))
        ]
        if len(rows) == 400:  # more may be in the range
            lower = rows[-1]["episode_id"]
        yield lower, rows
        upper = lower


def _conditions(filters: Filters) -> tuple[str, list[Any]]:
    train = filters.kind == "train"
    group, step = ("g", "g.step + 1") if train else ("e", "v.step")
    parts: list[tuple[str, Any]] = [
        (f"CAST({group}.task_id AS TEXT) = ?", filters.task),
        (f"{group}.source = ?", filters.source),
        ("e.termination = ?", filters.termination),
        (f"{step} = ?", filters.step),
        ("e.reward >= ?", filters.reward_min),
        ("e.reward <= ?", filters.reward_max),
        ("e.generated_tokens >= ?", filters.tokens_min),
        ("e.generated_tokens <= ?", filters.tokens_max),
        ("e.oldest_version <= ?", filters.version),
        ("e.newest_version >= ?", filters.version),
        ("e.is_correct = ?", None if filters.correct is None else int(filters.correct)),
    ]
    if train:
        parts += [("e.state = ?", filters.state), ("g.state = ?", filters.decision)]
    wanted = [(text, value) for text, value in parts if value is not None]
    conditions = "".join(f"AND {text} " for text, _ in wanted)
    if filters.failed is not None:
        conditions += f"AND e.error IS {'NOT ' if filters.failed else ''}NULL "
    if filters.reward_min is not None or filters.reward_max is not None:
        conditions += "AND e.error IS NULL "
    if filters.role is not None and train:
        conditions += "AND EXISTS (SELECT 1 FROM calls c WHERE c.episode_id = e.episode_id AND c.role = ?) "
        return conditions, [*(value for _, value in wanted), filters.role]
    return conditions, [value for _, value in wanted]


def _inner_filter(filters: Filters) -> Keep | None:
    """What has to be read from bodies; None if nothing has to."""
    checks: list[Keep] = []
    if filters.advantage_min is not None or filters.advantage_max is not None:
        checks.append(_advantage_check(filters))
    if filters.text:
        checks.append(_text_check(filters.text.casefold(), filters.kind))
    if not checks:
        return None
    return lambda reader, row: all(check(reader, row) for check in checks)


def _text_check(wanted: str, kind: str) -> Keep:
    def check(reader: LedgerReader, row: dict[str, Any]) -> bool:
        if any(wanted in str(row[name] or "").casefold() for name in ("task_id", "error")):
            return True
        record = (
            reader.episode_record(row["group_id"], row["rollout_idx"], row["attempt"])
            if kind == "train"
            else reader.eval_episode_record(row["episode_id"])
        )
        return record is not None and any(wanted in text.casefold() for text in texts_in(record.episode))

    return check


def texts_in(episode: Episode) -> Iterator[str]:
    """All that was said in an episode."""
    for trajectory in episode.trajectories:
        for step in trajectory.steps:
            yield step.text
        if trajectory.steps:
            for message in trajectory.steps[-1].messages:
                yield str(message.get("content", ""))


def _advantage_check(filters: Filters) -> Keep:
    low = -float("inf") if filters.advantage_min is None else filters.advantage_min
    high = float("inf") if filters.advantage_max is None else filters.advantage_max

    @lru_cache(maxsize=16)
    def inside(reader: LedgerReader, step: int) -> frozenset[tuple[int, int]]:
        try:
            rows = reader.trained_rows(step) or ()
        except LedgerError:
            rows = ()
        return frozenset(
            (row.group_id, row.rollout_idx)
            for row in rows
            if row.advantages and any(low <= value <= high for value in row.advantages)
        )

    def check(reader: LedgerReader, row: dict[str, Any]) -> bool:
        return row["step"] is not None and (row["group_id"], row["rollout_idx"]) in inside(reader, row["step"])

    return check


def _polish(row: dict[str, Any], kind: str) -> None:
    row |= {name: short(row[name]) for name in ("error", "reason", "source", "termination", "group_state")}
    row["task_id"] = short(str(row["task_id"]))
    row["reward"] = plain(row["reward"]) if row["error"] is None else None
    row["is_correct"] = None if row["is_correct"] is None else bool(row["is_correct"])
    if row["step"] is not None and kind == "train":
        row["step"] += 1


def facets_page(view: RunView) -> dict[str, Any]:
    """What can be chosen in filters: sources, terminations and roles among the newest episodes."""
    with view.ledger() as reader:
        newest = reader.rows("SELECT coalesce(max(episode_id), 0) FROM episodes")[0][0]
        recent = "episode_id > ?"
        first = newest - 5000
        facets = {
            "terminations": reader.rows(f"SELECT DISTINCT termination FROM episodes WHERE {recent}", (first,)),
            "roles": reader.rows(f"SELECT DISTINCT role FROM calls WHERE {recent}", (newest - 500,)),
            "sources": reader.rows("SELECT DISTINCT source FROM counts"),
            "sets": reader.rows("SELECT DISTINCT name FROM evaluations"),
        }
        timed = has_times(reader)
    found = {
        name: sorted(str(value) for (value,) in rows if value is not None and len(str(value)) < 200)
        for name, rows in facets.items()
    }
    return {**found, "episodes": newest, "has_times": timed}
