"""An event loop whose clock jumps to the next thing that happens: hours of waiting pass in milliseconds.

Nothing waits in threads, so a run is the same each time, and one that can never go on is an error instead of a hang.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _JumpingSelector(selectors.DefaultSelector):
    """Instead of waiting for a time-out, says that it has passed."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready and timeout is None:
            raise AssertionError("a hang: nothing is left that could happen")
        if not ready and timeout is not None:
            self.now_s += max(timeout, 0.0)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """`time` is the virtual clock; what would go to a thread is done at once."""

    def __init__(self) -> None:
        self._clock = _JumpingSelector()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now_s

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future


def run_virtual(work: Coroutine[Any, Any, T], within_s: float = 1e5) -> T:
    """`asyncio.run` on the virtual clock. What has not ended `within_s` hangs: that is an AssertionError."""

    async def bounded() -> T:
        bound = asyncio.timeout(within_s)
        try:
            async with bound:
                return await work
        except TimeoutError:
            if bound.expired():
                raise AssertionError(f"a hang: {within_s:g} virtual seconds have passed") from None
            raise

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(bounded())
