"""Peak memory of this process, phase by phase; what the garbage collector may pass over; what malloc may keep."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
# glibc's M_ARENA_MAX, M_MMAP_THRESHOLD, M_TRIM_THRESHOLD and M_TOP_PAD: one heap, which holds all but the largest
# tensors and is not given back
_KEEP = ((-8, 1), (-3, 2**25), (-1, 2**31 - 1), (-2, 2**26))
_COLLECT_AFTER = 50_000  # objects that may be in cycles


@contextmanager
def frozen() -> Iterator[None]:
    """What is there now is no garbage for the time being: walking all of torch costs a third of the controller.

    Nor is what comes looked through as often as usual: hardly any of it is a cycle, and a step makes tens of thousands.
    """
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(_COLLECT_AFTER, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


def keep_freed_memory() -> None:
    """Let large tensors use the memory of those before them: to get it from the system anew costs a tenth of a step.

    Only glibc is told; where another allocator is at work, nothing happens.
    """
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        for option, value in _KEEP:
            mallopt(option, value)


def reset_peak() -> None:
    """Start a new phase. Where the system cannot forget a peak, later phases report that of the whole run."""
    try:
        _CLEAR.write_text("5")
    except OSError:
        return


def peak_mb() -> float:
    """The most memory that was resident since `reset_peak`, in megabytes."""
    if _STATUS.exists():
        line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) / 1024
    import resource  # not on every system

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 1024
