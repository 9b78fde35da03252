"""Results on their way from an engine's thread to callers on an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

T = TypeVar("T")


class Deliveries:
    """Results that are set while they are `held` back are delivered together: a group often ends with the same
    token, and a loop that is woken for the first takes the interpreter away from the thread that sets the others."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holding = False
        self._ready: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[Any], Future[Any]]]] = {}

    async def wait(self, result: Future[T]) -> T:
        """The result, once a thread has set it. The future is not cancelled with the caller."""
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[T] = loop.create_future()
        result.add_done_callback(lambda done: self._settled(loop, waiter, done))
        return await waiter

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep what is set meanwhile until the end."""
        with self._lock:
            self._holding = True
        try:
            yield
        finally:
            with self._lock:
                self._holding, waiting = False, list(self._ready)
            for loop in waiting:
                self._wake(loop)

    def _settled(self, loop: asyncio.AbstractEventLoop, waiter: asyncio.Future[Any], done: Future[Any]) -> None:
        with self._lock:
            ready = self._ready.setdefault(loop, [])
            ready.append((waiter, done))
            wake = len(ready) == 1 and not self._holding
        if wake:
            self._wake(loop)

    def _wake(self, loop: asyncio.AbstractEventLoop) -> None:
        with suppress(RuntimeError):  # a closed loop has no one waiting
            loop.call_soon_threadsafe(self._deliver, loop)

    def _deliver(self, loop: asyncio.AbstractEventLoop) -> None:
        with self._lock:
            ready = self._ready.pop(loop, [])
        for waiter, done in ready:
            if waiter.done():  # its caller has gone
                continue
            if done.cancelled():
                waiter.cancel()
            elif (error := done.exception()) is not None:
                waiter.set_exception(error)
            else:
                waiter.set_result(done.result())
