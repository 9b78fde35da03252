"""Memory of this process: peak per phase, fewer garbage collections, and reuse of freed memory."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_ONE_HEAP = ((-8, 1),)  # glibc's M_ARENA_MAX
# M_MMAP_THRESHOLD, M_TRIM_THRESHOLD and M_TOP_PAD: all but the largest tensors are in the heap, which is never
# returned to the system
_KEEP = (*_ONE_HEAP, (-3, 2**25), (-1, 2**31 - 1), (-2, 2**26))
_COLLECT_AFTER = 50_000  # new container objects


@contextmanager
def frozen() -> Iterator[None]:
    """Exclude all existing objects from garbage collection: scanning torch costs a third of the controller's time.

    Also collect less often: a step makes tens of thousands of objects, hardly any of them in cycles.
    """
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(_COLLECT_AFTER, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


def share_one_heap() -> None:
    """Give threads that are started from now on no heaps of their own, each of which would keep its own peak."""
    _set(_ONE_HEAP)


def keep_freed_memory() -> None:
    """Reuse the memory of freed tensors: getting it from the system again costs a tenth of a step."""
    _set(_KEEP)


def _set(options: Iterable[tuple[int, int]]) -> None:
    """Works with glibc only; no effect with other allocators."""
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        for option, value in options:
            mallopt(option, value)


def reset_peak() -> None:
    """Start a new phase. If the system cannot reset the peak, later phases report the peak of the process."""
    try:
        _CLEAR.write_text("5")
    except OSError:
        return


def peak_mb() -> float:
    """Peak resident memory since `reset_peak`, in megabytes."""
    if _STATUS.exists():
        line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) / 1024
    import resource  # not on every system

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 1024
