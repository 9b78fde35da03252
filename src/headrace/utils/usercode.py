"""User code: finding its lines in tracebacks, containing what it raises, and counting abandoned calls.

Synchronous user code is called inside `contained`, asynchronous user code through `headrace.utils.deadline`.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.errors import DeadlineError, EscapeError
from headrace.utils.interrupts import may_have_raised

if TYPE_CHECKING:
    import asyncio

log = logging.getLogger("headrace")

_TEXT_S = 5.0
_PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"
_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))


# ---- lines ----------------------------------------------------------------------------------------------------------


def is_library(filename: str) -> bool:
    """Whether a file belongs to neither Headrace nor the user."""
    if filename.startswith(_PACKAGE):
        return False
    return filename.startswith(_LIBRARIES) or bool({"site-packages", "dist-packages"} & {*Path(filename).parts})


def is_user_code(filename: str) -> bool:
    """Whether a file is neither Headrace's nor a library's."""
    return not filename.startswith((_PACKAGE, "<")) and not is_library(filename)


def innermost_of_user(frames: Iterable[traceback.FrameSummary]) -> traceback.FrameSummary | None:
    """The innermost line of user code; None if there is none."""
    own = [f for f in frames if not f.filename.startswith((_PACKAGE, *_LIBRARIES)) and not f.filename.startswith("<")]
    return own[-1] if own else None


def text_of(error: BaseException) -> str:
    """The message of an error, whose own `__str__` may fail, or not return."""
    section = _Section(threading.get_ident(), time.monotonic() + _TEXT_S)
    _sections.append(section)
    try:
        return str(error)
    except BaseException as raised:
        if is_interrupt(raised):
            raise
        return f"(its message cannot be shown: __str__ raised {type(raised).__name__})"
    finally:
        _sections.remove(section)


def reason_of(error: BaseException) -> str:
    """The message of an error, with its type if the message does not say it."""
    return str(error) if isinstance(error, EscapeError) else f"{type(error).__name__}: {text_of(error)}"


def where_it_failed(error: BaseException) -> str:
    """The error and the innermost line of user code."""
    raised = error.__cause__ or error if isinstance(error, EscapeError) else error
    frames = [f for f in traceback.extract_tb(raised.__traceback__) if not f.filename.startswith(_PACKAGE)]
    return f"{reason_of(error)}{_at(innermost_of_user(frames) or (frames[-1] if frames else None))}"


def _at(frame: traceback.FrameSummary | None) -> str:
    return f" at {frame.filename}:{frame.lineno}: {frame.line}" if frame else ""


def line_of_task(task: asyncio.Task[object]) -> str:
    """` at file:line: code` where a task waits; empty if none of its lines is user code."""
    frames, waits = [], task.get_coro()
    while waits is not None:  # Task.get_stack has only the outermost frame of a task that waits
        frame = getattr(waits, "cr_frame", None) or getattr(waits, "gi_frame", None)
        if frame is not None:
            frames.append((frame, frame.f_lineno))
        waits = getattr(waits, "cr_await", None) or getattr(waits, "gi_yieldfrom", None)
    return _at(innermost_of_user(traceback.StackSummary.extract(iter(frames))))


def line_of_thread(ident: int) -> str:
    """The same for a thread."""
    frame = sys._current_frames().get(ident)
    return _at(innermost_of_user(traceback.extract_stack(frame))) if frame is not None else ""


# ---- abandoned calls ------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Abandoned:
    """Calls of user code that ignored their cancellation: nothing waits for them any more."""

    count: int = 0
    report: Callable[[str], None] = field(default=lambda text: None)
    _reported: set[str] = field(default_factory=set)

    def add(self, what: str, line: str) -> None:
        """Count a call; each line is reported once."""
        self.count += 1
        text = f"{what} did not stop when it was cancelled and was abandoned{line}"
        log.info("%s", text)
        if line not in self._reported:
            self._reported.add(line)
            self.report(f"{text}; what it returns is discarded (user_code/abandoned counts such calls)")


abandoned = Abandoned()


@contextmanager
def reporting_abandoned(report: Callable[[str], None]) -> Iterator[Abandoned]:
    """Count from zero and report to `report` during a run."""
    global abandoned
    before, abandoned = abandoned, Abandoned(report=report)
    try:
        yield abandoned
    finally:
        abandoned = before


def note_abandoned(what: str, line: str) -> None:
    """Count an abandoned call."""
    abandoned.add(what, line)


# ---- synchronous calls ----------------------------------------------------------------------------------------------


def is_interrupt(error: BaseException) -> bool:
    """Whether it is a real Ctrl-C, which must end more than the current call."""
    return isinstance(error, KeyboardInterrupt) and may_have_raised()


def escape_of(error: BaseException, what: str) -> EscapeError:
    """An ordinary exception to replace one that would end more than the call that raised it."""
    import asyncio  # lazily: `headrace --help` does not need it

    match error:
        case SystemExit():
            did = f"called sys.exit({'' if error.code is None else repr(error.code)})"
        case asyncio.CancelledError():
            did = "raised CancelledError, and the run had not cancelled it"
        case _:
            text = text_of(error)
            did = f"raised {type(error).__name__}{f': {text}' if text else ''}"
    return EscapeError(f"{what} {did}")


class Overdue(BaseException):
    """Raised inside synchronous code that is over its deadline; no `except Exception` catches it."""


@dataclass(frozen=True, slots=True, eq=False)
class _Section:
    thread: int
    ends: float


_sections: list[_Section] = []


@contextmanager
def contained(what: str, limit_s: float | None = None) -> Iterator[None]:
    """Around synchronous user code in the current thread. Ordinary exceptions pass; all others become EscapeError.

    Code that exceeds `limit_s` is interrupted, if the watcher of the event loop runs (`headrace.utils.loopwatch`).
    """
    section = None
    try:
        if limit_s is not None:
            section = _Section(threading.get_ident(), time.monotonic() + limit_s)
            _sections.append(section)
        try:
            yield
        finally:
            if section is not None:
                _sections.remove(section)
    except StopIteration as error:  # a coroutine cannot raise it
        raise escape_of(error, what) from None  # contextlib would take an error with this cause for the StopIteration
    except Exception:
        raise
    except Overdue as error:
        raise DeadlineError(f"{what} took longer than {limit_s or 0:g} s") from error
    except BaseException as error:
        if is_interrupt(error):
            raise
        raise escape_of(error, what) from error


def overdue_threads() -> set[int]:
    """Threads with synchronous user code over its deadline."""
    now = time.monotonic()
    return {section.thread for section in list(_sections) if now > section.ends}


@contextmanager
def interruptible_calls() -> Iterator[None]:
    """On the main thread, let `interrupt` also end a blocking system call, such as reading a socket."""
    try:
        before = signal.signal(_SIGNAL, _raise_overdue)
    except ValueError:  # not the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(_SIGNAL, before)


def interrupt(thread: int) -> None:
    """Raise Overdue in a thread, at its next Python instruction."""
    global _requested
    if thread == threading.main_thread().ident and signal.getsignal(_SIGNAL) is _raise_overdue:
        _requested = True
        signal.pthread_kill(thread, _SIGNAL)
    else:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(Overdue))


_SIGNAL = signal.SIGURG  # ignored by default
_requested = False


def _raise_overdue(number: int, frame: object) -> None:
    global _requested
    requested, _requested = _requested, False
    if requested:
        raise Overdue
