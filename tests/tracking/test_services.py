"""Trackers of services: what they are given can be read back there, and one that is down never stops training.

wandb, mlflow and trackio are in extras of their own; without them, what needs them is skipped.
"""

from __future__ import annotations

import json
import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from headrace.config.loading import build_config
from headrace.data.episode import Episode, Step, Trajectory
from headrace.tracking.background import InBackground, TrackerDownError
from headrace.tracking.base import EpisodeRow, RunInfo, Tracker, TrackerSet
from headrace.tracking.episodes import flat_settings, sampled_rows
from null_backend import null_run, scattered, some_tasks

VIEWER = "http://here:8123/"


def info(tmp_path: Path, resumed_from: int | None = None) -> RunInfo:
    config = build_config({"track": {"project": "the-project", "trackers": ["wandb"]}}).model_dump(mode="json")
    (tmp_path / "a-run").mkdir(exist_ok=True)
    return RunInfo("a-run", tmp_path / "a-run", 4, config, resumed_from)


def episode(group_id: int, reward: float, error: str | None = None, text: str = "so") -> Episode:
    step = Step((1,), (2, 3), (-0.1, -0.2), (0, 0), messages=({"role": "user", "content": "Why?"},), text=text)
    return Episode(f"t{group_id}", (Trajectory((step,), reward=reward),), group_id, 1, error=error)


def rows(count: int = 2) -> list[EpisodeRow]:
    return sampled_rows([episode(n, n / 10) for n in range(10)], count, Path("runs/a run"), VIEWER)


def drive(tracker: Tracker, where: RunInfo, first: int = 0) -> None:
    """A short run, whose steps begin somewhere."""
    tracker.start(where)
    for step in range(first, first + 3):
        tracker.log(step, {"reward/mean": step / 4, "eval/dev/pass@1": 0.5, "policy/odd": float("nan")})
        tracker.episodes(step, rows())


def model_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


# ---- rows ------------------------------------------------------------------------------------------------------------


def test_a_sample_has_the_best_and_the_worst_and_links_into_the_viewer() -> None:
    found = rows(3)
    assert [row.reward for row in found] == [0.0, 0.4, 0.9]
    assert found[-1].link == "http://here:8123/#/run/a%20run/group/9/rollout/1"
    assert (found[0].prompt, found[0].reply, found[0].tokens) == ("user: Why?", "so", 2)
    assert [row.group_id for row in rows(1)] == [9] and len(rows(50)) == 10


def test_failed_episodes_are_left_out_and_long_or_broken_text_is_cut() -> None:
    found = sampled_rows([episode(0, 1.0, "broke"), episode(1, 1.0, text="\ud800" + "x" * 9999)], 5, Path("r"), "")
    assert [(row.group_id, row.link) for row in found] == [(1, "")]
    assert found[0].reply.startswith("?x") and len(found[0].reply) == 2001


def test_settings_are_flat() -> None:
    assert flat_settings({"a": {"b": {"c": 1}, "d": {}}, "e": [2]}) == {"a.b.c": 1, "a.d": {}, "e": [2]}


# ---- in the background -----------------------------------------------------------------------------------------------


class Slow(Tracker):
    """Waits, or fails, in `log`."""

    def __init__(self, gate: threading.Event | None = None, error: BaseException | None = None) -> None:
        self.gate, self.error = gate, error
        self.steps: list[int] = []
        self.closed = 0

    def start(self, info: RunInfo) -> None: ...

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if self.gate is not None:
            self.gate.wait()
        if self.error is not None:
            raise self.error
        self.steps.append(step)

    def close(self) -> None:
        self.closed += 1


def test_training_does_not_wait_for_a_slow_service_and_nothing_is_lost(tmp_path: Path) -> None:
    slow = Slow(threading.Event())
    tracker = InBackground(slow)
    began = time.monotonic()
    tracker.start(info(tmp_path))
    for step in range(20):
        tracker.log(step, {})
    assert time.monotonic() - began < 1 and slow.steps == []
    assert slow.gate is not None
    slow.gate.set()
    tracker.close()
    tracker.close()
    assert slow.steps == list(range(20)) and slow.closed == 1


@pytest.mark.parametrize("error", [ConnectionError("no route"), SystemExit(1)])
def test_a_service_that_is_down_is_reported_once_and_switched_off(tmp_path: Path, error: BaseException) -> None:
    slow = Slow(error=error)
    trackers = TrackerSet({"mine": InBackground(slow)})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trackers.start(info(tmp_path))
        for step in range(50):
            trackers.log(step, {})
            time.sleep(0.002)
        trackers.close()
    (warning,) = [str(one.message) for one in caught]
    assert 'tracker "mine" failed' in warning and "training continues without it" in warning
    assert slow.closed == 1


def test_a_service_that_hangs_is_given_up(tmp_path: Path) -> None:
    gate = threading.Event()
    tracker = InBackground(Slow(gate), most_waiting=3, close_s=0.05)
    tracker.start(info(tmp_path))
    with pytest.raises(TrackerDownError, match="3 calls behind"):
        for step in range(10):
            tracker.log(step, {})
    tracker.close()  # what is full takes no end: the thread is left alone
    hanging = InBackground(Slow(gate), close_s=0.05)
    hanging.log(0, {})
    with pytest.raises(TrackerDownError, match="was not written within"):
        hanging.close()
    gate.set()


class Remembers(Tracker):
    """Keeps what it got, for the test to see."""

    made: list[Remembers]

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.rows: dict[int, Sequence[EpisodeRow]] = {}
        self.folders: list[tuple[Path, int]] = []
        Remembers.made.append(self)

    def start(self, info: RunInfo) -> None: ...

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.steps.append(step)

    def episodes(self, step: int, rows: Sequence[EpisodeRow]) -> None:
        self.rows[step] = rows

    def model(self, folder: Path, step: int) -> None:
        self.folders.append((folder, step))


def test_a_run_gives_episodes_of_every_step_and_the_model_at_the_end(tmp_path: Path) -> None:
    Remembers.made = []
    track = {"trackers": ["jsonl", "test_services:Remembers"], "episodes": 3, "viewer": VIEWER, "upload_model": True}
    ran = null_run(tmp_path, scattered, some_tasks(9), trainer={"steps": 3, "batch_size": 2}, track=track)
    (mine,) = Remembers.made
    assert mine.steps[-3:] == [1, 2, 3] == list(mine.rows)
    assert all(len(found) == 3 and found[0].reward <= found[-1].reward for found in mine.rows.values())
    assert all(row.link.startswith(f"{VIEWER}#/run/{ran.result.run_dir.name}/group/") for row in mine.rows[1])
    assert mine.folders == [(ran.result.run_dir / "model", 3)]


# ---- the services ----------------------------------------------------------------------------------------------------


def written_by_wandb(path: Path) -> Iterator[bytes]:
    """The records of an offline run: pieces in blocks of 32 KB, each with checksum, length and kind."""
    data, place, piece = path.read_bytes(), 7, b""
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:  # too little room for a piece: the next block
            place += 32768 - place % 32768
            continue
        length, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        piece += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # complete, or the last part
            yield piece
            piece = b""


def test_wandb_has_settings_metrics_episodes_and_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="the extra wandb is not installed")
    wandb_internal_pb2: Any = import_module("wandb.proto.wandb_internal_pb2")
    from headrace.tracking.wandb import new_tracker

    monkeypatch.setenv("WANDB_MODE", "offline")
    for first in (0, 2):  # the second resumes, and repeats a step
        tracker = new_tracker()
        drive(tracker, info(tmp_path, first or None), first)
        tracker.model(model_folder(tmp_path) if not first else tmp_path / "model", 3)
        tracker.close()
    files = sorted((tmp_path / "a-run").glob("wandb/offline-run-*/*.wandb"))
    assert len(files) == 2 and len({path.name for path in files}) == 1  # the same run
    records = [wandb_internal_pb2.Record.FromString(data) for data in written_by_wandb(files[0])]
    settings = {item.key for one in records if one.HasField("run") for item in one.run.config.update}
    assert {"trainer.steps", "track.project"} <= settings
    keys = [{item.key or "/".join(item.nested_key): item.value_json for item in one.history.item}
            for one in records if one.HasField("history")]  # fmt: skip
    assert [row["trainer/step"] for row in keys if "reward/mean" in row] == ["0", "1", "2"]
    assert any("episodes" in key for row in keys for key in row)
    assert list((tmp_path / "a-run").glob("wandb/offline-run-*/files/media/table/*.json"))
    assert any(one.request.log_artifact.artifact.type == "model" or one.artifact.type == "model" for one in records)


def test_mlflow_has_settings_metrics_episodes_and_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="the extra mlflow is not installed")
    from headrace.tracking.mlflow import new_tracker

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for first in (0, 2):
        tracker = new_tracker()
        drive(tracker, info(tmp_path, first or None), first)
        tracker.model(model_folder(tmp_path) if not first else tmp_path / "model", 3)
        tracker.close()
    client = mlflow.MlflowClient((tmp_path / "mlruns").as_uri())
    experiment = client.get_experiment_by_name("the-project")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED" and run.data.params["trainer.steps"]
    history = client.get_metric_history(run.info.run_id, "reward/mean")
    assert {(one.step, one.value) for one in history} == {(step, step / 4) for step in range(5)}
    assert run.data.metrics["eval/dev/pass_at_1"] == 0.5 and "policy/odd" not in run.data.metrics
    place = Path(client.download_artifacts(run.info.run_id, "episodes/step_000001.json", str(tmp_path)))
    table = json.loads(place.read_text())
    assert table["columns"][0] == "step" and table["data"][0][-1].startswith(VIEWER)
    assert [one.path for one in client.list_artifacts(run.info.run_id, "model")] == ["model/config.json"]


def test_trackio_has_metrics_and_episodes(tmp_path: Path) -> None:
    pytest.importorskip("trackio", reason="the extra trackio is not installed")
    import subprocess
    import sys

    program = f"""
import sys; sys.path[:0] = {sys.path!r}
from pathlib import Path
import test_services as here
from headrace.tracking.trackio import new_tracker
tracker = new_tracker()
here.drive(tracker, here.info(Path({str(tmp_path)!r})))
tracker.close()
from trackio.sqlite_storage import SQLiteStorage
logs = SQLiteStorage.get_logs("the-project", "a-run")
assert [row["step"] for row in logs if "reward/mean" in row] == [0, 1, 2], logs
assert any("episodes" in row for row in logs), logs
"""
    environment = {"TRACKIO_DIR": str(tmp_path / "trackio"), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    environment |= {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]


def test_tensorboards_own_reader_finds_metrics_settings_and_episodes(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the extra tensorboard is not installed")
    reading: Any = import_module("tensorboard.backend.event_processing.event_accumulator")
    from headrace.tracking.tensorboard import TensorBoardTracker

    tracker = TensorBoardTracker()
    drive(tracker, info(tmp_path))
    tracker.close()
    found = reading.EventAccumulator(str(tmp_path / "a-run" / "tensorboard"))
    found.Reload()
    assert [one.step for one in found.Scalars("eval/dev/pass@1")] == [0, 1, 2]
    (text, *_) = found.Tensors("episodes/text_summary")
    table = text.tensor_proto.string_val[0].decode()
    assert table.startswith("| group_id | rollout_idx |") and "user: Why?" in table
    assert found.Tensors("settings/text_summary")


def test_a_table_for_tensorboard_holds_no_markup(tmp_path: Path) -> None:
    from headrace.tracking.tensorboard import _markdown

    table = _markdown(("a", "b"), [["<script>alert(1)</script> | [x](javascript:y)\n# z", 2]])
    head, line, row = table.splitlines()
    assert (head, line) == ("| a | b |", "| --- | --- |")
    assert row.count("|") == 3 and not {*row} & {*"<>[]()!*_`"} and "javascript" in row
