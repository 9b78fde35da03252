"""TensorBoardTracker: event files in `tensorboard/` of the run folder."""

from __future__ import annotations

import html
import re
import struct
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from tensorboardX.proto import event_pb2
from tensorboardX.record_writer import masked_crc32c

from headrace.errors import DataError
from headrace.tracking.base import EpisodeRow, RunInfo, Tracker
from headrace.tracking.episodes import COLUMNS, flat_settings, table_row

_PREFIX = "events.out.tfevents."


class TensorBoardTracker(Tracker):
    """Writes scalars under their own keys.

    Events are written here, and not by SummaryWriter: that one renames `pass@1` to `pass_1`, and writes in a thread
    behind a bounded queue: a full disk would block training instead of raising, and a kill would lose events.
    """

    def __init__(self) -> None:
        self._file: BinaryIO | None = None

    def start(self, info: RunInfo) -> None:
        """Open a new event file; TensorBoard joins the files of one folder."""
        folder = info.run_dir / "tensorboard"
        folder.mkdir(parents=True, exist_ok=True)
        self._file = _new_file(folder).open("wb", buffering=0)
        self._write(file_version="brain.Event:2")
        if info.resumed_from is not None:  # a start of a session: readers forget what they have from this step on
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)  # pyright: ignore[reportAttributeAccessIssue]
            self._write(step=info.resumed_from + 1 if info.resumed_from else 0, session_log=start)
        if info.config:
            rows = [[key, value] for key, value in flat_settings(info.config).items()]
            self._write_text("settings", 0, _markdown(("setting", "value"), rows))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one event with all scalars of the step."""
        if self._file is None:
            raise DataError(f"metrics of step {step} came while no event file is open; call start() first")
        values = [{"tag": key, "simple_value": float(value)} for key, value in metrics.items()]
        self._write(step=step, summary={"value": values})

    def episodes(self, step: int, rows: Sequence[EpisodeRow]) -> None:
        """Write a table, which TensorBoard shows under "Text"."""
        if rows:
            self._write_text("episodes", step, _markdown(COLUMNS[1:], [table_row(step, row)[1:] for row in rows]))

    def message(self, text: str) -> None:
        """Ignored: the event file holds numbers."""

    def close(self) -> None:
        """Close the event file."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _write_text(self, tag: str, step: int, markdown: str) -> None:
        tensor = {"dtype": "DT_STRING", "string_val": [markdown.encode()], "tensor_shape": {"dim": [{"size": 1}]}}
        value = {"tag": f"{tag}/text_summary", "metadata": {"plugin_data": {"plugin_name": "text"}}, "tensor": tensor}
        self._write(step=step, summary={"value": [value]})

    def _write(self, **fields: Any) -> None:
        """Unbuffered: what was logged survives a kill."""
        assert self._file is not None
        event = event_pb2.Event(wall_time=time.time(), **fields).SerializeToString()  # pyright: ignore[reportAttributeAccessIssue]
        length = struct.pack("<Q", len(event))
        self._file.write(length + _checksum(length) + event + _checksum(event))


def _markdown(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A table. Nothing in it is markup: TensorBoard would show what a model says as it asks for."""
    lines = [columns, ["---"] * len(columns), *([_escaped(str(cell)) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _escaped(text: str) -> str:
    said = html.escape(text.encode("utf-8", "replace").decode())
    return "".join(f"&#{ord(letter)};" if letter in "|*_`[]()!#\\\n\r~" else letter for letter in said)


def _checksum(data: bytes) -> bytes:
    return struct.pack("<I", masked_crc32c(data))


def _new_file(folder: Path) -> Path:
    """Readers sort by name, so the new name must come after the existing ones, whatever the clock says."""
    there = (re.match(rf"{re.escape(_PREFIX)}(\d+)", path.name) for path in folder.iterdir())
    number = max([int(time.time()), *(int(found[1]) + 1 for found in there if found)])
    return folder / f"{_PREFIX}{number:010d}.headrace"
