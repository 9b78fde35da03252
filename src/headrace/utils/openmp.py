"""How OpenMP threads wait for each other: awake on a quiet machine, asleep on a busy one.

OpenMP threads wait for each other after every tensor operation. GNU's OpenMP, which torch ships, spins for milliseconds
before it sleeps. On a quiet machine that is right: most waits are shorter than falling asleep and waking up, and with
shorter spinning a step takes twice as long at worst. On a busy machine the spinning threads take the cores from the
thread that they wait for, and a step takes ten times as long.

So a thread watches what other processes take of the machine. While that and this process's tensor threads are more than
there are cores, it makes OpenMP sleep at once. OpenMP has no call for it, but a rule: while a process has more OpenMP
threads than there are cores, none of them spins. A team of idle threads makes it so, and its end undoes it.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path

_CHOSEN_BY_USER = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
_LOOK_S = 0.2
_SPARE = 0.4
"""Cores by which the machine may be overcommitted: the measurement is coarse, and there is always some other work."""
_QUIET_LOOKS = 3
"""Looks in a row at a quiet machine before threads spin again."""

_started = threading.Lock()


def adapt_to_load(threads: int) -> None:
    """Watch the load for as long as the process lives. Call it once torch is loaded; again, it does nothing.

    `threads` is how many this process uses for a tensor operation.

    Nothing happens where the user chose how threads wait, with another OpenMP, or on another system than Linux.
    """
    if not _started.acquire(blocking=False):
        return
    runtime = loaded_runtime()
    if runtime is None or any(name in os.environ for name in _CHOSEN_BY_USER) or cpu_times() is None:
        return
    watch = threading.Thread(
        target=_watch, args=(SleepingThreads(runtime), threads), name="headrace-load-watch", daemon=True
    )
    watch.start()


def loaded_runtime() -> Path | None:
    """The GNU OpenMP library of torch in this process; None where it uses none or another."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    loaded = {Path(line.split(maxsplit=5)[5]) for line in lines if "/libgomp" in line}
    chosen = {path for path in loaded if {"torch", "torch.libs"} & {*path.parts}} or loaded
    return chosen.pop() if len(chosen) == 1 else None


class SleepingThreads:
    """While it is on, OpenMP threads of this process sleep instead of spinning."""

    def __init__(self, runtime: Path) -> None:
        self._runtime = ctypes.CDLL(str(runtime))
        self._off: threading.Event | None = None

    def switch(self, on: bool) -> None:
        """A team belongs to the thread that made it, and ends with it."""
        if on and self._off is None:
            self._off = off = threading.Event()
            threading.Thread(target=self._hold_team, args=(off,), name="headrace-openmp-team", daemon=True).start()
        elif not on and self._off is not None:
            self._off.set()
            self._off = None

    def _hold_team(self, off: threading.Event) -> None:
        does_nothing = ctypes.cast(ctypes.CDLL(None).free, ctypes.c_void_p)  # of no memory
        threads = max(os.cpu_count() or 1, self._runtime.omp_get_num_procs()) + 1
        self._runtime.GOMP_parallel(does_nothing, None, ctypes.c_uint(threads), ctypes.c_uint(0))
        off.wait()


@dataclass(frozen=True, slots=True)
class CpuTimes:
    """Seconds of processor time since the start: of all processes of the machine, and of this one."""

    at: float
    machine: float
    own: float


def cpu_times() -> CpuTimes | None:
    """The times now; None if the system does not say."""
    try:
        with Path("/proc/stat").open() as file:
            user, nice, system, _, _, irq, softirq, steal, *_ = map(int, file.readline().split()[1:])
    except (OSError, ValueError):
        return None
    ticks = user + nice + system + irq + softirq + steal  # stolen: by other guests of a virtual machine's host
    return CpuTimes(time.monotonic(), ticks / os.sysconf("SC_CLK_TCK"), time.process_time())


class Load:
    """Decides whether the machine is busy: at once that it is, after some looks that it is not."""

    def __init__(self, cores: int, threads: int) -> None:
        self._spare = max(0, cores - threads) + _SPARE
        self._quiet = 0
        self.busy = False

    def look(self, before: CpuTimes, now: CpuTimes) -> bool:
        """Did other processes take more, since the last look, than this one's threads leave?"""
        elapsed_s = now.at - before.at
        others = (now.machine - before.machine - (now.own - before.own)) / elapsed_s
        over = others > self._spare
        self._quiet = 0 if over else self._quiet + 1
        self.busy = over or (self.busy and self._quiet < _QUIET_LOOKS)
        return self.busy


def _watch(waiting: SleepingThreads, threads: int) -> None:
    load, before = Load(os.cpu_count() or 1, threads), cpu_times()
    while before is not None:
        time.sleep(_LOOK_S)
        now = cpu_times()
        if now is None:
            return
        waiting.switch(load.look(before, now))
        before = now
