"""FileLock: one holder per file, across processes. The kernel holds the lock, so it ends with the process."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import socket
from pathlib import Path
from typing import IO

_log = logging.getLogger(__name__)
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_held: set[FileLock] = set()


class FileLockedError(Exception):
    """Someone else holds the lock; the message says who."""


class FileLock:
    """Held from its creation to `release`, also against others of this process. The file stays: whoever waits for it
    and whoever takes it must mean the same one."""

    def __init__(self, path: Path) -> None:
        self._file: IO[str] = path.open("a+")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with self._file:
                self._file.seek(0)
                raise FileLockedError(_described(self._file.read())) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                self._file.close()
                raise
            _log.warning("%s is on a file system without locks; do not start a second run in it", path.parent)
        self._file.truncate(0)
        self._file.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}) + "\n")
        self._file.flush()
        _held.add(self)

    def release(self) -> None:
        """Let others have it."""
        _held.discard(self)
        self._file.close()


def holder_of(path: Path) -> str | None:
    """Who holds a lock; None if nobody does. Takes no lock that lasts."""
    try:
        with path.open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return _described(file.read())
    except OSError:  # no such file, or no locks
        return None
    return None


def _described(content: str) -> str:
    try:
        owner = json.loads(content)
        here = owner["pid"] == os.getpid() and owner["host"] == socket.gethostname()
        return "this very process" if here else f"process {owner['pid']} on {owner['host']}"
    except (ValueError, TypeError, KeyError):
        return "another process"


def _forget() -> None:
    """In a process forked from this one, which must not hold the lock after this one has died."""
    for lock in list(_held):
        lock.release()


os.register_at_fork(after_in_child=_forget)
