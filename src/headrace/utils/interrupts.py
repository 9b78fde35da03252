"""Ctrl-C and SIGTERM: the first ends what runs in good order, the second ends the process at once.

Process managers send SIGTERM to every process of a job at once, so children that are needed until the end do not
listen to either.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")
STOP = (signal.SIGINT, signal.SIGTERM)
INTERRUPTED = 130
_owns_process = False


def take_over_signals() -> None:
    """For the command line, whose process is its own: a second signal ends it without waiting for anything."""
    global _owns_process
    with suppress(ValueError):  # not the main thread
        for number in STOP:
            signal.signal(number, _raise)
        _owns_process = True


@contextmanager
def on_interrupt(call: Callable[[], None], at_once: bool = False) -> Iterator[None]:
    """Have the first Ctrl-C or SIGTERM call a function in the running loop, or `at_once` in the signal handler.

    Not by `loop.add_signal_handler`: user code that blocks the loop would hold up the second one, too.
    """
    import asyncio  # not before: `headrace --help` does without

    loop = asyncio.get_running_loop()
    came = False

    def first(number: int, _: FrameType | None) -> None:
        nonlocal came
        came = True
        for one in STOP:
            signal.signal(one, _second())
        call() if at_once else loop.call_soon_threadsafe(call)

    try:
        before = [signal.signal(number, first) for number in STOP]
    except ValueError:  # not the main thread: the caller handles signals
        yield
        return
    try:
        yield
    finally:
        for number, handler in zip(STOP, () if came else before, strict=False):
            signal.signal(number, handler)


async def interruptible(work: Coroutine[Any, Any, T]) -> T:
    """Await; Ctrl-C or SIGTERM cancels it, and is raised as KeyboardInterrupt once it has cleaned up."""
    import asyncio

    task, came = asyncio.ensure_future(work), False

    def cancel() -> None:
        nonlocal came
        came = True
        task.cancel()

    with on_interrupt(cancel):
        try:
            return await task
        except asyncio.CancelledError:
            if came:
                raise KeyboardInterrupt from None
            raise


def may_have_raised() -> bool:
    """Whether a KeyboardInterrupt that was met here may be of a signal, and not of code that raised it by itself.

    Signals are handled by the main thread; while `on_interrupt` or an event loop waits for one, none raises.
    """
    is_main = threading.current_thread() is threading.main_thread()
    return is_main and signal.getsignal(signal.SIGINT) in (signal.default_int_handler, _raise, _abort)


def ignore_stop_signals() -> None:
    """In a child that its parent ends: listen to neither."""
    for number in STOP:
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def stop_signals_blocked() -> Iterator[None]:
    """A child that is started meanwhile gets neither before it has called `ignore_stop_signals`."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _raise(number: int, frame: FrameType | None) -> None:
    for one in STOP:
        signal.signal(one, _second())
    raise KeyboardInterrupt


def _second() -> Callable[[int, FrameType | None], Any]:
    return _abort if _owns_process else signal.default_int_handler


def _abort(number: int, frame: FrameType | None) -> None:
    """What is on disk is whole at every moment, so there is nothing to wait for."""
    with suppress(Exception):
        # by file number: this may have come in the midst of a print
        if os.isatty(2):
            os.write(2, b"\x1b[?25h")  # the live view hides the cursor
        os.write(2, b"\naborted\n")
    os._exit(INTERRUPTED)


def exit_process(code: int) -> None:
    """End the process. After an interrupt without waiting for threads, which may be in the midst of anything."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except BrokenPipeError:
            _silence(stream)
        except OSError as error:
            _silence(stream)
            if stream is sys.stdout:
                print(f"error: cannot write the output: {error.strerror}", file=sys.stderr)
                code = code or 2
    if code == INTERRUPTED:
        os._exit(code)
    sys.exit(code)


def _silence(stream: Any) -> None:
    """The interpreter flushes once more at its end, and would complain."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
