"""What the timeline shows: which episode ran when and under which versions; the learner; starts, kills and syncs."""

from __future__ import annotations

from typing import Any

from headrace.ledger.export import plain
from headrace.ledger.reader import LedgerReader
from headrace.viewer.overview import last_sign
from headrace.viewer.store import RunView, has_times

_MOST_EPISODES = 1500
Row = dict[str, Any]


def timeline_page(view: RunView, start: float | None, end: float | None) -> Row:
    """A window of time; by default the newest episodes that fit. Times are seconds since 1970."""
    with view.ledger() as reader:
        first, last = _bounds(reader)
        if not has_times(reader) or first is None:
            return {"first": first, "last": last, "start": first, "end": last, "episodes": [], "known": False}
        if start is None or end is None:
            start, end = _newest_window(reader, first, last)
        rows = _episodes(reader, start, end)
        found = {
            "first": first,
            "last": last,
            "start": start,
            "end": end,
            "known": True,
            "cut": len(rows) >= _MOST_EPISODES,
            "episodes": rows,
            "batches": _between(
                reader,
                "SELECT step + 1, version, recorded_at, committed_at FROM batches WHERE recorded_at <= ? "
                "AND coalesce(committed_at, recorded_at) >= ? ORDER BY step LIMIT 2000",
                ("step", "version", "started_at", "ended_at"),
                (end, start),
            ),
            "syncs": [
                {"version": version, "step": step, "at": at}
                for version, step, at in reader.weight_syncs_between(start, end)
            ],
            "evaluations": _between(
                reader,
                "SELECT step, name, evaluated_at FROM evaluations WHERE evaluated_at BETWEEN ? AND ? LIMIT 500",
                ("step", "set", "at"),
                (start, end),
            ),
            "processes": _processes(reader),
        }
    found["waits"] = _waits(found["batches"], start, end)
    return found


def _bounds(reader: LedgerReader) -> tuple[float | None, float]:
    """From the first start to the last thing on record."""
    first = reader.rows("SELECT min(started_at) FROM processes")[0][0]
    queries = (
        "SELECT max(coalesce(ended_at, started_at)) FROM processes",
        "SELECT max(coalesce(committed_at, recorded_at)) FROM batches",
        "SELECT max(evaluated_at) FROM evaluations",
    )
    times = [reader.rows(query)[0][0] for query in queries]
    if has_times(reader):
        times.append(_last_episode(reader))
    return first, max((at for at in times if at is not None), default=first or 0.0)


def _last_episode(reader: LedgerReader) -> float | None:
    """About the newest: rows are in the order of their start."""
    rows = reader.rows("SELECT coalesce(finished_at, started_at) FROM episodes ORDER BY episode_id DESC LIMIT 200")
    return max((at for (at,) in rows if at is not None), default=None)


def _newest_window(reader: LedgerReader, first: float, last: float) -> tuple[float, float]:
    rows = reader.rows("SELECT started_at FROM episodes ORDER BY episode_id DESC LIMIT ?", (_MOST_EPISODES * 2 // 3,))
    started = [at for (at,) in rows if at is not None]
    return (min(started), last) if started else (first, last)


def _episodes(reader: LedgerReader, start: float, end: float) -> list[Row]:
    """Those that ran within the window. Ids are in the order of starts, so a binary search finds where to begin."""
    begin = _first_id(reader, start - _longest(reader))
    stop = _first_id(reader, end)
    names = (
        "group_id", "rollout_idx", "attempt", "state", "reward", "oldest_version", "newest_version", "tokens",
        "started_at", "finished_at",
    )  # fmt: skip
    query = (
        "SELECT group_id, rollout_idx, attempt, state, reward, oldest_version, newest_version, generated_tokens, "
        "started_at, finished_at FROM episodes WHERE episode_id >= ? AND episode_id < ? "
        "AND started_at <= ? AND coalesce(finished_at, started_at + coalesce(duration_s, 1e12)) >= ? "
        "ORDER BY episode_id DESC LIMIT ?"
    )
    rows = reader.rows(query, (begin, stop, end, start, _MOST_EPISODES))
    found: list[Row] = [dict(zip(names, map(plain, row), strict=True)) for row in rows]
    return found[::-1]


def _longest(reader: LedgerReader) -> float:
    """The longest of the newest episodes: how much earlier one may have started."""
    rows = reader.rows("SELECT duration_s FROM episodes ORDER BY episode_id DESC LIMIT 2000")
    return max((duration for (duration,) in rows if duration is not None), default=0.0) * 2 + 1.0


def _first_id(reader: LedgerReader, at: float) -> int:
    """The first episode that started at a time or later, as far as ids follow starts."""
    low, high = 1, reader.rows("SELECT coalesce(max(episode_id), 0) + 1 FROM episodes")[0][0]
    while low < high:
        middle = (low + high) // 2
        found = reader.rows(
            "SELECT started_at FROM episodes WHERE episode_id >= ? AND started_at IS NOT NULL "
            "ORDER BY episode_id LIMIT 1",
            (middle,),
        )
        if not found or found[0][0] >= at:
            high = middle
        else:
            low = middle + 1
    return low


def _between(reader: LedgerReader, query: str, names: tuple[str, ...], values: tuple[float, float]) -> list[Row]:
    return [dict(zip(names, row, strict=True)) for row in reader.rows(query, values)]


def _processes(reader: LedgerReader) -> list[Row]:
    """Starts and ends; of a process that was killed, its last sign of life before the next one started."""
    found = reader.processes()
    rows: list[Row] = []
    for number, one in enumerate(found):
        following = found[number + 1].started_at if number + 1 < len(found) else None
        rows.append(
            {
                "started_at": one.started_at,
                "ended_at": one.ended_at,
                "killed_at": last_sign(reader, one.started_at, following)
                if one.ended_at is None and following
                else None,
                "pid": one.pid,
                "resumed_from": one.resumed_from,
            }
        )
    return rows


def _waits(batches: list[Row], start: float, end: float) -> list[Row]:
    """When the learner had nothing to do: between one batch and the next."""
    waits: list[Row] = []
    free = start
    for batch in batches:
        if batch["started_at"] > free:
            waits.append({"started_at": free, "ended_at": batch["started_at"]})
        free = max(free, batch["ended_at"] or end)
    return waits
