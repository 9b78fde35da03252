"""How OpenMP threads share a machine with other programs.

OpenMP threads wait for each other after every tensor operation. GNU's OpenMP, which torch ships, spins for milliseconds
before it sleeps. On a quiet machine that is right: most waits are shorter than falling asleep and waking up, and with
shorter spinning a step takes twice as long at worst. On a busy machine the spinning threads take the cores from the
thread that they wait for, and a step takes ten times as long.

So a thread watches what other processes take of the machine. While that and this process's tensor threads are more than
there are cores, it makes OpenMP sleep at once. OpenMP has no call for it, but a rule: while a process has more OpenMP
threads than there are cores, none of them spins. A team of idle threads makes it so, and its end undoes it.

While others leave this process less than a core, the threads that work on a tensor operation are bound to one core.
Between operations only one of them works. On a core of their own, that one meets fewer other programs, since the
system spreads all threads evenly; and no thread waits for one that is not running on another core. Threads that begin
processes are not bound: what they begin would be bound too.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_CHOSEN_BY_USER = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
_LOOK_S = 0.2
_SPARE = 0.4
"""Cores by which the machine may be overcommitted: the measurement is coarse, and there is always some other work."""
_LESS_THAN_A_CORE = 0.8
"""What others leave of the machine while threads are bound to one core."""
_QUIET_LOOKS = 3
"""Looks in a row at a quiet machine before threads spin, or spread over the cores, again."""

_started = threading.Lock()
_team: Team | None = None


def adapt_to_load(threads: int) -> None:
    """Watch the load for as long as the process lives. Call it once torch is loaded; again, it does nothing.

    `threads` is how many this process uses for a tensor operation.

    Nothing happens where the user chose how threads wait, with another OpenMP, or on another system than Linux.
    """
    global _team
    if not _started.acquire(blocking=False):
        return
    runtime = loaded_runtime()
    if runtime is None or any(name in os.environ for name in _CHOSEN_BY_USER) or cpu_times() is None:
        return
    _team = Team(runtime, threads)
    watched = (SleepingThreads(runtime), _team, threads)
    threading.Thread(target=_watch, args=watched, name="headrace-load-watch", daemon=True).start()


def follow_load() -> None:
    """Bind the calling thread and its OpenMP threads to one core while the machine is crowded. Call it often."""
    if _team is not None:
        _team.follow()


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


class Team:
    """A thread and the OpenMP threads that work for it: on one core while `crowded`, else where they were before."""

    def __init__(self, runtime: Path, threads: int) -> None:
        self._runtime = ctypes.CDLL(str(runtime))
        self._threads = threads
        self._before = threading.local()
        self.crowded = False

    def follow(self) -> None:
        """Of the calling thread."""
        before: set[int] | None = getattr(self._before, "cores", None)
        if self.crowded == (before is not None):
            return
        if before is not None:
            self._before.cores = None
            self._move(before)
        elif self._threads > 1 and len(cores := os.sched_getaffinity(0)) > 1:
            self._before.cores = cores
            self._move({ctypes.CDLL(None).sched_getcpu()})

    def _move(self, cores: set[int]) -> None:
        @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
        def move_one(_: int | None) -> None:
            with suppress(OSError):  # the cores that a process may use can shrink while it runs
                os.sched_setaffinity(0, cores)  # of the thread that calls it

        self._runtime.GOMP_parallel(move_one, None, ctypes.c_uint(self._threads), ctypes.c_uint(0))


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


def others_took(before: CpuTimes, now: CpuTimes) -> float:
    """Cores that other processes used between two looks, on average."""
    return (now.machine - before.machine - (now.own - before.own)) / (now.at - before.at)


class Above:
    """Whether other processes take more cores than a limit: at once that they do, after some looks that they do not."""

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._below = 0
        self._above = False

    def look(self, others: float) -> bool:
        """With what others took since the last look."""
        over = others > self._limit
        self._below = 0 if over else self._below + 1
        self._above = over or (self._above and self._below < _QUIET_LOOKS)
        return self._above


def busy(cores: int, threads: int) -> Above:
    """Others take what this process's threads need."""
    return Above(max(0, cores - threads) + _SPARE)


def crowded(cores: int) -> Above:
    """Others leave this process less than a core."""
    return Above(cores - _LESS_THAN_A_CORE)


def _watch(waiting: SleepingThreads, team: Team, threads: int) -> None:
    cores, before = os.cpu_count() or 1, cpu_times()
    is_busy, is_crowded = busy(cores, threads), crowded(cores)
    while before is not None:
        time.sleep(_LOOK_S)
        now = cpu_times()
        if now is None:
            return
        others = others_took(before, now)
        waiting.switch(is_busy.look(others))
        team.crowded = is_crowded.look(others)
        before = now
