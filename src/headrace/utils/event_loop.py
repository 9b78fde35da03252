"""Run an event loop from synchronous code: a script, the command line, or a notebook, which has a running loop."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import nullcontext
from typing import Any, TypeVar

from headrace.utils.deadline import contain_tasks_of, end_user_tasks, refuse_from_user_code
from headrace.utils.interrupts import on_interrupt
from headrace.utils.threads import GRACE_S, DaemonThreads
from headrace.utils.usercode import where_it_failed

T = TypeVar("T")
log = logging.getLogger("headrace")


def run_loop(work: Callable[[], Coroutine[Any, Any, T]], stop: Callable[[], None] | None = None) -> T:
    """`asyncio.run` that also works inside a running loop, and does not wait for what user code left running.

    Inside a running loop, the first Ctrl-C calls `stop` in the new loop. Without `stop` it cancels the work.
    """
    return _LoopInThread(work, stop).run() if _is_in_loop() else _run(work())


def _is_in_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _run(work: Coroutine[Any, Any, T]) -> T:
    async def main() -> T:
        asyncio.get_running_loop().set_default_executor(DaemonThreads())
        try:
            return await work
        finally:
            await end_user_tasks()

    with asyncio.Runner(loop_factory=_Loop) as runner:
        return runner.run(main())


class _Loop(asyncio.SelectorEventLoop):
    """An event loop that user code cannot end. User tasks are contained where they are created."""

    def __init__(self) -> None:
        super().__init__()
        contain_tasks_of(self)  # from the first task on: user code must not cancel that one either

    def stop(self) -> None:
        refuse_from_user_code("stop the event loop of the run")
        super().stop()

    def _run_once(self) -> None:
        try:
            super()._run_once()  # type: ignore[misc]
        except SystemExit as error:  # from `call_soon`, which belongs to no episode
            log.warning("a callback of the event loop ended: %s", where_it_failed(error))


class _LoopInThread:
    """Runs the work in a loop in another thread while the caller waits: its own loop cannot be entered again."""

    def __init__(self, work: Callable[[], Coroutine[Any, Any, T]], stop: Callable[[], None] | None) -> None:
        self._work = work
        self._stop = stop
        self._result: Future[Any] = Future()
        self._running: tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]] | None = None

    def run(self) -> Any:
        """Return what the work returns. The first Ctrl-C stops it in good order, the second cancels it."""
        thread = threading.Thread(target=self._target, name="headrace-fit", daemon=True)
        with on_interrupt(self._stop_soon, in_handler=True) if self._stop else nullcontext():
            thread.start()
            try:
                while thread.is_alive():
                    thread.join(0.2)
            except KeyboardInterrupt:
                if self._running is not None and not self._result.done():
                    loop, task = self._running
                    loop.call_soon_threadsafe(task.cancel)
                    thread.join(GRACE_S)
                raise
        return self._result.result()

    def _target(self) -> None:
        try:
            self._result.set_result(_run(self._main()))
        except BaseException as error:
            self._result.set_exception(error)

    async def _main(self) -> Any:
        task = asyncio.current_task()
        assert task is not None
        self._running = asyncio.get_running_loop(), task
        return await self._work()

    def _stop_soon(self) -> None:
        if self._stop and self._running is not None and not self._result.done():
            self._running[0].call_soon_threadsafe(self._stop)
