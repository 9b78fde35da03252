"""Threads for tensor work that end when the work is done.

OpenMP keeps a team of threads for every thread that ever ran a parallel region. With more of them than cores, teams
sleep between two regions instead of waiting awake for the next, and decoding takes half as long again. A thread that
ends takes its team along.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


def run_apart(function: Callable[[], T]) -> T:
    """Run it on a thread of its own, and wait for it."""
    thread = PassingThread("headrace-apart")
    try:
        return thread.submit(function).result()
    finally:
        thread.join()


class PassingThread:
    """Calls one after the other, in the order that they come in, on a thread that is there only while there are any."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._thread: threading.Thread | None = None

    def submit(self, function: Callable[[], T]) -> Future[T]:
        """Have it called."""
        future: Future[T] = Future()
        with self._lock:
            self._calls.append((function, future))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
        return future

    def join(self) -> None:
        """Wait until everything has been called."""
        while (thread := self._thread) is not None:
            thread.join()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._calls:
                    self._thread = None
                    return
                function, future = self._calls.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)
            del function, future  # or what it returned would live on while the thread waits for its next call
