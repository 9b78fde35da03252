"""Calls of user code: each in its own asyncio task, with a deadline that holds whatever the code does.

A call over its deadline is cancelled. It may clean up for `GRACE_S`. Then it is abandoned: it is counted, its line is
reported, and nothing waits for it any more, not even the end of the event loop. `SystemExit`, `KeyboardInterrupt` and a
cancellation by the code itself become an ordinary `EscapeError`, also in tasks that the code started.
"""

from __future__ import annotations

import asyncio
import ctypes
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar
from weakref import WeakSet

from headrace.errors import DeadlineError, EscapeError
from headrace.utils import threads
from headrace.utils.threads import call_sync_or_async
from headrace.utils.usercode import Overdue, escape_of, is_interrupt, is_user_code, line_of_task, note_abandoned

T = TypeVar("T")

_depth: ContextVar[int] = ContextVar("headrace_user_calls", default=0)
"""Nesting depth of user calls around the current task."""
_innermost: ContextVar[Call | None] = ContextVar("headrace_user_call", default=None)
"""The innermost user call."""
_tasks: WeakSet[asyncio.Task[Any]] = WeakSet()


def is_user_task(task: asyncio.Task[Any] | None) -> bool:
    """Whether a task runs user code."""
    return task is not None and task in _tasks


class Call:
    """One call of user code. `what` names it in messages; without `limit_s` it has no deadline."""

    def __init__(self, what: str, limit_s: float | None = None) -> None:
        self._what = what
        self._limit_s = limit_s
        self._outer: Call | None = None
        self._stopping = False
        self._over: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._pauses = 0
        self._left_s = limit_s
        self.late = False
        """Whether it exceeded its deadline."""

    def expire(self) -> None:
        """End it now, as if its deadline had passed."""
        if self._over is not None and not self._over.done():
            self._over.set_result(None)

    def _end(self, _: asyncio.Task[Any]) -> None:
        self.expire()

    def pause(self) -> None:
        """Stop its clock and those of the enclosing calls. Several inner tasks may do so at the same time."""
        if self._outer is not None:
            self._outer.pause()
        self._pauses += 1
        if self._pauses == 1 and self._timer is not None:
            self._left_s = self._timer.when() - asyncio.get_running_loop().time()
            self._timer.cancel()
            self._timer = None

    def resume(self) -> None:
        """Restart the clock with the remaining time."""
        if self._outer is not None:
            self._outer.resume()
        self._pauses -= 1
        if self._pauses == 0:
            self._start_clock()

    def _start_clock(self) -> None:
        if self._left_s is not None and self._over is not None and not self._over.done():
            self._timer = asyncio.get_running_loop().call_later(self._left_s, self.expire)

    async def run(self, work: Callable[[], Awaitable[T]]) -> T:
        """Return or raise what `work` does; raise DeadlineError if it takes too long."""
        loop = asyncio.get_running_loop()
        depth = _depth.get() + 1
        self._outer = _innermost.get()
        inside, around = _depth.set(depth), _innermost.set(self)
        task = contain_tasks_of(loop).new_user_task(loop, self._contained(work))
        _depth.reset(inside)
        _innermost.reset(around)
        self._over = loop.create_future()
        task.add_done_callback(self._end)
        self._start_clock()
        try:
            await self._over
        except asyncio.CancelledError:
            await self._stop(task, depth)
            raise
        finally:
            if self._timer is not None:
                self._timer.cancel()
        if not task.done():
            self.late = True
            await self._stop(task, depth)
            raise DeadlineError(f"{self._what} took longer than {self._limit_s or 0:g} s")
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is None or isinstance(error, Exception) or is_interrupt(error):
            return task.result()
        raise escape_of(error, self._what) from error

    async def _contained(self, work: Callable[[], Awaitable[T]]) -> T:
        try:
            return await work()
        except asyncio.CancelledError as error:
            if self._stopping:
                raise
            raise escape_of(error, self._what) from error
        except Overdue as error:
            self.late = True
            raise DeadlineError(f"{self._what} blocked the event loop for too long") from error
        except (SystemExit, KeyboardInterrupt) as error:  # would end the event loop
            if is_interrupt(error):
                raise
            raise escape_of(error, self._what) from error

    async def _stop(self, task: asyncio.Task[Any], depth: int) -> None:
        self._stopping = True
        await end_task(task, self._what, threads.GRACE_S / depth)  # an inner call is abandoned before the outer one


@contextmanager
def deadline_paused() -> Iterator[None]:
    """Stop the clock of the enclosing call, around work with its own limits and the queue for it.

    Otherwise an answer that is slow to judge on purpose would become a judge failure, which is not trained.
    """
    call = _innermost.get()
    if call is None:
        yield
        return
    call.pause()
    try:
        yield
    finally:
        call.resume()


async def call_user(
    what: str, function: Callable[..., Any], *arguments: Any, limit_s: float | None = None, **named: Any
) -> Any:
    """Call a user's function, plain (in a thread) or async."""
    return await Call(what, limit_s).run(lambda: call_sync_or_async(function, *arguments, **named))


async def end_task(task: asyncio.Task[Any], what: str, grace_s: float | None = None) -> None:
    """Cancel a task and wait for its end; abandon it if it does not end in time."""
    if not task.done():
        task.cancel()
    try:
        await asyncio.wait({task}, timeout=threads.GRACE_S if grace_s is None else grace_s)
    finally:
        if not task.done():
            _abandon(task, what)
        elif not task.cancelled():
            task.exception()  # otherwise asyncio logs it as never retrieved


def _abandon(task: asyncio.Task[Any], what: str) -> None:
    note_abandoned(what, line_of_task(task))
    asyncio._unregister_task(task)  # otherwise the end of the event loop would wait for it
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    # never freed: its destructor would run the code again
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(task))


# ---- tasks that user code starts ------------------------------------------------------------------------------------


class _RunTask(asyncio.Task[Any]):
    """A task of the run itself, which user code cannot cancel."""

    def cancel(self, msg: Any = None) -> bool:
        refuse_from_user_code("cancel a task of the run; cancel only tasks that it has started itself")
        return super().cancel(msg)


def refuse_from_user_code(what: str) -> None:
    """Raise EscapeError if the caller of the caller is a line of user code inside a call: its episode fails."""
    if _depth.get() > 0 and is_user_code(sys._getframe(2).f_code.co_filename):
        raise EscapeError(f"user code must not {what}")


class _Contains:
    """A task factory: tasks that user code starts cannot end the event loop either."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __call__(self, loop: asyncio.AbstractEventLoop, work: Any, **named: Any) -> Any:
        if _depth.get() == 0:
            return _RunTask(work, loop=loop, **named) if self._inner is None else self._inner(loop, work, **named)
        task = self.new_user_task(loop, _without_exit(work), **named)
        task.add_done_callback(lambda _: work.close())  # a task that was cancelled before its start
        return task

    def new_user_task(self, loop: asyncio.AbstractEventLoop, work: Any, **named: Any) -> Any:
        """A task of user code, of a coroutine that lets no exit out."""
        task = asyncio.Task(work, loop=loop, **named) if self._inner is None else self._inner(loop, work, **named)
        _tasks.add(task)
        return task


def contain_tasks_of(loop: asyncio.AbstractEventLoop) -> _Contains:
    """The loop's task factory from now on."""
    factory = loop.get_task_factory()
    if not isinstance(factory, _Contains):
        factory = _Contains(factory)
        loop.set_task_factory(factory)
    return factory


async def _without_exit(work: Coroutine[Any, Any, T]) -> T:
    try:
        return await work
    except (SystemExit, KeyboardInterrupt) as error:
        if is_interrupt(error):
            raise
        raise escape_of(error, "a task of user code") from error


async def end_user_tasks() -> None:
    """End the tasks that user code left running, so that the end of the event loop does not wait for them."""
    loop, current = asyncio.get_running_loop(), asyncio.current_task()
    left = [task for task in asyncio.all_tasks(loop) if task in _tasks and task is not current]
    await asyncio.gather(*(end_task(task, "a task that user code has started") for task in left))
