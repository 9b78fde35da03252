"""The tables of a ledger and how they came to be: one migration per version, applied in order."""

from __future__ import annotations

import sqlite3
from typing import Final

APPLICATION_ID: Final = 0x48524C47  # "HRLG", in the header of the file: what `file` and we recognise a ledger by

_V1 = (
    """CREATE TABLE processes (
        process_id INTEGER PRIMARY KEY, started_at REAL NOT NULL, ended_at REAL, pid INTEGER NOT NULL,
        host TEXT NOT NULL, resumed_from INTEGER)""",
    # task_id has no type: one that is a number stays one
    """CREATE TABLE groups (
        group_id INTEGER PRIMARY KEY, epoch INTEGER NOT NULL, place INTEGER NOT NULL, task_id NOT NULL,
        source TEXT NOT NULL, size INTEGER NOT NULL, version INTEGER NOT NULL, state TEXT NOT NULL, reason TEXT,
        step INTEGER, trained INTEGER NOT NULL DEFAULT 0, filtered INTEGER NOT NULL DEFAULT 0,
        failed INTEGER NOT NULL DEFAULT 0, stale INTEGER NOT NULL DEFAULT 0, pruned INTEGER NOT NULL DEFAULT 0,
        CHECK (trained + filtered + failed + stale <= size),
        CHECK (state IN ('dispatched', 'whole') OR trained + filtered + failed + stale = size))""",
    "CREATE INDEX groups_by_position ON groups (epoch, place)",
    "CREATE INDEX groups_undecided ON groups (group_id) WHERE state IN ('dispatched', 'whole')",
    """CREATE INDEX groups_to_prune ON groups (step)
        WHERE pruned = 0 AND state IN ('trained', 'filtered', 'failed', 'stale')""",
    "CREATE TABLE prompts (group_id INTEGER PRIMARY KEY, body BLOB NOT NULL)",
    """CREATE TABLE episodes (
        episode_id INTEGER PRIMARY KEY, group_id INTEGER NOT NULL, rollout_idx INTEGER NOT NULL,
        attempt INTEGER NOT NULL, state TEXT NOT NULL, seed INTEGER, termination TEXT, reward REAL,
        is_correct INTEGER, error TEXT, metrics TEXT, oldest_version INTEGER, newest_version INTEGER,
        generated_tokens INTEGER, duration_s REAL, UNIQUE (group_id, rollout_idx, attempt))""",
    # apart from the episodes, so that pruning empties whole pages, which are used again
    "CREATE TABLE bodies (episode_id INTEGER PRIMARY KEY, body BLOB NOT NULL)",
    "CREATE TABLE params (params_id INTEGER PRIMARY KEY, params TEXT NOT NULL UNIQUE)",
    """CREATE TABLE calls (
        call_id INTEGER PRIMARY KEY, episode_id INTEGER NOT NULL, call INTEGER NOT NULL, role TEXT NOT NULL,
        seed INTEGER NOT NULL, request_digest TEXT NOT NULL, params_id INTEGER NOT NULL,
        prompt_tokens INTEGER NOT NULL, completion_tokens INTEGER NOT NULL, finish_reason TEXT NOT NULL,
        temperature REAL NOT NULL, body BLOB NOT NULL, UNIQUE (episode_id, call))""",
    """CREATE TABLE results (
        result_id INTEGER PRIMARY KEY, episode_id INTEGER NOT NULL, number INTEGER NOT NULL, kind TEXT NOT NULL,
        name TEXT NOT NULL, request_digest TEXT NOT NULL, payload BLOB NOT NULL, UNIQUE (episode_id, number))""",
    """CREATE TABLE batches (
        step INTEGER PRIMARY KEY, steps INTEGER, version INTEGER NOT NULL, pieces TEXT NOT NULL,
        recorded_at REAL NOT NULL, committed_at REAL)""",
    """CREATE TABLE batch_groups (
        step INTEGER NOT NULL, place INTEGER NOT NULL, group_id INTEGER NOT NULL, again INTEGER NOT NULL,
        PRIMARY KEY (step, place)) WITHOUT ROWID""",
    # weight syncs; `fingerprint` is the digest of the weights (tables keep the names that they were released with)
    """CREATE TABLE publications (
        version INTEGER PRIMARY KEY, fingerprint TEXT NOT NULL, step INTEGER NOT NULL, published_at REAL NOT NULL)""",
    """CREATE TABLE evaluations (
        evaluation_id INTEGER PRIMARY KEY, step INTEGER NOT NULL, name TEXT NOT NULL, metrics TEXT NOT NULL,
        evaluated_at REAL NOT NULL, UNIQUE (step, name))""",
    """CREATE TABLE eval_episodes (
        eval_episode_id INTEGER PRIMARY KEY, evaluation_id INTEGER NOT NULL, task_id NOT NULL, source TEXT NOT NULL,
        group_id INTEGER NOT NULL, rollout_idx INTEGER NOT NULL, attempt INTEGER NOT NULL, seed INTEGER,
        termination TEXT, reward REAL, is_correct INTEGER, error TEXT, metrics TEXT, oldest_version INTEGER,
        newest_version INTEGER, generated_tokens INTEGER, body BLOB NOT NULL)""",
    "CREATE INDEX eval_episodes_by_evaluation ON eval_episodes (evaluation_id)",
    # kept up to date with the groups in the same transaction: the account of a million episodes is a few rows
    """CREATE TABLE counts (
        source TEXT NOT NULL, ending TEXT NOT NULL, episodes INTEGER NOT NULL,
        PRIMARY KEY (source, ending)) WITHOUT ROWID""",
    "CREATE TABLE flushes (flushed_at REAL NOT NULL)",
    "INSERT INTO flushes VALUES (0)",
)

_V2 = (
    # a body per batch, not a row per training row: it costs the run next to nothing
    "CREATE TABLE batch_rows (step INTEGER PRIMARY KEY, body BLOB NOT NULL)",
    "CREATE INDEX batch_groups_by_group ON batch_groups (group_id)",
)

_V3 = (
    # a checkpoint names its ledger, so that one of another run is noticed
    "CREATE TABLE identity (ledger_id TEXT NOT NULL, begun_from TEXT, begun_step INTEGER)",
    "INSERT INTO identity VALUES (lower(hex(randomblob(16))), NULL, NULL)",
)

_V4: tuple[str, ...] = ()  # bodies have checksums, which an older program would take for text

_V5 = (
    # when, by the wall clock: for people who look at a timeline. Nothing is decided by it
    "ALTER TABLE episodes ADD COLUMN started_at REAL",
    "ALTER TABLE episodes ADD COLUMN finished_at REAL",
    # "what happened at this step" and "how did it learn this task" without reading every group
    "CREATE INDEX groups_by_step ON groups (step)",
    "CREATE INDEX groups_by_task ON groups (task_id)",
)

_V6 = (
    # what the learner computed of trained tokens: apart from the rows, which are mostly read without them
    "CREATE TABLE batch_tokens (step INTEGER NOT NULL, part INTEGER NOT NULL, body BLOB NOT NULL, "
    "PRIMARY KEY (step, part))",
)

MIGRATIONS: list[tuple[str, ...]] = [_V1, _V2, _V3, _V4, _V5, _V6]
"""Statements that lead from version n to n + 1. Never change one that was released; add another."""


def version_of(connection: sqlite3.Connection) -> int:
    """Which version of the tables the file has; 0 for an empty one."""
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


def migrate(connection: sqlite3.Connection) -> None:
    """Bring the file to the newest version, each migration whole or not at all."""
    for number in range(version_of(connection), len(MIGRATIONS)):
        connection.execute("BEGIN IMMEDIATE")
        try:
            for statement in MIGRATIONS[number]:
                connection.execute(statement)
            connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version = {number + 1}")
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
