"""Runs a command, and kills it with all its descendants when the process that started this has gone.

Run as a file, by path: it imports nothing of Headrace, so it starts in a few milliseconds in any environment.
Arguments: the descriptor of a pipe whose other end the parent holds, and the command.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

_SET_CHILD_SUBREAPER = 36


def main(pipe: int, command: list[str]) -> int:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the parent decides when to end
        signal.signal(number, signal.SIG_IGN)
    _adopt_orphans()
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # a handler, or no byte would come
    child = subprocess.Popen(command, start_new_session=True, restore_signals=True, preexec_fn=_default_signals)
    while child.poll() is None:
        ready, _, _ = select.select([pipe, woken], [], [])
        if woken in ready:
            os.read(woken, 4096)
        if pipe in ready:  # closed: the parent has gone, or wants an end
            break
    _kill_descendants()
    return child.wait()


def _default_signals() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _adopt_orphans() -> None:
    """Processes whose parent died become children of this one, where they can be found."""
    with suppress(OSError, AttributeError):  # not Linux: the children that are still found are killed
        ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _kill_descendants() -> None:
    while found := _descendants(os.getpid()):
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        select.select([], [], [], 0.01)


def _descendants(pid: int) -> list[int]:
    found: list[int] = []
    for tasks in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            for child in map(int, tasks.read_text().split()):
                found += [child, *_descendants(child)]
        except OSError:
            continue
    return found


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]) & 0xFF)
