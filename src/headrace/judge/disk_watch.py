"""How much a program keeps on disk, where no file system of its own limits it (sandbox modes "seccomp" and "none").

Counted are the files in its folder, and deleted files that it still has open or mapped. Loaded by `launch.py` as a
module of its own, with nothing of Headrace imported.
"""

from __future__ import annotations

import ctypes
import os

_MOST_FILES = 10_000
_MOST_UNSEEN = 4  # looks in a row; a process that is just starting another program cannot be looked into

_libc = ctypes.CDLL(None)


def _sizes(folder: str) -> tuple[list[int], list[str]]:
    """The sizes of what is in a folder, and the folders in it, while a program changes it."""
    sizes, folders = [], []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                try:
                    sizes.append(entry.stat(follow_symlinks=False).st_blocks * 512)
                except FileNotFoundError:
                    continue
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
    except (FileNotFoundError, NotADirectoryError):  # removed meanwhile
        pass
    return sizes, folders


def _folder_is_over(folder: str, most: int) -> bool:
    """Whether a folder holds more bytes or files than it may, or what cannot be looked into."""
    size, count, folders = 0, 0, [folder]
    while folders and count <= _MOST_FILES and size <= most:
        try:
            sizes, inside = _sizes(folders.pop())
        except OSError:  # made unreadable, or so deep that its path is too long
            return True
        folders += inside
        size, count = size + sum(sizes), count + len(sizes)
    return count > _MOST_FILES or size > most


def _read(path: str) -> list[str]:
    try:
        with open(path, errors="replace") as file:
            return file.read().splitlines()
    except (FileNotFoundError, ProcessLookupError):  # ended meanwhile
        return []


def _listed(path: str) -> list[str]:
    try:
        return [f"{path}/{name}" for name in os.listdir(path)]
    except (FileNotFoundError, ProcessLookupError):
        return []


def _tasks_below() -> list[str]:
    """The folders in /proc of all threads of all processes that the program consists of."""
    found: list[str] = []
    waiting = [f"/proc/self/task/{os.getpid()}"]
    while waiting:
        for line in _read(f"{waiting.pop()}/children"):
            for process in line.split():
                tasks = _listed(f"/proc/{process}/task")
                found += tasks
                waiting += tasks
    return found


def _stat_of_open(task: str) -> list[os.stat_result]:
    found = []
    for path in _listed(f"{task}/fd"):
        try:
            found.append(os.stat(path))
        except OSError:  # closed meanwhile
            continue
    return found


def _deleted_bytes(folder: str, most: int, given: set[int]) -> int:
    """The size of deleted files that the program holds on to. `given` are the inodes of those it was started with.

    The size of one that is only mapped cannot be seen: it counts as large as a file may be.
    """
    sizes: dict[int, int] = {}
    mapped: set[int] = set()
    for task in _tasks_below():
        for found in _stat_of_open(task):
            if found.st_nlink == 0 and found.st_mode & 0o170000 == 0o100000 and found.st_ino not in given:
                sizes[found.st_ino] = found.st_blocks * 512
        for line in _read(f"{task}/maps"):
            if line.endswith(" (deleted)") and f" {folder}/" in line:
                mapped.add(int(line.split(None, 5)[4]))
    return sum(sizes.values()) + most * len(mapped - sizes.keys())


class DiskWatch:
    """Looks at what the program keeps. Made by the supervisor, of which the program is a child."""

    def __init__(self, folder: str, most: int, user: int) -> None:
        self._folder, self._most, self._user = os.path.realpath(folder), most, user
        self._given = {found.st_ino for found in _stat_of_open(f"/proc/self/task/{os.getpid()}")}
        self._unseen = 0

    def is_over(self) -> bool:
        """Whether the program must be killed: it keeps too much, or hides what it keeps."""
        if _folder_is_over(self._folder, self._most):
            return True
        own = os.geteuid()
        _see_as(self._user)  # as the program's user: root may lack the capability to look into other processes
        try:
            held = _deleted_bytes(self._folder, self._most, self._given)
            self._unseen = 0
        except PermissionError:
            held, self._unseen = 0, self._unseen + 1
        finally:
            _see_as(own)
        return held > self._most or self._unseen > _MOST_UNSEEN


def _see_as(user: int) -> None:
    """Which user's permissions hold for files. Only root can change them, and change them back."""
    _libc.setfsgid(user)
    _libc.setfsuid(user)
