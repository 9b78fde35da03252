"""What episodes remember for each other: values under keys, kept in the run's folder.

Workflows reach it as `model.store`. What an episode read is recorded with it, so that it reads the same again when it
is resumed after a crash.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol

from headrace.errors import WorkflowError

Recorded = Callable[[str, str, Any, Callable[[], Awaitable[Any]]], Awaitable[Any]]


class Values(Protocol):
    """Where values are."""

    def get(self, key: str) -> Any: ...

    def put(self, key: str, value: Any) -> None: ...


class StoredValues:
    """Values in a SQLite file, which is made when the first is written."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._opened: sqlite3.Connection | None = None

    def get(self, key: str) -> Any:
        if self._opened is None and not self._path.exists():
            return None
        found = self._database().execute("SELECT value FROM store WHERE key = ?", (key,)).fetchone()
        return None if found is None else json.loads(found[0])

    def put(self, key: str, value: Any) -> None:
        self._database().execute("INSERT OR REPLACE INTO store VALUES (?, ?)", (key, json.dumps(value)))

    def close(self) -> None:
        if self._opened is not None:
            self._opened.close()

    def _database(self) -> sqlite3.Connection:
        if self._opened is None:
            self._opened = sqlite3.connect(self._path, isolation_level=None)
            self._opened.execute("PRAGMA journal_mode = WAL")
            self._opened.execute("PRAGMA synchronous = NORMAL")
            self._opened.execute("CREATE TABLE IF NOT EXISTS store (key TEXT PRIMARY KEY, value TEXT NOT NULL)")
        return self._opened


class ValuesInMemory:
    """Values that nobody else sees, over those `below`: evaluation reads what training wrote, and leaves it alone."""

    def __init__(self, below: Values | None = None) -> None:
        self._below = below
        self._own: dict[str, str] = {}

    def get(self, key: str) -> Any:
        if key in self._own:
            return json.loads(self._own[key])
        return None if self._below is None else self._below.get(key)

    def put(self, key: str, value: Any) -> None:
        self._own[key] = json.dumps(value)


class Store:
    """The store as one episode sees it. Each call is done at once, with nothing of another episode in between."""

    def __init__(self, values: Values, recorded: Recorded) -> None:
        self._values = values
        self._recorded = recorded

    async def get(self, key: str, default: Any = None) -> Any:
        """The value under a key, or the default."""

        async def read() -> Any:
            return self._values.get(key)

        found = await self._recorded("store", "get", key, read)
        return default if found is None else found

    async def put(self, key: str, value: Any) -> None:
        """Keep a value that JSON can hold."""

        async def write() -> None:
            self._write(key, value)

        await self._recorded("store", "put", [key, value], write)

    async def append(self, key: str, value: Any, keep: int | None = None) -> int:
        """Add to the list under a key, of which the newest `keep` stay; returns its length."""

        async def write() -> int:
            listed = self._values.get(key)
            if listed is not None and not isinstance(listed, list):
                raise WorkflowError(f'store: "{key}" holds {type(listed).__name__}, not a list to append to')
            grown = [*(listed or []), value]
            grown = grown if keep is None else grown[max(0, len(grown) - keep) :]
            self._write(key, grown)
            return len(grown)

        return await self._recorded("store", "append", [key, value, keep], write)

    def _write(self, key: str, value: Any) -> None:
        try:
            self._values.put(key, value)
        except (TypeError, ValueError) as error:
            raise WorkflowError(f'store: the value of "{key}" must be data that JSON can hold: {error}') from error
