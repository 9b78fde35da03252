"""RunView and RunShelf: the runs that are shown, and what is kept in memory of them. Files are only read."""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headrace.errors import LedgerError
from headrace.ledger.files import connect_unchanged, ledger_file
from headrace.ledger.reader import LedgerReader
from headrace.ledger.records import ProcessRecord
from headrace.ledger.schema import version_of
from headrace.models.token_text import TokenTexts, token_texts_of_run
from headrace.viewer.folders import RunState, config_of, find_runs, recorded, state_of
from headrace.viewer.metrics import MetricsTable

_IDLE = 4  # connections that a run keeps for the next request
_STATE_S = 1.0  # how long a state is believed
_SCAN_S = 3.0  # how long a list of folders is


class Missing(Exception):
    """What was asked for is not there."""


class RunView:
    """One run. Methods may be called from several threads."""

    def __init__(self, run_id: str, folder: Path) -> None:
        self.id = run_id
        self.folder = folder
        self._metrics = MetricsTable(folder)
        self._lock = threading.Lock()
        self._idle: list[sqlite3.Connection] = []
        self._file: tuple[int, int] | None = None
        self._copied: tempfile.TemporaryDirectory[str] | None = None
        self._state: tuple[float, RunState] | None = None
        self._config: tuple[int, dict[str, Any]] = (-1, {})
        self._texts: tuple[float, TokenTexts | None] | None = None

    # ---- files beside the ledger ------------------------------------------------------------------------------------

    @contextmanager
    def metrics(self) -> Iterator[MetricsTable]:
        """The metrics up to now; nobody else changes the table meanwhile."""
        with self._lock:
            self._metrics.refresh()
            yield self._metrics

    @property
    def config(self) -> dict[str, Any]:
        """The configuration; empty if there is none."""
        try:
            changed = (self.folder / "config.json").stat().st_mtime_ns
        except OSError:
            changed = 0
        if self._config[0] != changed:
            self._config = (changed, config_of(self.folder))
        return self._config[1]

    @property
    def texts(self) -> TokenTexts | None:
        """What tokens say; None where the tokenizer is not to be found, which is looked for again after a while."""
        if self._texts is None or (self._texts[1] is None and time.monotonic() - self._texts[0] > 60):
            self._texts = (time.monotonic(), token_texts_of_run(self.folder, self.config))
        return self._texts[1]

    def state(self) -> RunState:
        """In which state the run is."""
        now = time.monotonic()
        if self._state is None or now - self._state[0] > _STATE_S:
            self._state = (now, state_of(self.folder, self._processes()))
        return self._state[1]

    def _processes(self) -> list[ProcessRecord]:
        try:
            with self.ledger() as reader:
                return reader.processes()
        except (LedgerError, Missing):
            return []

    def revision(self) -> tuple[Any, ...]:
        """Changes whenever something that is shown may have changed."""
        parts: list[Any] = [self.state().word]
        for name in ("ledger.sqlite", "ledger.sqlite-wal", "metrics.jsonl", "config.json", "log.txt"):
            stat = recorded(self.folder / name)
            parts += [None] if stat is None else [stat.st_mtime_ns, stat.st_size]
        return tuple(parts)

    # ---- the ledger -------------------------------------------------------------------------------------------------

    @property
    def has_ledger(self) -> bool:
        """Whether the run records one."""
        return ledger_file(self.folder).is_file()

    @contextmanager
    def ledger(self) -> Iterator[LedgerReader]:
        """A reader for one request. Tables of older programs are read as they are: nothing is migrated."""
        path = ledger_file(self.folder)
        if not path.is_file():
            raise Missing("the run has no ledger; ledger.enabled is false, or it has not started yet")
        connection = self._take(path)
        try:
            yield LedgerReader(connection, path)
        except BaseException:
            connection.close()
            raise
        with self._lock:
            if len(self._idle) < _IDLE and not connection.in_transaction:
                self._idle.append(connection)
                return
        connection.close()

    def _take(self, path: Path) -> sqlite3.Connection:
        stat = path.stat()
        with self._lock:
            if self._file != (stat.st_dev, stat.st_ino):  # another file was put in its place
                self._file = (stat.st_dev, stat.st_ino)
                while self._idle:
                    self._idle.pop().close()
            if self._idle:
                return self._idle.pop()
        try:
            return _as_newest(connect_unchanged(path))
        except LedgerError:
            if not (wal := path.with_name(f"{path.name}-wal")).is_file():
                raise
            copy = self._copy(path, wal)
            try:
                return _as_newest(connect_unchanged(copy))
            except LedgerError as error:
                raise LedgerError(str(error).replace(str(copy), str(path))) from None

    def _copy(self, path: Path, wal: Path) -> Path:
        """Of a killed run in a folder that cannot be written: SQLite needs to write beside the file to read its log."""
        with self._lock:
            if self._copied is None:
                self._copied = tempfile.TemporaryDirectory(prefix="headrace-view-")
                for one in (path, wal):
                    shutil.copyfile(one, Path(self._copied.name) / one.name)
            return Path(self._copied.name) / path.name

    def close(self) -> None:
        """Let go of the files."""
        with self._lock:
            while self._idle:
                self._idle.pop().close()
            if self._copied is not None:
                self._copied.cleanup()
                self._copied = None


class RunShelf:
    """The runs at or below a folder, by id: the path below it with ~ for /. Only what is found can be asked for."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self._runs: dict[str, RunView] = {}
        self._lock = threading.Lock()
        self._scanned: float | None = None

    def runs(self) -> list[RunView]:
        """All of them, by path."""
        with self._lock:
            now = time.monotonic()
            if self._scanned is None or now - self._scanned > _SCAN_S:
                self._scan()
                self._scanned = now
            return list(self._runs.values())

    def _scan(self) -> None:
        known = {view.folder: view for view in self._runs.values()}
        found: dict[str, RunView] = {}
        for folder in find_runs(self.root):
            view = known.pop(folder, None) or RunView(self._id_of(folder, found), folder)
            found[view.id] = view
        for gone in known.values():
            gone.close()
        self._runs = found

    def _id_of(self, folder: Path, taken: dict[str, RunView]) -> str:
        inner = folder.relative_to(self.root).as_posix() if folder != self.root else folder.name
        name = base = inner.replace("/", "~") or "run"
        number = 2
        while name in taken or (name in self._runs and self._runs[name].folder != folder):
            name, number = f"{base}~{number}", number + 1
        return name

    def run(self, run_id: str) -> RunView:
        """One run by its id."""
        view = self._runs.get(run_id) or next((view for view in self.runs() if view.id == run_id), None)
        if view is None:
            raise Missing(f'there is no run "{run_id}" here')
        return view

    def close(self) -> None:
        """Let go of all files."""
        for view in self._runs.values():
            view.close()


def _as_newest(connection: sqlite3.Connection) -> sqlite3.Connection:
    """Give a reader of older tables what they lack, empty and for itself alone: the file stays as it is."""
    version = version_of(connection)
    if version < 2:
        connection.execute("CREATE TEMP TABLE batch_rows (step INTEGER PRIMARY KEY, body BLOB)")
    if version < 6:
        connection.execute("CREATE TEMP TABLE batch_tokens (step INTEGER, part INTEGER, body BLOB)")
    return connection


def has_times(reader: LedgerReader) -> bool:
    """Whether the ledger says when episodes started (tables of version 5 and later)."""
    return version_of(reader._connection) >= 5
