"""Opening the file: its lock, its checks, and what SQLite's failures mean in our words."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

from headrace.errors import LedgerError
from headrace.ledger.schema import APPLICATION_ID, MIGRATIONS, migrate, version_of
from headrace.utils.file_lock import FileLock, FileLockedError

FILE_NAME = "ledger.sqlite"
_WAL_BYTES = 64 << 20
_BUSY_S = 30.0

WITHOUT_IT = (
    "or move ledger.sqlite and ledger.sqlite-wal away: the run then resumes from its newest checkpoint (from its "
    "beginning, if it has none), trains nothing twice, and starts a new record there"
)

_REMEDIES = {
    "SQLITE_FULL": "free some space and run the same command again; what is recorded is intact",
    "SQLITE_READONLY": "make the folder writable, or choose another with --run-dir",
    "SQLITE_CANTOPEN": "make the folder writable, or choose another with --run-dir",
    "SQLITE_PERM": "make the folder writable, or choose another with --run-dir",
    "SQLITE_IOERR": "check the disk, then run the same command again; what is recorded is intact",
    "SQLITE_BUSY": "another program holds the file; end it first",
    "SQLITE_NOTADB": "it is not a ledger; name the folder of a run",
}

_DAMAGE = (sqlite3.DatabaseError, UnicodeDecodeError)  # the second where SQLite quotes damaged text in its complaint


def ledger_file(place: Path) -> Path:
    """The ledger's file: of a run folder, or the file itself."""
    return place if place.suffix == Path(FILE_NAME).suffix else place / FILE_NAME


def explained(error: Exception, path: Path, doing: str) -> LedgerError:
    """A failure of SQLite or of the system as one of ours."""
    if isinstance(error, LedgerError):
        return error
    name = getattr(error, "sqlite_errorname", None) or ""
    remedy = next((text for code, text in _REMEDIES.items() if name.startswith(code)), "")
    if isinstance(error, OSError):
        remedy = _REMEDIES["SQLITE_READONLY"]
    said = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    if not remedy and isinstance(error, _DAMAGE) and not isinstance(error, sqlite3.ProgrammingError):
        return damaged(path, said)
    return LedgerError(f"cannot {doing} the ledger {path}: {said}" + (f"; {remedy}" if remedy else ""))


def damaged(path: Path, found: str) -> LedgerError:
    """What to say of a file that this program cannot have left like this."""
    return LedgerError(f"the ledger {path} is damaged, or was changed by hand: {found}. Put a copy back; {WITHOUT_IT}")


@contextmanager
def explaining(path: Path, doing: str) -> Iterator[None]:
    """Turn what SQLite and the system raise into LedgerErrors."""
    try:
        yield
    except (sqlite3.Error, UnicodeDecodeError, OSError) as error:
        raise explained(error, path, doing) from error


def lock_for_writing(path: Path) -> FileLock:
    """One writer per file, also across processes."""
    try:
        return FileLock(path.with_name(f"{path.name}-lock"))
    except FileLockedError as holder:
        raise LedgerError(
            f"{holder} writes the ledger {path}; wait for it, end it, or choose another run with --run-dir"
        ) from None


def connect_writer(path: Path) -> sqlite3.Connection:
    """Create, migrate or simply open the file, to be used by one thread at a time."""
    with explaining(path, "open"):
        connection = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
        try:
            _check(connection, path, may_be_empty=True)
            connection.execute("PRAGMA auto_vacuum = INCREMENTAL")  # before the first table, or not at all
            _use_log(connection, path)
            connection.execute("PRAGMA synchronous = NORMAL")
            connection.execute(f"PRAGMA journal_size_limit = {_WAL_BYTES}")
            migrate(connection)
        except BaseException:
            connection.close()
            raise
        return connection


def _use_log(connection: sqlite3.Connection, path: Path) -> None:
    (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
    if mode != "wal":  # SQLite does not fail where shared memory is missing, it uses another mode
        raise LedgerError(
            f"the file system of {path} cannot hold a ledger that is read while it is written (journal mode {mode}); "
            "choose a folder on a local disk with --run-dir"
        )


def connect_reader(path: Path) -> sqlite3.Connection:
    """Open for reading, beside a writer or without one. A file of an older program is migrated first."""
    connection = connect_unchanged(path)
    with explaining(path, "read"):
        if version_of(connection) == len(MIGRATIONS):
            return connection
        connection.close()
        lock = lock_for_writing(path)  # the program that writes it now may be older too, and would be surprised
        try:
            connect_writer(path).close()
        finally:
            lock.release()
    return _connect_read_only(path)


def connect_unchanged(path: Path) -> sqlite3.Connection:
    """Open for reading and leave the file as it is: tables of an older program may lack what newer ones have."""
    if not path.exists():
        raise LedgerError(f"there is no ledger {path}; name the folder of a run that was made with ledger.enabled")
    return _connect_read_only(path)


def _connect_read_only(path: Path) -> sqlite3.Connection:
    uri = f"file:{quote(str(path.resolve()))}?mode=ro"
    with explaining(path, "read"):
        try:
            return _checked(uri, path)
        except sqlite3.Error as error:
            # In a folder that cannot be written, SQLite cannot make the files it shares with a writer. Where no writer
            # left any, the file itself is all there is.
            wal = path.with_name(f"{path.name}-wal")
            cannot_open = (error.sqlite_errorname or "").startswith(("SQLITE_CANTOPEN", "SQLITE_READONLY"))
            if not cannot_open or (wal.exists() and wal.stat().st_size):
                raise
        return _checked(f"{uri}&immutable=1", path)


def _checked(uri: str, path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(uri, uri=True, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
    try:
        _check(connection, path, may_be_empty=False)
    except BaseException:
        connection.close()
        raise
    return connection


def _check(connection: sqlite3.Connection, path: Path, may_be_empty: bool) -> None:
    """Refuse what is not a ledger, and what a newer program wrote."""
    tables = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    ours = connection.execute("PRAGMA application_id").fetchone()[0] == APPLICATION_ID
    if not ours and (tables or not may_be_empty):
        what = "some other program's database" if tables else "empty"
        raise LedgerError(f"{path} is not a ledger: it is {what}; name the folder of a run")
    version = version_of(connection)
    if version > len(MIGRATIONS):
        raise LedgerError(
            f"the ledger {path} has version {version}, and this program knows versions up to {len(MIGRATIONS)}; "
            "use the Headrace that wrote it, or a newer one"
        )
