"""Episodes out of a ledger into one file: a line of JSON each, or a row of a parquet file."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from headrace.data.ledger.reader import LedgerReader
from headrace.data.ledger.records import EpisodeRecord
from headrace.errors import ConfigError, LedgerError, boundary
from headrace.registry import load_object

Write = Callable[[Iterator[dict[str, Any]], Path], int]


def export_episodes(
    reader: LedgerReader, out: Path, kind: str = "train", first_step: int = 0, end_step: int | None = None
) -> int:
    """Write the episodes of a kind, decided within the steps, as `out` ends; how many there were."""
    write = _writer(out)
    rows = (row_of(record) for record in reader.episodes(kind, first_step, end_step))
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
        return load_object("headrace.data.ledger.parquet:write_parquet")  # tells what to install
    raise ConfigError(f'episodes are exported as .jsonl or .parquet, got "{out.name}"; choose one of these endings')


def write_jsonl(rows: Iterator[dict[str, Any]], path: Path) -> int:
    """One object per line."""
    count = 0
    # half a surrogate pair becomes the escape that JSON has for it
    with path.open("w", encoding="utf-8", errors="backslashreplace") as file:
        for count, row in enumerate(rows, 1):  # noqa: B007
            file.write(json.dumps(row, ensure_ascii=False, separators=(",", ":")) + "\n")
    return count


def row_of(record: EpisodeRecord) -> dict[str, Any]:
    """An episode as plain data, what became of it first."""
    episode = record.episode
    return {
        "kind": record.kind,
        "set": record.decision if record.kind == "eval" else None,
        "decision": None if record.kind == "eval" else record.decision,
        "reason": record.reason,
        "step": record.step,
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
        "trajectories": plain([trajectory.to_dict() for trajectory in episode.trajectories]),
    }


def plain(value: Any) -> Any:
    """What any reader of JSON understands: no NaN or infinity, tuples as lists, bytes in base 64, keys as text."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return base64.b64encode(value).decode() if isinstance(value, bytes) else value
