"""Ctrl-C: the first ends what runs in good order, the second ends the process at once."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")
INTERRUPTED = 130
_owns_process = False


def own_process() -> None:
    """For the command line, whose process is its own: a second Ctrl-C ends it without waiting for anything."""
    global _owns_process
    with suppress(ValueError):  # not the main thread
        signal.signal(signal.SIGINT, _raise)
        _owns_process = True


@contextmanager
def on_interrupt(call: Callable[[], None]) -> Iterator[None]:
    """Have the first Ctrl-C call a function in the running loop.

    Not by `loop.add_signal_handler`: user code that blocks the loop would hold up the second one, too.
    """
    loop = asyncio.get_running_loop()
    came = False

    def first(number: int, _: FrameType | None) -> None:
        nonlocal came
        came = True
        signal.signal(number, _second())
        loop.call_soon_threadsafe(call)

    try:
        before = signal.signal(signal.SIGINT, first)
    except ValueError:  # not the main thread: the caller handles signals
        yield
        return
    try:
        yield
    finally:
        if not came:
            signal.signal(signal.SIGINT, before)


async def interruptible(work: Coroutine[Any, Any, T]) -> T:
    """Await; Ctrl-C cancels it, and is raised as KeyboardInterrupt once it has cleaned up."""
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


def _raise(number: int, frame: FrameType | None) -> None:
    signal.signal(number, _second())
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


def leave(code: int) -> None:
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
