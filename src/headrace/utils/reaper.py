"""Runs a command, and kills it with all its descendants when the process that started this has gone.

Two processes watch: the outer over the inner, the inner over the program. Ray kills the children of an actor that it
ends, but not their children: the outer one is killed before it can do anything. Either of them is enough: it adopts
what the other leaves behind, and kills it.

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
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

_END_WITH_PARENT, _ADOPT_ORPHANS = 1, 36  # PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER
_LIBC = ctypes.CDLL(None)
_STOP = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_POLL_S = 0.01


def main(pipe: int, command: list[str]) -> int:
    for number in _STOP:  # the parent decides when to end
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # not ignored, or nobody would learn how a child ended
    codes: dict[int, int] = {}
    _control(_ADOPT_ORPHANS, 1)
    watched, held = os.pipe()
    child = os.fork()
    if child:
        os.close(watched)
        _watch(pipe, child, codes)
        os.close(held)  # the inner one ends the program itself where descendants cannot be found
    else:
        os.setsid()  # a signal to the group of the outer one must not end both
        os.close(held)
        os.close(pipe)
        child = _start(command)
        _watch(watched, child, codes)
        with suppress(OSError):  # needs no list of processes
            os.killpg(child, signal.SIGKILL)
    _kill_descendants(codes, last=child)
    return codes[child]


def _start(command: list[str]) -> int:
    watcher = os.getpid()
    _control(_ADOPT_ORPHANS, 1)  # which a fork does not inherit

    def prepare() -> None:
        _control(_END_WITH_PARENT, signal.SIGKILL)  # if both that watch are killed at once
        if os.getppid() != watcher:
            os._exit(1)
        for number in _STOP:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())

    return subprocess.Popen(command, start_new_session=True, preexec_fn=prepare).pid


def _control(option: int, value: int) -> None:
    with suppress(AttributeError):  # not Linux
        _LIBC.prctl(option, value, 0, 0, 0)


def _watch(pipe: int, child: int, codes: dict[int, int]) -> None:
    """Returns when the child has ended, or nobody holds the pipe's other end."""
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    while _reap(codes) and child not in codes:
        ready, _, _ = select.select([pipe, woken], [], [])
        if woken in ready:
            os.read(woken, 4096)
        if pipe in ready:
            return


def _reap(codes: dict[int, int]) -> bool:
    """Note how children have ended, adopted ones too; whether there are more."""
    try:
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return True
            codes[pid] = os.waitstatus_to_exitcode(status)
    except ChildProcessError:
        return False


def _kill_descendants(codes: dict[int, int], last: int) -> None:
    """The inner one is the last that the outer one kills: who of the two is left does the rest."""
    while _reap(codes):
        for pid in sorted(descendants(os.getpid()), key=last.__eq__):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        select.select([], [], [], _POLL_S)


def descendants(pid: int) -> list[int]:
    """The processes that run now, children before their own children."""
    children: dict[int, list[int]] = defaultdict(list)
    for folder in Path("/proc").glob("[0-9]*"):  # not every kernel lists the children of a process
        with suppress(OSError, IndexError):
            children[int((folder / "stat").read_bytes().rpartition(b")")[2].split()[1])].append(int(folder.name))
    found = [pid]
    for one in found:
        found += sorted(children[one])
    return found[1:]


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]) & 0xFF)
