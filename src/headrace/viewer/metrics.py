"""MetricsTable: metrics.jsonl by column, read on from where the last read ended."""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from stat import S_ISREG
from typing import Any

from headrace.tracking.jsonl import FILE_NAME

_NAN = math.nan


class MetricsTable:
    """One array per key, a number per step: a hundred thousand steps take some 50 MB. Not for several threads."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / FILE_NAME
        self._identity: tuple[int, int] | None = None
        self._clear()

    def _clear(self) -> None:
        self._offset = 0
        self.steps: list[int] = []
        self.columns: dict[str, array[float]] = {}
        self._place: dict[int, int] = {}

    def refresh(self) -> None:
        """Read what was appended. A file that was replaced (by a run that resumed from a checkpoint) is read again."""
        try:
            stat = self._path.stat()
            if not S_ISREG(stat.st_mode):
                raise FileNotFoundError(self._path)
        except OSError:
            self._identity = None
            self._clear()
            return
        if (stat.st_dev, stat.st_ino) != self._identity or stat.st_size < self._offset:
            self._identity = (stat.st_dev, stat.st_ino)
            self._clear()
        if stat.st_size > self._offset:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                self._add(file.read())

    def _add(self, content: bytes) -> None:
        end = content.rfind(b"\n") + 1  # a line that is being written is read next time
        self._offset += end
        for line in content[:end].splitlines():
            try:
                row = json.loads(line)
                step = int(row.pop("step"))
            except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
                continue
            self._put(step, row)
        if self.steps != sorted(self.steps):
            self._sort()

    def _put(self, step: int, row: dict[str, Any]) -> None:
        place = self._place.get(step)
        if place is None:
            place = self._place[step] = len(self.steps)
            self.steps.append(step)
            for column in self.columns.values():
                column.append(_NAN)
        for key, value in row.items():
            if not isinstance(value, int | float) or not math.isfinite(value):
                continue
            if key not in self.columns:
                self.columns[key] = array("d", [_NAN]) * len(self.steps)
            self.columns[key][place] = value

    def _sort(self) -> None:
        order = sorted(range(len(self.steps)), key=self.steps.__getitem__)
        self.steps = [self.steps[place] for place in order]
        self._place = {step: place for place, step in enumerate(self.steps)}
        self.columns = {key: array("d", (column[place] for place in order)) for key, column in self.columns.items()}

    # ---- what is asked ----------------------------------------------------------------------------------------------

    def row(self, step: int) -> dict[str, float]:
        """The metrics of one step."""
        place = self._place.get(step)
        if place is None:
            return {}
        return {key: column[place] for key, column in self.columns.items() if not math.isnan(column[place])}

    def last(self, key: str) -> float | None:
        """The newest value of a metric."""
        return next((value for value in reversed(self.columns.get(key, ())) if not math.isnan(value)), None)

    def series(self, keys: Iterable[str], after: int = -1, points: int = 1000) -> tuple[list[int], dict[str, Any]]:
        """Steps after `after`, and for each key a value or None per step; of many steps every n-th and the last."""
        first = next((place for place, step in enumerate(self.steps) if step > after), len(self.steps))
        places = thinned(range(first, len(self.steps)), points)
        found = {
            key: [None if math.isnan(value := self.columns[key][place]) else value for place in places]
            for key in keys
            if key in self.columns
        }
        return [self.steps[place] for place in places], found

    def sparkline(self, key: str, points: int = 60) -> list[float]:
        """Values of a metric, at most so many."""
        values = [value for value in self.columns.get(key, ()) if not math.isnan(value)]
        return [values[place] for place in thinned(range(len(values)), points)]


def thinned(places: Sequence[int], most: int) -> list[int]:
    """At most about so many of them, evenly, always with the last."""
    every = max(1, math.ceil(len(places) / max(1, most)))
    kept = list(places[::every])
    return kept if not places or kept[-1] == places[-1] else [*kept, places[-1]]
