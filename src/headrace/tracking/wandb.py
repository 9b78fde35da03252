"""WandbTracker: a run at Weights & Biases, or in a folder with WANDB_MODE=offline."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import wandb  # pyright: ignore[reportMissingImports]

from headrace.tracking.background import InBackground
from headrace.tracking.base import EpisodeRow, RunInfo, Tracker
from headrace.tracking.episodes import COLUMNS, flat_settings, table_row

_ID = "wandb_id.txt"
_STEP = "trainer/step"


def new_tracker() -> Tracker:
    """One that never makes training wait."""
    return InBackground(WandbTracker())


class WandbTracker(Tracker):
    """Metrics under their own keys, over the trainer's steps: a resumed run continues the same run there.

    Environment variables of wandb (WANDB_MODE, WANDB_API_KEY, WANDB_ENTITY, WANDB_BASE_URL) are wandb's own.
    """

    def __init__(self) -> None:
        self._run: Any = None
        self._name = ""

    def start(self, info: RunInfo) -> None:
        stored = info.run_dir / _ID
        run_id = stored.read_text().strip() if stored.exists() else secrets.token_hex(6)
        stored.write_text(run_id + "\n")
        self._name = info.name
        self._run = wandb.init(
            project=info.config["track"]["project"], name=info.name, id=run_id, resume="allow", dir=str(info.run_dir),
            config=flat_settings(info.config), settings=wandb.Settings(silent=True, console="off"),
        )  # fmt: skip
        # not wandb's own count of calls, which cannot go back: a resumed run repeats some steps
        self._run.define_metric(_STEP)
        self._run.define_metric("*", step_metric=_STEP)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({_STEP: step, **metrics})

    def episodes(self, step: int, rows: Sequence[EpisodeRow]) -> None:
        table = wandb.Table(columns=list(COLUMNS), data=[table_row(step, row) for row in rows])
        self._run.log({_STEP: step, "episodes": table})

    def model(self, folder: Path, step: int) -> None:
        artifact = wandb.Artifact(f"model-{self._run.id}", type="model", metadata={"step": step, "run": self._name})
        artifact.add_dir(str(folder))
        self._run.log_artifact(artifact)

    def close(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            run.finish()
