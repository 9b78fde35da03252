"""MlflowTracker: a run on an MLflow server, or in the folder `mlruns` beside the run folders."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mlflow import MlflowClient  # pyright: ignore[reportMissingImports]
from mlflow.entities import Metric, Param  # pyright: ignore[reportMissingImports]

from headrace.tracking.background import InBackground
from headrace.tracking.base import EpisodeRow, RunInfo, Tracker
from headrace.tracking.episodes import COLUMNS, flat_settings, table_row

_ID = "mlflow_id.txt"
_AT_ONCE = 100  # parameters of one call: what servers take
_LONGEST = 500  # characters of a parameter
_NAMES = str.maketrans({"@": "_at_"})  # what MLflow does not take in the name of a metric


def new_tracker() -> Tracker:
    """One that never makes training wait."""
    return InBackground(MlflowTracker())


class MlflowTracker(Tracker):
    """Settings as parameters, metrics by step, episodes as a JSON table, the model as an artifact.

    MLFLOW_TRACKING_URI says where; without it, `mlruns` beside the run folder, which `mlflow ui` shows. A resumed run
    continues the same run there.
    """

    def __init__(self) -> None:
        self._client: Any = None
        self._run_id = ""

    def start(self, info: RunInfo) -> None:
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if not uri:  # a folder, which MLflow takes only on request
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            uri = (info.run_dir.resolve().parent / "mlruns").as_uri()
        self._client = MlflowClient(uri)
        stored = info.run_dir / _ID
        if stored.exists():
            self._run_id = stored.read_text().strip()
            self._client.update_run(self._run_id, status="RUNNING")
            return
        project = info.config["track"]["project"]
        found = self._client.get_experiment_by_name(project)
        experiment = found.experiment_id if found else self._client.create_experiment(project)
        self._run_id = self._client.create_run(experiment, run_name=info.name).info.run_id
        stored.write_text(self._run_id + "\n")
        params = [Param(key, str(value)[:_LONGEST]) for key, value in flat_settings(info.config).items()]
        for start in range(0, len(params), _AT_ONCE):
            self._client.log_batch(self._run_id, params=params[start : start + _AT_ONCE])

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        finite = {key: value for key, value in metrics.items() if math.isfinite(value)}
        values = [Metric(key.translate(_NAMES), float(value), now, step) for key, value in finite.items()]
        self._client.log_batch(self._run_id, metrics=values)

    def episodes(self, step: int, rows: Sequence[EpisodeRow]) -> None:
        table = {"columns": list(COLUMNS), "data": [table_row(step, row) for row in rows]}
        self._client.log_dict(self._run_id, table, f"episodes/step_{step:06d}.json")

    def model(self, folder: Path, step: int) -> None:
        self._client.log_artifacts(self._run_id, str(folder), "model")

    def close(self) -> None:
        client, self._client = self._client, None
        if client is not None and self._run_id:
            client.set_terminated(self._run_id)
