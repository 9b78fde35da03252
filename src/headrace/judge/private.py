"""Keeps other processes of the same user out of this one."""

from __future__ import annotations

import contextlib
import ctypes

_SET_DUMPABLE = 4


def make_private() -> None:
    """No other process of this user may read this one's environment, or read or write its memory (Linux).

    Debuggers of the same user cannot attach either, and there are no core dumps.
    """
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_SET_DUMPABLE, 0, 0, 0, 0)
