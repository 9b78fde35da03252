"""One process per run folder. The kernel holds the lock, so it is gone when the process is, whatever ended it."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import socket
from pathlib import Path
from typing import IO

from headrace.errors import ConfigError

_log = logging.getLogger(__name__)
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_held: set[RunLock] = set()


class RunFolderInUseError(ConfigError):
    """Another process, or another trainer of this one, has the run folder."""


class RunLock:
    """Held from its creation to `release`. The file stays: who waits for it and who takes it must mean the same one."""

    def __init__(self, folder: Path) -> None:
        self._file: IO[str] = (folder / "lock").open("a+")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with self._file:
                self._file.seek(0)
                owner = _described(self._file.read())
            raise RunFolderInUseError(in_use(folder, owner)) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                self._file.close()
                raise
            _log.warning("%s is on a file system without locks; do not start a second run in it", folder)
        self._file.truncate(0)
        self._file.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}) + "\n")
        self._file.flush()
        _held.add(self)

    def release(self) -> None:
        """Let others have the folder."""
        _held.discard(self)
        self._file.close()


def is_locked(folder: Path) -> str | None:
    """Who holds a folder; None if nobody does. Takes no lock that lasts."""
    try:
        with (folder / "lock").open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return _described(file.read())
    except OSError:  # no such folder, or no locks
        return None
    return None


def in_use(folder: Path, owner: str) -> str:
    """The sentence for a folder that is locked."""
    return (
        f"the run folder {folder} is in use by {owner}; wait for it to end, stop it, or choose another folder "
        f"with --run-dir"
    )


def _described(content: str) -> str:
    try:
        owner = json.loads(content)
        here = owner["pid"] == os.getpid() and owner["host"] == socket.gethostname()
        return "this very process" if here else f"process {owner['pid']} on {owner['host']}"
    except (ValueError, TypeError, KeyError):
        return "another process"


def _forget() -> None:
    """In a process forked from this one, which must not hold the folder after this one has died."""
    for lock in list(_held):
        lock.release()


os.register_at_fork(after_in_child=_forget)
