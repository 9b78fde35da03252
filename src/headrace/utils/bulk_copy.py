"""Work on large buffers with two threads: one thread does not saturate the memory bandwidth."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

THREADS = 2
_WORTH_THREADS = 2**24  # bytes
T = TypeVar("T")
R = TypeVar("R")


def bulk_map(function: Callable[[T], R], parts: Iterable[T], nbytes: int) -> list[R]:
    """Map a function over parts of `nbytes` in total. The function must release the GIL."""
    if nbytes < _WORTH_THREADS:
        return list(map(function, parts))
    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(function, parts))
