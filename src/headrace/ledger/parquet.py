"""Episodes as a parquet file. Needs pyarrow; reached through the registry."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from headrace.errors import LedgerError

_ROWS = 1000  # written at once

_STEP = pa.struct(
    [
        ("prompt_ids", pa.list_(pa.int64())),
        ("response_ids", pa.list_(pa.int64())),
        ("logprobs", pa.list_(pa.float64())),
        ("versions", pa.list_(pa.int64())),
        ("advantage", pa.list_(pa.float64())),
        ("reward", pa.float64()),
        ("text", pa.string()),
        ("messages", pa.string()),
        ("teacher_messages", pa.string()),
        ("temperature", pa.float64()),
        ("finish_reason", pa.string()),
        ("call", pa.int64()),
        ("routed_experts", pa.string()),
    ]
)
_TRAJECTORY = pa.struct([("name", pa.string()), ("reward", pa.float64()), ("steps", pa.list_(_STEP))])
_TRAINED = pa.struct(
    [
        ("step", pa.int64()),
        ("role", pa.string()),
        ("tokens", pa.list_(pa.int64())),
        ("advantage", pa.float64()),
        ("advantages", pa.list_(pa.list_(pa.float64()))),
        ("preferred", pa.list_(pa.bool_())),
    ]
)
SCHEMA = pa.schema(
    [
        *((name, pa.string()) for name in ("kind", "set", "decision", "reason")),
        ("step", pa.int64()),
        *((name, pa.string()) for name in ("task_id", "source")),
        *((name, pa.int64()) for name in ("group_id", "rollout_idx", "attempt")),
        *((name, pa.string()) for name in ("seed", "termination", "error")),
        ("reward", pa.float64()),
        ("is_correct", pa.bool_()),
        ("metrics", pa.string()),
        *((name, pa.int64()) for name in ("oldest_version", "newest_version", "generated_tokens")),
        ("duration_s", pa.float64()),
        ("pruned", pa.bool_()),
        ("trained", pa.list_(_TRAINED)),
        ("trajectories", pa.list_(_TRAJECTORY)),
    ]
)


def write_parquet(rows: Iterator[dict[str, Any]], path: Path) -> int:
    """Typed columns; messages and metrics, which have no fixed form, as JSON."""
    count = 0
    with pq.ParquetWriter(path, SCHEMA, compression="zstd") as writer:
        while some := list(islice(rows, _ROWS)):
            writer.write_table(_table(some))
            count += len(some)
    return count


def _table(rows: list[dict[str, Any]]) -> pa.Table:
    try:
        return pa.Table.from_pylist([_typed(row) for row in rows], SCHEMA)
    except (pa.ArrowInvalid, pa.ArrowTypeError, UnicodeEncodeError) as error:
        raise LedgerError(
            f"an episode does not fit the columns of a parquet file ({error}), as one with images among its tokens; "
            "export to .jsonl, which holds everything"
        ) from error


def _typed(row: dict[str, Any]) -> dict[str, Any]:
    trajectories = [{**t, "steps": [_typed_step(step) for step in t["steps"]]} for t in row["trajectories"]]
    # seeds may have more than 63 bits
    return {**row, "seed": str(row["seed"]), "metrics": _json(row["metrics"]), "trajectories": trajectories}


def _typed_step(step: dict[str, Any]) -> dict[str, Any]:
    return {**step, **{name: _json(step[name]) for name in ("messages", "teacher_messages", "routed_experts")}}


def _json(value: Any) -> str | None:
    return None if value is None else json.dumps(value)
