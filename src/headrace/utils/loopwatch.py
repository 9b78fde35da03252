"""Detects user code that blocks the event loop, where not even the deadlines of episodes work.

The watcher is a thread. It reports the blocking line, and interrupts code that blocks for longer than its deadline.
After a stop signal there is little patience: one signal is enough to end a run, whatever user code does.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from headrace.utils.deadline import is_user_task
from headrace.utils.interrupts import INTERRUPTED, give_up, seconds_since_signal
from headrace.utils.usercode import innermost_of_user, interrupt, interruptible_calls, line_of_thread, overdue_threads

_LOOK_S = 2.0
_PATIENCE = 10
"""Times that code is interrupted before it is taken for one that cannot be."""
_STOP_S = 5.0
"""How long code may block the loop after a stop signal, which the loop must first hear of."""
_STOP_PATIENCE = 3


@contextmanager
def watched_loop(
    report: Callable[[str], None], blocked_s: float = 15.0, limit_s: float | None = None
) -> Iterator[None]:
    """Report each line of user code that blocks the running loop for longer than `blocked_s`, once.

    A user task that blocks for longer than `limit_s` is interrupted.
    """
    loop, thread = asyncio.get_running_loop(), threading.get_ident()
    beat, over = time.monotonic(), threading.Event()
    reported: set[tuple[str, int | None]] = set()
    swallowed = 0

    def beats() -> None:
        nonlocal beat
        beat = time.monotonic()
        if not over.is_set():
            loop.call_later(_LOOK_S / 2, beats)

    def look() -> None:
        nonlocal swallowed
        while not over.wait(min(_LOOK_S, blocked_s / 2)):
            late_s, stopping_s = time.monotonic() - beat, seconds_since_signal()
            overdue = overdue_threads()
            if _is_late(late_s, limit_s, stopping_s) and is_user_task(asyncio.current_task(loop)):
                overdue.add(thread)
            # of a run that is to stop all are counted: its episodes may block one after the other
            swallowed = swallowed + 1 if thread in overdue else swallowed * (stopping_s is not None)
            for blocked in overdue:
                interrupt(blocked)
            if swallowed > (_PATIENCE if stopping_s is None else _STOP_PATIENCE):
                why = f"user code{line_of_thread(thread)} has ignored {swallowed} interruptions"
                give_up(*((why,) if stopping_s is None else (f"{why} since the stop signal", INTERRUPTED)))
            frame = sys._current_frames().get(thread) if late_s > blocked_s else None
            line = innermost_of_user(_inside_loop(frame)) if frame is not None else None
            if line is not None and (line.filename, line.lineno) not in reported:
                reported.add((line.filename, line.lineno))
                report(
                    f"{line.filename}:{line.lineno} has blocked the event loop for {late_s:.0f} s: {line.line}; "
                    "await an async client there, or call it with asyncio.to_thread or model.tool"
                )

    beats()
    watcher = threading.Thread(target=look, name="loop watch", daemon=True)
    watcher.start()
    try:
        with interruptible_calls():
            yield
    finally:
        over.set()
        watcher.join()


def _is_late(late_s: float, limit_s: float | None, stopping_s: float | None) -> bool:
    """Whether the loop has been blocked for too long."""
    if stopping_s is not None and stopping_s > _STOP_S:
        return late_s > _LOOK_S
    return limit_s is not None and late_s > limit_s + _LOOK_S


def _inside_loop(frame: FrameType) -> traceback.StackSummary:
    """The frames of the loop's current callback, without those of the code that started the loop."""
    stack = traceback.extract_stack(frame)
    starts = [index for index, entry in enumerate(stack) if entry.name == "_run_once"]
    return traceback.StackSummary.from_list(stack[starts[-1] + 1 :] if starts else [])
