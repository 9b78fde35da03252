"""A program that does not end when it is asked to, with a child in another session; for tests of what ends it."""

from __future__ import annotations

import sys
import time
from pathlib import Path

_CHILD = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
_PROGRAM = f"""
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", {_CHILD!r}], start_new_session=True)
with open(sys.argv[1] + ".new", "w") as file:
    file.write(f"{{os.getpid()}} {{child.pid}}")
os.rename(sys.argv[1] + ".new", sys.argv[1])
time.sleep(600)
"""


def stubborn(pids: Path) -> list[str]:
    """The command. It writes both process ids into a file."""
    return [sys.executable, "-c", _PROGRAM, str(pids)]


def started(pids: Path, limit_s: float = 30.0) -> list[int]:
    """The process ids, once it runs."""
    end = time.monotonic() + limit_s
    while not pids.exists():
        assert time.monotonic() < end, f"no {pids.name} after {limit_s:g} s"
        time.sleep(0.01)
    return [int(pid) for pid in pids.read_text().split()]


def left(pids: list[int], limit_s: float = 5.0) -> list[int]:
    """Those that still run after a while."""
    end = time.monotonic() + limit_s
    while (running := [pid for pid in pids if _runs(pid)]) and time.monotonic() < end:
        time.sleep(0.01)
    return running


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] != b"Z"
    except OSError:
        return False
