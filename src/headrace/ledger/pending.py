"""Rows that are written many at a time.

Every statement hands the interpreter over to other threads and has to get it back: with one per row, the writer and the
rest of the program would spend their time taking turns.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from functools import lru_cache
from itertools import chain
from typing import Any, Final

from headrace.ledger.columns import SUMMARY

_MOST = 64  # rows of one statement

_FINISHED_COLUMNS = ("state", "duration_s", "finished_at", *SUMMARY)
_GIVEN = ", ".join(f"{name} = given.column{place}" for place, name in enumerate(_FINISHED_COLUMNS, 2))
_EVAL_COLUMNS = ("evaluation_id", "task_id", "source", "group_id", "rollout_idx", "attempt", *SUMMARY, "body")

STARTED: Final = (
    "INSERT INTO episodes (episode_id, group_id, rollout_idx, attempt, state, seed, started_at) VALUES {rows}"
)
CALLED: Final = (
    "INSERT INTO calls (episode_id, call, role, seed, request_digest, params_id, prompt_tokens, completion_tokens, "
    "finish_reason, temperature, body) VALUES {rows}"
)
RESULTED: Final = "INSERT INTO results (episode_id, number, kind, name, request_digest, payload) VALUES {rows}"
FINISHED: Final = (
    f"UPDATE episodes SET {_GIVEN} FROM (VALUES {{rows}}) AS given WHERE episodes.episode_id = given.column1"
)
BODY: Final = "INSERT OR REPLACE INTO bodies VALUES {rows}"
EVALUATED: Final = f"INSERT INTO eval_episodes ({', '.join(_EVAL_COLUMNS)}) VALUES {{rows}}"

_ORDER = (STARTED, CALLED, RESULTED, FINISHED, BODY, EVALUATED)


class PendingRows:
    """Rows by statement. They must be written before the transaction ends, and before anything is read."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._execute = connection.execute
        self._rows: dict[str, list[Sequence[Any]]] = {statement: [] for statement in _ORDER}

    def add(self, statement: str, row: Sequence[Any]) -> None:
        """A row for one of the statements above."""
        self._rows[statement].append(row)

    def write(self) -> None:
        """All of them. What an episode began with comes before what it ended with."""
        for statement, rows in self._rows.items():
            for start in range(0, len(rows), _MOST):
                some = rows[start : start + _MOST]
                self._execute(_filled(statement, len(some), len(some[0])), tuple(chain.from_iterable(some)))
            rows.clear()


@lru_cache(maxsize=512)
def _filled(statement: str, rows: int, columns: int) -> str:
    row = f"({', '.join('?' * columns)})"
    return statement.format(rows=", ".join([row] * rows))
