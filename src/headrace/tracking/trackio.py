"""TrackioTracker: a run in Trackio's local database, which `trackio show` opens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import trackio  # pyright: ignore[reportMissingImports]

from headrace.tracking.background import InBackground
from headrace.tracking.base import EpisodeRow, RunInfo, Tracker
from headrace.tracking.episodes import COLUMNS, flat_settings, table_row


def new_tracker() -> Tracker:
    """One that never makes training wait."""
    return InBackground(TrackioTracker())


class TrackioTracker(Tracker):
    """Metrics by step. Trackio's environment variables (TRACKIO_DIR, TRACKIO_SPACE_ID) are its own.

    A resumed run continues the run of its name. Trackio has no versioned models: `track.upload_model` gives it none.
    """

    def __init__(self) -> None:
        self._run: Any = None

    def start(self, info: RunInfo) -> None:
        self._run = trackio.init(
            project=info.config["track"]["project"], name=info.name, config=flat_settings(info.config),
            resume="allow" if info.resumed_from is not None else "never", embed=False,
        )  # fmt: skip

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({key: float(value) for key, value in metrics.items() if math.isfinite(value)}, step=step)

    def episodes(self, step: int, rows: Sequence[EpisodeRow]) -> None:
        table = trackio.Table(columns=list(COLUMNS), data=[table_row(step, row) for row in rows])
        self._run.log({"episodes": table}, step=step)

    def close(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            run.finish()
