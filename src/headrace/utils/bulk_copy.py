"""Work on large memory by two threads: one alone neither reads nor copies as fast as memory allows."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

THREADS = 2
_WORTH_THREADS = 2**24  # bytes
T = TypeVar("T")
R = TypeVar("R")


def bulk_map(function: Callable[[T], R], parts: Iterable[T], nbytes: int) -> list[R]:
    """What the function makes of each part, of `nbytes` in all; it must let go of the interpreter's lock."""
    if nbytes < _WORTH_THREADS:
        return list(map(function, parts))
    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(function, parts))
