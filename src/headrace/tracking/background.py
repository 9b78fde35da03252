"""InBackground: a tracker that may wait for a network does so in a thread of its own, so that training never does."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.errors import HeadraceError
from headrace.tracking.base import EpisodeRow, RunInfo, Tracker

_MOST_WAITING = 1000  # calls; a service that is so far behind is down
_CLOSE_S = 60.0


class TrackerDownError(HeadraceError):
    """The service does not keep up, or does not end."""


class InBackground(Tracker):
    """Passes everything on to a tracker from a thread of its own, in order.

    What that one raises is raised by the next call: so it is reported once, and switched off. If it hangs, calls wait
    in a queue; when that is full, or `close` has waited for a minute, the tracker is given up.
    """

    def __init__(self, tracker: Tracker, most_waiting: int = _MOST_WAITING, close_s: float = _CLOSE_S) -> None:
        self._tracker = tracker
        self._calls: queue.Queue[tuple[Callable[..., Any], tuple[Any, ...]] | None] = queue.Queue(most_waiting)
        self._close_s = close_s
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None

    def start(self, info: RunInfo) -> None:
        self._put(self._tracker.start, info)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._put(self._tracker.log, step, dict(metrics))

    def episodes(self, step: int, rows: Sequence[EpisodeRow]) -> None:
        self._put(self._tracker.episodes, step, tuple(rows))

    def model(self, folder: Path, step: int) -> None:
        self._put(self._tracker.model, folder, step)

    def message(self, text: str) -> None:
        """Ignored: lines for people are in log.txt."""

    def close(self) -> None:
        thread, self._thread = self._thread, None
        if thread is None:
            return
        try:
            self._calls.put_nowait(None)
        except queue.Full:
            return  # it hangs, and was reported; the thread is a daemon
        thread.join(self._close_s)
        if thread.is_alive():
            raise TrackerDownError(f"what was left was not written within {self._close_s:g} s")
        self._raise_failure()

    def _put(self, call: Callable[..., Any], *arguments: Any) -> None:
        self._raise_failure()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="headrace-tracker", daemon=True)
            self._thread.start()
        try:
            self._calls.put_nowait((call, arguments))
        except queue.Full:
            raise TrackerDownError(f"it is {self._calls.maxsize} calls behind") from None

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _run(self) -> None:
        try:
            while (found := self._calls.get()) is not None:
                found[0](*found[1])
        except BaseException as error:  # SystemExit, too: what a service's client raises must not vanish
            self._failure = error if isinstance(error, Exception) else TrackerDownError(repr(error))
        try:
            self._tracker.close()
        except Exception as error:
            self._failure = self._failure or error
