"""JsonlTracker: `metrics.jsonl` in the run folder, one flat object per step."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO, TypeAlias

from headrace.errors import DataError
from headrace.tracking.base import RunInfo, Tracker

FILE_NAME = "metrics.jsonl"
Rows: TypeAlias = Mapping[int, Mapping[str, float]]
"""Step to its finite metrics, steps ascending."""


class JsonlTracker(Tracker):
    """Appends one line per step and flushes it, so that a killed run keeps every finished step."""

    def __init__(self) -> None:
        self._file: TextIO | None = None

    def start(self, info: RunInfo) -> None:
        """Open the file; an existing one is continued."""
        info.run_dir.mkdir(parents=True, exist_ok=True)
        path = info.run_dir / FILE_NAME
        _repair_tail(path)
        if info.resumed_from is not None:
            _forget_after(path, info.resumed_from)
        self._file = path.open("a", encoding="utf-8")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one object, "step" first. JSON has no NaN or infinity: they become null."""
        if self._file is None:
            raise DataError(f"metrics of step {step} came while {FILE_NAME} is not open; call start() first")
        row = {"step": step, **{key: _finite(value) for key, value in metrics.items()}}
        self._file.write(json.dumps(row, allow_nan=False) + "\n")
        self._file.flush()

    def message(self, text: str) -> None:
        """Ignored: the file holds numbers."""

    def close(self) -> None:
        """Close the file."""
        file, self._file = self._file, None
        if file is not None:
            file.close()


def _finite(value: float) -> float | None:
    number = float(value)
    return number if math.isfinite(number) else None


def _repair_tail(path: Path) -> None:
    """Cut a line that a kill left half-written, or the next line would be glued to it and both be lost."""
    if not path.exists():
        return
    tail = path.read_bytes().rpartition(b"\n")[2]
    if not tail:
        return
    with path.open("r+b") as file:  # only its end is changed: another kill must not lose the lines before
        end = file.seek(0, os.SEEK_END)
        try:
            json.loads(tail)
            file.write(b"\n")
        except ValueError:
            file.truncate(end - len(tail))


def _forget_after(path: Path, step: int) -> None:
    """Drop the rows that will be written again; a run that resumes from step 0 also evaluates again."""
    if not path.exists():
        return
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    kept = [line for line in lines if _step_of(line) <= (step or -1)]
    if len(kept) < len(lines):
        partial = path.with_suffix(".partial")
        partial.write_text("".join(kept), encoding="utf-8")
        partial.replace(path)


def _step_of(line: str) -> float:
    """Infinity for a line that cannot be read: it is dropped, and the others are kept."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf


def read_rows(path: Path) -> Rows:
    """Metrics by step. A step that a resumed run repeated counts as it was last; a torn line counts as missing."""
    if not path.is_file():
        return {}
    rows: dict[int, dict[str, float]] = {}
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
            step = int(row.pop("step"))
        except (ValueError, KeyError, AttributeError, TypeError):
            continue
        numbers = {key: float(value) for key, value in row.items() if _is_finite(value)}
        rows.setdefault(step, {}).update(numbers)
    return dict(sorted(rows.items()))


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
