"""Ctrl-C, SIGTERM and a closed terminal: the first stops the run in good order, the second ends the process at once.

Process managers send SIGTERM to all processes of a job. So children that are needed until the end ignore both signals.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")
_HANG_UP = tuple(filter(None, [getattr(signal, "SIGHUP", None)]))  # Windows has none
STOP = (signal.SIGINT, signal.SIGTERM, *_HANG_UP)
INTERRUPTED = 130
_THREADS_S = 5.0
_owns_process = False
_received_at: float | None = None


def take_over_signals() -> None:
    """For the command line: a second signal ends the process without waiting."""
    global _owns_process
    with suppress(ValueError):  # not the main thread
        for number in _not_ignored():
            signal.signal(number, _raise)
        _owns_process = True


def _not_ignored() -> list[signal.Signals]:
    """`nohup` has SIGHUP ignored, and means it."""
    return [number for number in STOP if number not in _HANG_UP or signal.getsignal(number) != signal.SIG_IGN]


@contextmanager
def on_interrupt(call: Callable[[], None], in_handler: bool = False) -> Iterator[None]:
    """Call a function at the first Ctrl-C or SIGTERM: in the running loop, or `in_handler` directly.

    `loop.add_signal_handler` is not used: user code that blocks the loop would delay the second signal, too.
    """
    import asyncio  # lazily: `headrace --help` does not need it

    global _received_at
    loop, numbers, _received_at = asyncio.get_running_loop(), _not_ignored(), None
    received = False

    def first(number: int, _: FrameType | None) -> None:
        global _received_at
        nonlocal received
        received, _received_at = True, time.monotonic()
        for one in numbers:
            signal.signal(one, _second())
        call() if in_handler else loop.call_soon_threadsafe(call)

    try:
        before = [signal.signal(number, first) for number in numbers]
    except ValueError:  # not the main thread: the caller handles signals
        yield
        return
    try:
        yield
    finally:
        for number, handler in zip(numbers, () if received else before, strict=False):
            signal.signal(number, handler)


def seconds_since_signal() -> float | None:
    """How long ago the first signal came; None if none has."""
    return None if _received_at is None else time.monotonic() - _received_at


async def interruptible(work: Coroutine[Any, Any, T]) -> T:
    """Await; Ctrl-C or SIGTERM cancels the work, and raises KeyboardInterrupt after its clean-up."""
    import asyncio

    task, received = asyncio.ensure_future(work), False

    def cancel() -> None:
        nonlocal received
        received = True
        task.cancel()

    with on_interrupt(cancel):
        try:
            return await task
        except asyncio.CancelledError:
            if received:
                raise KeyboardInterrupt from None
            raise


def may_have_raised() -> bool:
    """Whether a KeyboardInterrupt may come from a signal, and not from code that raised it.

    Only the main thread handles signals. While `on_interrupt` or an event loop handles them, none raises.
    """
    is_main = threading.current_thread() is threading.main_thread()
    return is_main and signal.getsignal(signal.SIGINT) in (signal.default_int_handler, _raise, _abort)


def ignore_stop_signals() -> None:
    """For a child that its parent ends: ignore both signals."""
    for number in STOP:
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def stop_signals_blocked() -> Iterator[None]:
    """A child that starts inside the block gets no signal before it calls `ignore_stop_signals`."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _raise(number: int, frame: FrameType | None) -> None:
    for one in _not_ignored():
        signal.signal(one, _second())
    raise KeyboardInterrupt


def _second() -> Callable[[int, FrameType | None], Any]:
    return _abort if _owns_process else signal.default_int_handler


def _abort(number: int, frame: FrameType | None) -> None:
    """Files on disk are consistent at every moment, so there is nothing to wait for."""
    with suppress(OSError):
        # by file descriptor: a print may be in progress
        if os.isatty(2):
            os.write(2, b"\x1b[?25h")  # the live view hides the cursor
        os.write(2, b"\naborted\n")
    os._exit(INTERRUPTED)


def give_up(why: str, code: int = 1) -> None:
    """End a process of the command line that can neither continue nor be interrupted; elsewhere, do nothing."""
    if not _owns_process:
        return
    with suppress(OSError):
        os.write(2, f"\nerror: {why}; the process ends here, and its run can be resumed\n".encode(errors="replace"))
    os._exit(code)


def exit_process(code: int) -> None:
    """End the process; after an interrupt, without waiting for threads."""
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
    waiting = threading.Timer(_THREADS_S, _leave_threads, (code,))
    waiting.daemon = True
    waiting.start()
    sys.exit(code)


def _leave_threads(code: int) -> None:
    """Python waits at its end for threads that are no daemons: user code may have left one that never ends."""
    main = threading.main_thread()
    left = [thread.name for thread in threading.enumerate() if thread is not main and not thread.daemon]
    if left:
        message = f"warning: threads of user code still run and are not waited for: {', '.join(left)}\n"
        os.write(2, message.encode(errors="replace"))
        os._exit(code)


def _silence(stream: Any) -> None:
    """The interpreter flushes again at exit, and would report an error."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
