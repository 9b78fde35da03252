"""Threads for users' synchronous functions, so that none blocks the event loop or the exit."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any, TypeVar

from headrace.utils.usercode import escape_of, line_of_thread, note_abandoned

_MOST = 256  # a thread that waits for a slow tool is cheap; with too few, episodes would wait for each other
GRACE_S = 10.0
"""How long a cancelled call may clean up before it is abandoned."""

T = TypeVar("T")
_Job = tuple[Future[Any], Callable[[], Any]]


class DaemonThreads(ThreadPoolExecutor):
    """Daemon threads: neither the loop nor the interpreter waits for them at exit. A user's function may never return.

    Derived from ThreadPoolExecutor only because event loops require that type.
    """

    def __init__(self, most: int = _MOST) -> None:
        super().__init__(1)
        self._most = most
        self.reset()

    def reset(self) -> None:
        """Start without threads: a forked process has none of its parent's."""
        self._guard = threading.Lock()
        self._waiting: deque[_Job] = deque()
        self._free: list[SimpleQueue[_Job]] = []
        self._busy = 0

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call a function in a free or new thread; if all are busy, it waits."""
        future: Future[Any] = Future()
        job = (future, functools.partial(fn, *args, **kwargs))
        with self._guard:
            if self._busy >= self._most:
                self._waiting.append(job)
            else:
                self._busy += 1
                self._begin(job)
        return future

    def replace_one(self) -> None:
        """A thread is blocked for good: allow another one."""
        with self._guard:
            self._most += 1
            if self._waiting:
                self._busy += 1
                self._begin(self._waiting.popleft())

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Nothing to wait for: callers wait for their own results."""

    def _begin(self, job: _Job) -> None:
        if self._free:
            self._free.pop().put(job)
            return
        inbox: SimpleQueue[_Job] = SimpleQueue()
        inbox.put(job)
        threading.Thread(target=self._work, args=(inbox,), name="headrace-user", daemon=True).start()

    def _work(self, inbox: SimpleQueue[_Job]) -> None:
        while True:
            self._do(*inbox.get())
            with self._guard:
                if self._waiting:
                    inbox.put(self._waiting.popleft())
                else:
                    self._busy -= 1
                    self._free.append(inbox)

    @staticmethod
    def _do(future: Future[Any], call: Callable[[], Any]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            result = call()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)


_threads = DaemonThreads()
os.register_at_fork(after_in_child=_threads.reset)


class _ThreadCall:
    """A function in a thread: its result, and the thread it runs in."""

    def __init__(self, what: str, call: Callable[[], Any]) -> None:
        self._what = what
        self._call = call
        self._thread: int | None = None
        self.result: Any = None
        self.error: BaseException | None = None

    def __call__(self) -> None:
        # stored as values: a future would hang on StopIteration, and CancelledError would cancel the caller
        self._thread = threading.get_ident()
        try:
            self.result = self._call()
        except BaseException as error:
            self.error = error
        self._thread = None

    def abandon(self) -> None:
        """Report it as abandoned, if it still runs."""
        thread = self._thread
        if thread is not None:
            note_abandoned(self._what, line_of_thread(thread))
            _threads.replace_one()


async def run_in_thread(function: Callable[..., T], *arguments: Any, **named: Any) -> T:
    """Run a slow function of our own, such as loading, in a thread. A cancelled caller does not wait for its end."""
    call = functools.partial(contextvars.copy_context().run, function, *arguments, **named)
    return await asyncio.get_running_loop().run_in_executor(_threads, call)


async def call_sync_or_async(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Call a function: await a coroutine function, run any other in a thread."""
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
        return await function(*arguments, **named)
    what = f'"{getattr(function, "__qualname__", type(function).__qualname__)}"'
    context = contextvars.copy_context()
    call = _ThreadCall(what, functools.partial(context.run, function, *arguments, **named))
    loop = asyncio.get_running_loop()
    try:
        await loop.run_in_executor(_threads, call)
    except asyncio.CancelledError:
        loop.call_later(GRACE_S, call.abandon)
        raise
    error, call.error = call.error, None
    try:
        if isinstance(error, Exception) and not isinstance(error, StopIteration):
            raise error
        if error is not None:  # StopIteration too: a coroutine cannot raise it
            raise escape_of(error, what) from error
    finally:
        del error  # its traceback references this frame
    return await call.result if inspect.isawaitable(call.result) else call.result
