"""A server in a thread of this process, for tests and for code that serves beside its own work."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any

Started = Callable[[Callable[[], None]], None]


@contextmanager
def server_in_thread(name: str, serve: Callable[[Started], Coroutine[Any, Any, None]]) -> Iterator[None]:
    """Run `serve(started)` in a loop of its own. It calls `started(stop)` once it listens; `stop` is called, in that
    loop, at the end of the block."""
    listening: Future[Callable[[], None]] = Future()

    def started(stop: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        listening.set_result(lambda: loop.call_soon_threadsafe(stop) and None)

    def body() -> None:
        try:
            asyncio.run(serve(started))
        except BaseException as error:  # handed to the one who waits
            if listening.done():
                raise
            listening.set_exception(error)

    thread = threading.Thread(target=body, name=name, daemon=True)
    thread.start()
    stop = listening.result()
    try:
        yield
    finally:
        with suppress(RuntimeError):  # its loop has ended already
            stop()
        thread.join()
