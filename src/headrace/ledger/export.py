"""Episodes out of a ledger into one file: a line of JSON each, or a row of a parquet file."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from headrace.data.episode import NO_ROLLOUT, Trajectory
from headrace.errors import ConfigError, LedgerError, boundary
from headrace.ledger.reader import LedgerReader
from headrace.ledger.records import EpisodeRecord, GroupState, TrainedRow
from headrace.registry import load_object

Write = Callable[[Iterator[dict[str, Any]], Path], int]

_BATCHES, _GROUPS = 8, 1024  # whose rows, and whose steps, are kept at hand


def export_episodes(
    reader: LedgerReader, out: Path, kind: str = "train", first_step: int = 0, end_step: int | None = None
) -> int:
    """Write the episodes of a kind, decided within the steps, as `out` ends; how many there were."""
    write = _writer(out)
    trained = _Trained(reader)
    rows = (row_of(record, trained.of(record)) for record in reader.episodes(kind, first_step, end_step))
    beside = out.with_name(f".{out.name}.partial")
    with boundary(LedgerError, f"cannot write {out}", OSError):
        try:
            count = write(rows, beside)
            beside.replace(out)  # whole or not at all
        finally:
            beside.unlink(missing_ok=True)
    return count


def _writer(out: Path) -> Write:
    if out.suffix == ".jsonl":
        return write_jsonl
    if out.suffix == ".parquet":
        return load_object("headrace.ledger.parquet:write_parquet")  # says what to install
    raise ConfigError(f'episodes are exported as .jsonl or .parquet, got "{out.name}"; choose one of these endings')


def write_jsonl(rows: Iterator[dict[str, Any]], path: Path) -> int:
    """One object per line."""
    count = 0
    # half a surrogate pair becomes the escape that JSON has for it
    with path.open("w", encoding="utf-8", errors="backslashreplace") as file:
        for count, row in enumerate(rows, 1):  # noqa: B007
            file.write(json.dumps(row, ensure_ascii=False, separators=(",", ":")) + "\n")
    return count


class _Trained:
    """What episodes were trained with. Episodes that follow each other were mostly trained in the same few batches."""

    def __init__(self, reader: LedgerReader) -> None:
        self._reader = reader
        self._rows_of = lru_cache(maxsize=_BATCHES)(self._read_rows)
        self._steps_of = lru_cache(maxsize=_GROUPS)(reader.steps_of)

    def of(self, record: EpisodeRecord) -> list[dict[str, Any]] | None:
        """By step and role; empty if nothing of it was trained, None if it is not recorded, or not whose rows are."""
        if record.kind != "train" or record.decision == GroupState.FAILED:
            return []
        place, found = (record.episode.group_id, record.episode.rollout_idx), []
        for step in self._steps_of(place[0]):
            rows = self._rows_of(step)
            if rows is None or (place[0], NO_ROLLOUT) in rows:
                return None
            by_role: dict[str, list[TrainedRow]] = {}
            for row in rows.get(place, ()):
                by_role.setdefault(row.role, []).append(row)
            found += [_trained_of(step, role, own) for role, own in by_role.items()]
        return found

    def _read_rows(self, step: int) -> dict[tuple[int, int], list[TrainedRow]] | None:
        rows = self._reader.trained_rows(step)
        if rows is None:
            return None
        found: dict[tuple[int, int], list[TrainedRow]] = {}
        for row in rows:
            found.setdefault((row.group_id, row.rollout_idx), []).append(row)
        return found


def _trained_of(step: int, role: str, rows: list[TrainedRow]) -> dict[str, Any]:
    """One number where all trained tokens of the trajectory have the same advantage, else a list per row."""
    advantages = [list(row.advantages) for row in rows if row.advantages is not None]
    # by their text: 0.0 is not -0.0, and a NaN is itself
    uniform = len({repr(value) for values in advantages for value in values}) == 1
    return {
        "step": step + 1,
        "role": role,
        "tokens": [row.tokens for row in rows],
        "advantage": plain(advantages[0][0]) if uniform else None,
        "advantages": plain(advantages) if advantages and not uniform else None,
        "preferred": [row.preferred for row in rows] if rows[0].preferred is not None else None,
    }


def row_of(record: EpisodeRecord, trained: list[dict[str, Any]] | None) -> dict[str, Any]:
    """An episode as plain data, what became of it first. `trained` is what it was trained with."""
    episode = record.episode
    return {
        "kind": record.kind,
        "set": record.decision if record.kind == "eval" else None,
        "decision": None if record.kind == "eval" else record.decision,
        "reason": record.reason,
        "step": _as_counted(record),
        "task_id": str(episode.task_id),
        "source": episode.source,
        "group_id": episode.group_id,
        "rollout_idx": episode.rollout_idx,
        "attempt": episode.attempt,
        "seed": episode.seed,
        "termination": str(episode.termination),
        "error": episode.error,
        "reward": plain(record.reward),
        "is_correct": episode.is_correct,
        "metrics": plain(episode.metrics),
        "oldest_version": record.oldest_version,
        "newest_version": record.newest_version,
        "generated_tokens": record.generated_tokens,
        "duration_s": record.duration_s,
        "pruned": record.pruned,
        "trained": trained,
        "trajectories": plain([_trajectory(trajectory) for trajectory in episode.trajectories]),
    }


def _as_counted(record: EpisodeRecord) -> int | None:
    """People count steps from 1; the ledger says how many were made before. An evaluation is after so many."""
    return record.step if record.step is None or record.kind == "eval" else record.step + 1


def _trajectory(trajectory: Trajectory) -> dict[str, Any]:
    """Without the number of the rollout, which the episode has."""
    return {name: value for name, value in trajectory.to_dict().items() if name != "rollout_idx"}


def plain(value: Any) -> Any:
    """What any reader of JSON understands: no NaN or infinity, tuples as lists, bytes in base 64, keys as text."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return base64.b64encode(value).decode() if isinstance(value, bytes) else value
