"""BatchReader: an open ledger, and what it knows of batches, weight syncs and evaluations."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from headrace.ledger.files import damaged, explaining
from headrace.ledger.pack import DamagedRecordError, from_json, unseal
from headrace.ledger.records import BatchRecord, EvaluationRecord, LearnerRow, TrainedRow, WeightSyncRecord
from headrace.ledger.rows import unpack_rows
from headrace.ledger.tokens import unpack_tokens

Row = tuple[Any, ...]


class BatchReader:
    """The part of LedgerReader that is about training steps."""

    def __init__(self, connection: sqlite3.Connection, path: Path = Path()) -> None:
        self._connection = connection
        self.path = path

    def close(self) -> None:
        """Let go of the file."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    @contextmanager
    def snapshot(self) -> Iterator[None]:
        """Within it, all answers are of one moment. Not for long: the writer's log grows meanwhile."""
        self.rows("BEGIN")
        try:
            yield
        finally:
            self.rows("COMMIT")

    def rows(self, query: str, values: Iterable[Any] = ()) -> list[Row]:
        """What a query of SQL answers."""
        with explaining(self.path, "read"):
            return self._connection.execute(query, tuple(values)).fetchall()

    @contextmanager
    def _decoding(self, what: str) -> Iterator[None]:
        """What cannot be decoded is damaged: say which record, and what to do."""
        try:
            yield
        except DamagedRecordError as error:
            raise damaged(self.path, f"{what}: {error.why}") from error
        except (ValueError, TypeError, LookupError) as error:
            raise damaged(self.path, f"{what}: {type(error).__name__}: {error}") from error

    def _row(self, query: str, values: Iterable[Any] = ()) -> Row | None:
        return next(iter(self.rows(query, values)), None)

    # ---- batches ----------------------------------------------------------------------------------------------------

    def batch_record(self, step: int) -> BatchRecord | None:
        """The batch that was trained after so many steps."""
        return next(iter(self._batches("step = ?", step)), None)

    def batches_from(self, step: int) -> list[BatchRecord]:
        """Batches that a checkpoint of `step` does not contain, in order."""
        return self._batches("step >= ?", step)

    def _batches(self, condition: str, step: int) -> list[BatchRecord]:
        query = f"SELECT step, version, steps, pieces FROM batches WHERE {condition} ORDER BY step"
        return [
            self._with_members(BatchRecord(at, version, (), (), steps, self._pieces(at, pieces)))
            for at, version, steps, pieces in self.rows(query, (step,))
        ]

    def _pieces(self, step: int, pieces: str) -> tuple[int, ...]:
        with self._decoding(f"the pieces of the batch of step {step + 1}"):
            return tuple(json.loads(pieces))

    def _with_members(self, batch: BatchRecord) -> BatchRecord:
        rows = self.rows("SELECT group_id, again FROM batch_groups WHERE step = ? ORDER BY place", (batch.step,))
        fresh, again = (tuple(group_id for group_id, flag in rows if flag == wanted) for wanted in (0, 1))
        return replace(batch, group_ids=fresh, again=again)

    def trained_rows(self, step: int) -> tuple[TrainedRow, ...] | None:
        """The rows of the batch that was trained after so many steps; None if they are not, or no longer, recorded."""
        found, batch = self._row("SELECT body FROM batch_rows WHERE step = ?", (step,)), self.batch_record(step)
        if found is None:
            return None
        with self._decoding(f"the batch of step {step + 1}"):
            if batch is None:
                raise DamagedRecordError("it has rows, but no batch")
            return unpack_rows(unseal(found[0], step, batch.version, batch.group_ids, batch.again))

    def learner_rows(self, step: int) -> tuple[LearnerRow | None, ...] | None:
        """What the learner computed of the rows of the batch that was trained after so many steps.

        One entry for each of `trained_rows(step)`, in its order: log-probability, entropy and clip state of every
        trained token, as they were before the update. None for a row that is not recorded (yet: with several updates
        on a batch they come one by one). None in all if nothing is, or no longer, recorded. To show an episode, see
        `headrace.ledger.episode_tokens`.
        """
        found = self.rows("SELECT part, body FROM batch_tokens WHERE step = ? ORDER BY part", (step,))
        trained = self.trained_rows(step) if found else None
        if trained is None:
            return None
        rows: list[LearnerRow | None] = [None] * len(trained)
        with self._decoding(f"the learner's values of the batch of step {step + 1}"):
            for part, body in found:
                for place, row in unpack_tokens(unseal(body, step, part)):
                    if len(row.logprobs) != trained[place].tokens:
                        raise DamagedRecordError(f"row {place} has {len(row.logprobs)} tokens")
                    rows[place] = row
        return tuple(rows)

    def steps_of(self, group_id: int) -> list[int]:
        """The steps of the batches that held a group, in order."""
        query = "SELECT step FROM batch_groups WHERE group_id = ? ORDER BY step"
        return [step for (step,) in self.rows(query, (group_id,))]

    def last_batch(self) -> BatchRecord | None:
        """The batch that was recorded last."""
        found = self._row("SELECT step FROM batches ORDER BY step DESC LIMIT 1")
        return None if found is None else self.batch_record(found[0])

    def batch_count(self) -> int:
        """How many batches were committed."""
        return (self._row("SELECT count(*) FROM batches WHERE committed_at IS NOT NULL") or (0,))[0]

    def weight_sync(self, version: int) -> WeightSyncRecord | None:
        """The weight sync of a version."""
        row = self._row("SELECT version, fingerprint, step FROM publications WHERE version = ?", (version,))
        return None if row is None else WeightSyncRecord(*row)

    def weight_syncs_between(self, start: float, end: float) -> list[tuple[int, int, float]]:
        """Version, step and time of the weight syncs within a window of time."""
        query = "SELECT version, step, published_at FROM publications WHERE published_at BETWEEN ? AND ? LIMIT 2000"
        return self.rows(query, (start, end))  # type: ignore[return-value]

    def last_weight_sync(self) -> WeightSyncRecord | None:
        """The weight sync of the newest version."""
        row = self._row("SELECT version, fingerprint, step FROM publications ORDER BY version DESC LIMIT 1")
        return None if row is None else WeightSyncRecord(*row)

    def evaluations(self) -> list[EvaluationRecord]:
        """Every evaluation, by step; those of one step as they were made."""
        rows = self.rows("SELECT step, name, metrics FROM evaluations ORDER BY step, evaluation_id")
        return [EvaluationRecord(step, name, from_json(metrics)) for step, name, metrics in rows]
