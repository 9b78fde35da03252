"""Threads for tensor work.

OpenMP keeps a team of threads for every thread that ever ran a parallel region. With more of them than cores, teams
sleep between two regions instead of waiting awake for the next, and decoding takes half as long again. A thread that
ends takes its team along. So either a thread ends when its work is done, or it stays and does all of the process's
tensor work, which saves making it, and keeps its team where its data are.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import torch

from headrace.utils.openmp import adapt_to_load, follow_load

T = TypeVar("T")


def run_apart(function: Callable[[], T]) -> T:
    """Run it on a thread of its own, and wait for it."""
    thread = TensorThread("headrace-apart")
    try:
        return thread.submit(function).result()
    finally:
        thread.join()


class TensorThread:
    """Calls one after the other, in the order that they come in.

    On a thread that is there only while there are any; one that `stays` is there until it is joined.
    """

    def __init__(self, name: str, stays: bool = False) -> None:
        self._name = name
        self._stays = stays
        self._changed = threading.Condition()
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._thread: threading.Thread | None = None

    @property
    def wanted(self) -> bool:
        """Whether calls are waiting for the one that is under way."""
        return bool(self._calls)

    def submit(self, function: Callable[[], T]) -> Future[T]:
        """Have it called."""
        future: Future[T] = Future()
        with self._changed:
            self._calls.append((function, future))
            self._changed.notify()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
        return future

    def join(self) -> None:
        """Wait until everything has been called."""
        with self._changed:
            self._stays = False
            self._changed.notify()
        while (thread := self._thread) is not None:
            thread.join()

    def _run(self) -> None:
        # makes the number of threads that was set hold here too: a thread whose first operation is a matrix product
        # would have OpenMP's own, by the environment
        adapt_to_load(torch.get_num_threads())
        while True:
            with self._changed:
                while not self._calls and self._stays:
                    self._changed.wait()
                if not self._calls:
                    self._thread = None
                    return
                function, future = self._calls.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            follow_load()
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)
            del function, future  # or what it returned would live on while the thread waits for its next call
