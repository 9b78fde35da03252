"""Limits on all processes of a program together, where control groups can be made (as root, or where delegated).

Without them the limits are per process. Groups are named after this process and removed with the program.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import time
from pathlib import Path

_WANTED = ("pids", "memory")
_SPARE_MB = 96  # for the launcher's own processes
_numbers = itertools.count()


def _mounts() -> dict[str, Path]:
    """Where the hierarchies are: by controller, and "" for version 2."""
    found: dict[str, Path] = {}
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        kind, _, options = right.split(" ", 2)
        if kind == "cgroup2":
            found.setdefault("", Path(left.split()[4]))
        elif kind == "cgroup":
            found.update({name: Path(left.split()[4]) for name in options.split(",") if name in _WANTED})
    return found


@functools.cache
def parents() -> dict[str, Path]:
    """Folders in which a group for each controller can be made; empty where there are none."""
    found: dict[str, Path] = {}
    with contextlib.suppress(OSError, ValueError):
        mounts = _mounts()
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, names, path = line.split(":", 2)
            for name in names.split(","):
                if name not in mounts:
                    continue
                folder = mounts[name] / path.lstrip("/")
                there = [name] if name else (folder / "cgroup.subtree_control").read_text().split()
                if os.access(folder, os.W_OK):
                    found |= {wanted: folder for wanted in _WANTED if wanted in there and wanted not in found}
    _remove_stale(set(found.values()))
    return found


def _remove_stale(folders: set[Path]) -> None:
    """Groups of processes that were killed before they could remove them."""
    for folder in folders:
        for group in folder.glob("headrace-*-*"):
            owner = group.name.split("-")[1]
            if not Path(f"/proc/{owner}").exists():
                with contextlib.suppress(OSError):
                    group.rmdir()


def make_groups(processes: int, megabytes: int) -> list[Path]:
    """A new group in each hierarchy, with its limit; none where that is refused."""
    made: list[Path] = []
    name = f"headrace-{os.getpid()}-{next(_numbers)}"
    limit = str((megabytes + _SPARE_MB) << 20)
    try:
        for controller, parent in parents().items():
            group = parent / name
            if group not in made:
                group.mkdir()
                made.append(group)
            if controller == "pids":
                (group / "pids.max").write_text(str(processes + 4))  # and those of the launcher
            else:
                new = group / "memory.max"
                (new if new.exists() else group / "memory.limit_in_bytes").write_text(limit)
    except OSError:
        remove_groups(made)
        return []
    return made


def remove_groups(groups: list[Path]) -> None:
    """After the program: its last processes may still be on their way out."""
    for group in groups:
        with contextlib.suppress(OSError):
            (group / "cgroup.kill").write_text("1")
        for _ in range(100):
            try:
                group.rmdir()
                break
            except FileNotFoundError:
                break
            except OSError:
                time.sleep(0.01)
