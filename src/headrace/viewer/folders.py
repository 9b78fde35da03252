"""Run folders on disk: which there are, and in which state a run is."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.errors import HeadraceError
from headrace.ledger.files import FILE_NAME as LEDGER
from headrace.ledger.records import ProcessRecord
from headrace.run.stored import CONFIG, stored_config
from headrace.tracking.jsonl import FILE_NAME as METRICS
from headrace.utils.file_lock import holder_of

_DEEPEST = 3  # folders below the one that is shown
_FRESH_S = 120.0  # of another machine's run only its files say whether it is running
FAILED = "the run failed: "
"""How log.txt begins the line about what ended a run."""


@dataclass(frozen=True, slots=True)
class RunState:
    """`word` is running, done, interrupted (by a person), failed, crashed (killed) or empty; `why` explains it."""

    word: str
    why: str = ""


def is_run(folder: Path) -> bool:
    """Whether a folder holds a run."""
    return any((folder / name).is_file() for name in (LEDGER, METRICS, CONFIG))


def find_runs(root: Path) -> Iterator[Path]:
    """Run folders at or below a folder, without those inside of run folders."""
    if is_run(root):
        yield root
        return
    yield from _below(root, _DEEPEST)


def _below(folder: Path, depth: int) -> Iterator[Path]:
    try:
        inner = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and not entry.name.startswith("."))
    except OSError:
        return
    for name in inner:
        if is_run(folder / name):
            yield folder / name
        elif depth > 1:
            yield from _below(folder / name, depth - 1)


def config_of(folder: Path) -> dict[str, Any]:
    """The stored configuration; empty if there is none that can be read."""
    try:
        return (stored_config(folder) or {}) if (folder / CONFIG).is_file() else {}
    except (HeadraceError, OSError):
        return {}


def state_of(folder: Path, processes: list[ProcessRecord]) -> RunState:
    """In which state a run is, from its lock, its files and its record."""
    owner = _owner(folder)
    if owner is not None:
        return RunState("running", owner)
    if (folder / "finished").is_file():
        return RunState("done")
    last = processes[-1] if processes else None
    why = last_failure(folder)
    if last is None and not (folder / METRICS).exists():
        return RunState("failed", why) if why else RunState("empty", "nothing was recorded yet")
    if last is not None and last.ended_at is None:
        return RunState("crashed", f"process {last.pid} on {last.host} ended without a word; resume it")
    if why:
        return RunState("failed", why)
    return RunState("interrupted", "stopped before its last step; resume it")


def _owner(folder: Path) -> str | None:
    """Who is running the run. A lock is tried only if its owner may be alive: a run that starts must not find it."""
    lock = folder / "lock"
    try:
        if not lock.is_file():  # to open a pipe would wait for whoever writes it
            return None
        owner = json.loads(lock.read_text())
        pid, host = int(owner["pid"]), str(owner["host"])
    except (OSError, ValueError, TypeError, KeyError):
        return None
    if host == socket.gethostname():
        return holder_of(lock) if _is_alive(pid) else None
    newest = changed_at(folder)
    return f"process {pid} on {host}" if newest is not None and time.time() - newest < _FRESH_S else None


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # someone else's
        return True
    return True


def changed_at(folder: Path) -> float | None:
    """When something was last recorded, by the times of its files."""
    stats = (recorded(folder / name) for name in (METRICS, LEDGER, f"{LEDGER}-wal", "finished"))
    return max((stat.st_mtime for stat in stats if stat is not None), default=None)


def recorded(path: Path) -> os.stat_result | None:
    """Time and size of a file of a run; None if there is none, or if it is a log of SQLite that holds nothing: reading
    makes those."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return None if path.name.endswith("-wal") and not stat.st_size else stat


def last_failure(folder: Path) -> str:
    """What ended the last process of the run, if log.txt says so."""
    for line in reversed(log_lines(folder)):
        if FAILED in line:
            return line.partition(FAILED)[2].strip()
        if "loading" in line and "for the run in" in line:  # a process started after the failure
            return ""
    return ""


def log_lines(folder: Path, most_bytes: int = 256 << 10) -> list[str]:
    """The last lines of log.txt."""
    path = folder / "log.txt"
    try:
        if not path.is_file():  # to open a pipe would wait for whoever writes it
            return []
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - most_bytes))
            lines = file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return []
    return lines[1:] if size > most_bytes else lines


def warnings_of(folder: Path, most: int = 50) -> list[dict[str, str]]:
    """Warnings and errors of log.txt, newest first, each once with how often it came."""
    found: dict[str, dict[str, Any]] = {}
    for line in log_lines(folder):
        when, level, text = line[:23], *_parted(line[24:])
        if level not in ("WARNING", "ERROR", "CRITICAL") and FAILED not in line:
            continue
        text = text[:2000]
        entry = found.pop(text, {"text": text, "count": 0})
        found[text] = {**entry, "level": level.lower(), "at": when, "count": entry["count"] + 1}
    return list(reversed(found.values()))[:most]


def _parted(rest: str) -> tuple[str, str]:
    level, _, text = rest.partition(" ")
    return level, text
