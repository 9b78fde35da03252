"""Writer: one thread that owns the connection, and commits what it is handed in batches, in order.

What is guaranteed:
- Against the end of the process, `kill -9` included: every commit. A commit comes at the latest WAIT_S after an event
  was handed over (unless the disk is slower), and events are committed in their order, so the file holds a prefix.
- Against loss of power: everything before the last `flush`, and a prefix of what came after. Ordinary commits are not
  synced (SQLite's synchronous = NORMAL: the log is checksummed, and cut at the first frame that did not arrive).
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from headrace.errors import LedgerError
from headrace.ledger.files import explained
from headrace.ledger.recorder import Recorder

Event = tuple[Callable[..., None], tuple[Any, ...]]
"""A method of the Recorder, and its arguments."""

WAIT_S: Final = 0.05
BATCH: Final = 500
MOST_WAITING: Final = 10_000
_NICENESS = 10
_READERS_MS = 200  # how long emptying the log waits for readers
_SPARE_SHARE = 4  # free pages beyond one in so many are given back; the others are used again


def _step_back() -> None:
    """Leave the cores to those who compute: a writer that interrupts one of them makes all the others wait for it."""
    if sys.platform == "linux":  # where a thread has a priority of its own
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)


class Writer:
    """Takes events at once and writes them later. Its first failure is its last: it is raised from then on."""

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self._connection = connection
        self._path = path
        self._recorder = Recorder(connection, path)
        self._lock = threading.Lock()
        self._filled = threading.Condition(self._lock)  # the thread waits for events
        self._progress = threading.Condition(self._lock)  # callers wait for room, and for commits
        self._events: list[Event] = []
        self._handed_over = self._committed = self._synced = 0
        self._sync_up_to = 0
        self._hurry = self._closing = False
        self._failure: LedgerError | None = None
        self._raised = False
        self._thread = threading.Thread(target=self._run, name="ledger", daemon=True)
        self._thread.start()

    # ---- for callers ----------------------------------------------------------------------------------------------

    def put(self, method: Callable[..., None], *arguments: Any) -> None:
        """Hand an event over. Waits only if thousands are waiting already: none is lost."""
        with self._lock:
            while len(self._events) >= MOST_WAITING and self._failure is None:
                self._progress.wait()
            self._raise_failure()
            if self._closing:
                raise LedgerError(f"the ledger {self._path} was closed, and can record no more; open it again")
            self._events.append((method, arguments))
            self._handed_over += 1
            # Two calls per batch at most: waking the thread for every event would make both take turns all the time.
            if len(self._events) in (1, BATCH):
                self._filled.notify()

    def wait(self, sync: bool) -> None:
        """Wait until everything that was handed over is committed and, with `sync`, is on the disk."""
        with self._lock:
            upto = self._handed_over
            if sync:
                self._sync_up_to = max(self._sync_up_to, upto)
            while self._failure is None and (self._synced if sync else self._committed) < upto:
                self._hurry = True
                self._filled.notify()
                self._progress.wait()
            self._raise_failure()

    @property
    def open(self) -> bool:
        """Whether it takes events: it has neither failed nor been closed."""
        return self._failure is None and not self._closing

    def close(self) -> None:
        """Write what is left and end the thread. Raises its failure, unless a caller got it."""
        with self._lock:
            self._closing = True
            self._filled.notify()
        self._thread.join()
        self._connection.close()
        if not self._raised:
            self._raise_failure()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            self._raised = True
            raise self._failure

    # ---- the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        _step_back()
        while True:
            events, sync_up_to, closing = self._next_events()
            try:
                if events or sync_up_to > self._synced:
                    self._write(events, sync=sync_up_to > self._synced)
                if closing:
                    self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            except Exception as error:
                self._fail(error)
                return
            with self._lock:
                self._committed += len(events)
                if sync_up_to > self._synced:
                    self._synced = self._committed
                self._progress.notify_all()
            if closing:
                return

    def _next_events(self) -> tuple[list[Event], int, bool]:
        """Wait for events, then a moment for more of them."""
        with self._lock:
            self._filled.wait_for(lambda: self._events or self._hurry or self._closing)
            self._filled.wait_for(lambda: len(self._events) >= BATCH or self._hurry or self._closing, WAIT_S)
            events, self._events = self._events, []
            self._hurry = False
            self._progress.notify_all()
            return events, self._sync_up_to, self._closing

    def _write(self, events: list[Event], sync: bool) -> None:
        """One transaction. With `sync`, its commit syncs the log, which also holds all commits before it."""
        execute = self._connection.execute
        if sync:
            execute("PRAGMA synchronous = FULL")
        execute("BEGIN IMMEDIATE")
        for method, arguments in events:
            method(self._recorder, *arguments)
        self._recorder.before_commit()
        if sync:  # a commit that changes nothing would sync nothing
            execute("UPDATE flushes SET flushed_at = ?", (time.time(),))
        execute("COMMIT")
        if sync:
            execute("PRAGMA synchronous = NORMAL")
            self._empty_log()
        if any(method is Recorder.prune for method, _ in events):
            self._give_back_pages()

    def _empty_log(self) -> None:
        """Fold the log into the file: damage to the log then costs nothing that a checkpoint relies on."""
        execute = self._connection.execute
        (wait_ms,) = execute("PRAGMA busy_timeout").fetchone()
        execute(f"PRAGMA busy_timeout = {_READERS_MS}")  # someone who reads just now keeps it from being emptied
        execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        execute(f"PRAGMA busy_timeout = {wait_ms}")

    def _give_back_pages(self) -> None:
        free = self._connection.execute("PRAGMA freelist_count").fetchone()[0]
        pages = self._connection.execute("PRAGMA page_count").fetchone()[0]
        if free * _SPARE_SHARE > pages:
            self._connection.execute(f"PRAGMA incremental_vacuum({free - pages // _SPARE_SHARE})").fetchall()

    def _fail(self, error: Exception) -> None:
        """Undo the transaction: the file keeps what was committed before. Nothing is written from now on."""
        try:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
        except sqlite3.Error:
            pass  # SQLite rolls back by itself when the connection is closed
        with self._lock:
            self._failure = explained(error, self._path, "write")
            self._failure.__cause__ = None if self._failure is error else error
            self._events.clear()
            self._progress.notify_all()
