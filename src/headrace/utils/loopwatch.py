"""Notices user code that blocks the event loop: then nothing goes on, not even the time limits of episodes.

So the watcher, which is a thread, holds them instead: it interrupts what blocks for longer than it may.
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
from headrace.utils.usercode import innermost_of_user, interrupt, interruptible_calls, overdue_threads

_LOOK_S = 2.0


@contextmanager
def watched_loop(tell: Callable[[str], None], blocked_s: float = 15.0, limit_s: float | None = None) -> Iterator[None]:
    """Tell, once per place, where the running loop has been held up for long in code that is not ours.

    Over `limit_s`, a task of user code is interrupted.
    """
    loop, thread = asyncio.get_running_loop(), threading.get_ident()
    beat, over = time.monotonic(), threading.Event()
    told: set[tuple[str, int | None]] = set()

    def beats() -> None:
        nonlocal beat
        beat = time.monotonic()
        if not over.is_set():
            loop.call_later(_LOOK_S / 2, beats)

    def look() -> None:
        while not over.wait(min(_LOOK_S, blocked_s / 2)):
            late_s = time.monotonic() - beat
            overdue = overdue_threads()
            if limit_s is not None and late_s > limit_s + _LOOK_S and is_user_task(asyncio.current_task(loop)):
                overdue.add(thread)
            for held_up in overdue:
                interrupt(held_up)
            frame = sys._current_frames().get(thread) if late_s > blocked_s else None
            place = innermost_of_user(_inside_loop(frame)) if frame is not None else None
            if place is not None and (place.filename, place.lineno) not in told:
                told.add((place.filename, place.lineno))
                tell(
                    f"nothing has gone on for {late_s:.0f} s, as {place.filename}:{place.lineno} blocks: {place.line}; "
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


def _inside_loop(frame: FrameType) -> traceback.StackSummary:
    """What the loop was called to do: the frames below are of whoever started it."""
    stack = traceback.extract_stack(frame)
    starts = [index for index, entry in enumerate(stack) if entry.name == "_run_once"]
    return traceback.StackSummary.from_list(stack[starts[-1] + 1 :] if starts else [])
