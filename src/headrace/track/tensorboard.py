"""TensorBoardTracker: event files in `tensorboard/` of the run folder."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto import event_pb2

from headrace.errors import DataError
from headrace.track.base import RunInfo

_FLUSH_EVERY_S = 5.0  # a flush is an fsync, too slow for every short step


class TensorBoardTracker:
    """Writes scalars under their own keys.

    The plain events writer is used, not SummaryWriter: that one renames `pass@1` to `pass_1`, and writes in a thread
    behind a bounded queue, so that a full disk would block training instead of raising.
    """

    def __init__(self) -> None:
        self._writer: EventsWriter | None = None
        self._flushed_at_s = -math.inf

    def start(self, info: RunInfo) -> None:
        """Open a new event file; TensorBoard joins the files of one folder."""
        folder = info.run_dir / "tensorboard"
        folder.mkdir(parents=True, exist_ok=True)
        # the file's name has whole seconds only; a quick restart must not overwrite the file before
        self._writer = EventsWriter(str(folder / "events"), f".{os.getpid()}.{time.monotonic_ns()}")
        if info.resumed_from is not None:  # a start of a session: readers forget what they have from this step on
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)  # pyright: ignore[reportAttributeAccessIssue]
            step = info.resumed_from + 1 if info.resumed_from else 0
            self._writer.write_event(event_pb2.Event(wall_time=time.time(), step=step, session_log=start))  # pyright: ignore[reportAttributeAccessIssue]

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one event with all scalars of the step."""
        if self._writer is None:
            raise DataError(f"metrics of step {step} came while no event file is open; call start() first")
        event = event_pb2.Event(wall_time=time.time(), step=step)  # pyright: ignore[reportAttributeAccessIssue]
        for key, value in metrics.items():
            event.summary.value.add(tag=key, simple_value=float(value))
        self._writer.write_event(event)
        if time.monotonic() - self._flushed_at_s >= _FLUSH_EVERY_S:
            self._writer.flush()
            self._flushed_at_s = time.monotonic()

    def message(self, text: str) -> None:
        """Ignored: the event file holds numbers."""

    def close(self) -> None:
        """Flush and close the event file."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
