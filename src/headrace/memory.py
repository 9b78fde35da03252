"""Peak memory of this process, phase by phase; and what the garbage collector may pass over."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


@contextmanager
def frozen() -> Iterator[None]:
    """What is there now is no garbage for the time being: walking all of torch costs a third of the controller."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


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
