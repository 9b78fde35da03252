"""Users' synchronous functions run in threads of their own, so that none blocks the event loop, or the exit."""

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

_MOST = 256  # a thread that waits for a slow tool costs little; too few would make episodes wait for each other
GRACE_S = 10.0
"""How long a call that was cancelled may take to clean up, before nobody waits for it any more."""

T = TypeVar("T")
_Job = tuple[Future[Any], Callable[[], Any]]


class DaemonThreads(ThreadPoolExecutor):
    """Threads that neither a loop's end nor the interpreter's waits for: a user's function may never return.

    Of the library's executor only the type is used, which event loops ask for.
    """

    def __init__(self, most: int = _MOST) -> None:
        super().__init__(1)
        self._most = most
        self.forget()

    def forget(self) -> None:
        """Begin with no threads: a forked process has none of its parent's."""
        self._guard = threading.Lock()
        self._waiting: deque[_Job] = deque()
        self._free: list[SimpleQueue[_Job]] = []
        self._busy = 0

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call a function in a free thread, or a new one; beyond so many at once it waits."""
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
        """A thread will not come back: another may run in its place."""
        with self._guard:
            self._most += 1
            if self._waiting:
                self._busy += 1
                self._begin(self._waiting.popleft())

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Nothing to wait for: whoever wanted a result has waited for it."""

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
os.register_at_fork(after_in_child=_threads.forget)


class _ThreadCall:
    """A function in a thread: what it came to, and where it is."""

    def __init__(self, what: str, call: Callable[[], Any]) -> None:
        self._what = what
        self._call = call
        self._thread: int | None = None
        self.result: Any = None
        self.error: BaseException | None = None

    def __call__(self) -> None:
        # by value: a future would turn StopIteration into a hang, and CancelledError into a cancellation of ours
        self._thread = threading.get_ident()
        try:
            self.result = self._call()
        except BaseException as error:
            self.error = error
        self._thread = None

    def abandon(self) -> None:
        """Count it, if it still runs."""
        thread = self._thread
        if thread is not None:
            note_abandoned(self._what, line_of_thread(thread))
            _threads.replace_one()


async def run_in_thread(function: Callable[..., T], *arguments: Any, **named: Any) -> T:
    """What a function of ours returns that takes long, as loading does. Once cancelled, nobody waits for its end."""
    call = functools.partial(contextvars.copy_context().run, function, *arguments, **named)
    return await asyncio.get_running_loop().run_in_executor(_threads, call)


async def call_sync_or_async(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """What a function returns: a coroutine function is awaited, any other runs in a thread."""
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
        del error  # its traceback holds this frame
    return await call.result if inspect.isawaitable(call.result) else call.result
