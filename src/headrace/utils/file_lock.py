"""FileLock: one holder per file, across processes. The kernel holds the lock, so it ends with the process."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import socket
from contextlib import suppress
from pathlib import Path

_log = logging.getLogger(__name__)
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_held: set[FileLock] = set()


class FileLockedError(Exception):
    """Someone else holds the lock; the message says who."""


class FileLock:
    """Held from its creation to `release`, also against others of this process. The file stays: whoever waits for it
    and whoever takes it must mean the same one."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = _described(os.read(self._file, 1000))
            if isinstance(error, BlockingIOError) or error.errno not in _NO_LOCKS:
                os.close(self._file)
            if isinstance(error, BlockingIOError):
                raise FileLockedError(holder) from None
            if error.errno not in _NO_LOCKS:
                raise
            _log.warning("%s is on a file system without locks; do not start a second run in it", path.parent)
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, (json.dumps({"pid": os.getpid(), "host": socket.gethostname()}) + "\n").encode(), 0)
        _held.add(self)

    def release(self) -> None:
        """Let others have it; a second release does nothing."""
        if self in _held:
            with suppress(OSError):  # where there are no locks
                fcntl.flock(self._file, fcntl.LOCK_UN)  # closing is not enough while a forked child has the file, too
            self.forget()

    def forget(self) -> None:
        """Close the file and leave the lock as it is: another process has it."""
        _held.discard(self)
        os.close(self._file)


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


def _described(content: str | bytes) -> str:
    try:
        owner = json.loads(content)
        here = owner["pid"] == os.getpid() and owner["host"] == socket.gethostname()
        return "this very process" if here else f"process {owner['pid']} on {owner['host']}"
    except (ValueError, TypeError, KeyError):
        return "another process"


def _forget() -> None:
    """In a process forked from this one, which must not hold the lock after this one has died."""
    for lock in list(_held):
        lock.forget()


os.register_at_fork(after_in_child=_forget)
