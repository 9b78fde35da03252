"""Trackers: what they write can be read back, and none of them can stop a run."""

from __future__ import annotations

import asyncio
import io
import json
import math
import struct
import warnings
from collections.abc import Mapping
from pathlib import Path

import pytest
from rich.console import Console

from headrace.errors import ConfigError
from headrace.tracking.base import RunInfo, Tracker, TrackerSet, eval_sets
from headrace.tracking.console import ConsoleTracker
from headrace.tracking.jsonl import JsonlTracker
from headrace.tracking.tensorboard import TensorBoardTracker

STEP = {
    "reward/mean": 0.412,
    "reward/std": 0.31,
    "policy/loss": -0.0123,
    "policy/grad_norm": 0.83,
    "policy/kl_to_sampler": 3.1e-7,
    "optim/lr": 1e-5,
    "tokens/generated_per_s": 5234.0,
    "tokens/trained_per_s": 9111.0,
    "response/length_mean": 143.2,
    "episodes/trained": 128.0,
    "episodes/failed": 0.0,
    "staleness/max": 0.0,
    "time/generate_s": 1.31,
    "time/train_s": 0.62,
    "time/step_s": 2.08,
}
EVAL = {"eval/countdown/pass@1": 0.31, "eval/countdown/pass@1_low": 0.27, "eval/countdown/pass@1_high": 0.35}


class Recorder(Tracker):
    """A tracker that remembers its calls and fails in the ones it is told to."""

    def __init__(self, fails_in: str = "") -> None:
        self.calls: list[str] = []
        self._fails_in = fails_in

    def start(self, info: RunInfo) -> None:
        self._take("start")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._take("log")

    def message(self, text: str) -> None:
        self._take("message")

    def close(self) -> None:
        self._take("close")

    def _take(self, call: str) -> None:
        self.calls.append(call)
        if call == self._fails_in:
            raise OSError("disk full")


def info(run_dir: Path, total_steps: int = 60) -> RunInfo:
    return RunInfo("demo", run_dir, total_steps, {"run": {"name": "demo"}})


def run_through(tracker: Tracker | TrackerSet, run_dir: Path) -> None:
    tracker.start(info(run_dir))
    tracker.log(0, EVAL)
    tracker.message("saved checkpoints/step_000001 [a note in brackets]")
    tracker.log(1, STEP | EVAL)
    tracker.close()


# the set


@pytest.mark.parametrize("fails_in", ["start", "log", "message"])
def test_a_failing_tracker_warns_once_and_the_others_continue(tmp_path: Path, fails_in: str) -> None:
    bad, good = Recorder(fails_in), Recorder()
    with pytest.warns(RuntimeWarning, match=r'"bad".*OSError: disk full') as caught:
        run_through(TrackerSet({"bad": bad, "good": good}), tmp_path)
    assert len(caught) == 1
    assert good.calls == ["start", "log", "message", "log", "close"]
    assert bad.calls[-2:] == [fails_in, "close"]


@pytest.mark.parametrize("raised", [SystemExit(3), GeneratorExit(), asyncio.CancelledError()], ids=repr)
def test_a_tracker_that_would_end_the_run_is_switched_off_too(tmp_path: Path, raised: BaseException) -> None:
    class Ends(Recorder):
        def log(self, step: int, metrics: Mapping[str, float]) -> None:
            raise raised

    good = Recorder()
    with pytest.warns(RuntimeWarning, match=r'"bad" failed in log') as caught:
        run_through(TrackerSet({"bad": Ends(), "good": good}), tmp_path)
    assert len(caught) == 1 and good.calls[-1] == "close"


def test_a_tracker_that_cannot_even_close_only_warns(tmp_path: Path) -> None:
    bad, good = Recorder("close"), Recorder()
    with pytest.warns(RuntimeWarning, match=r'"bad" failed in close'):
        run_through(TrackerSet({"bad": bad, "good": good}), tmp_path)
    assert good.calls[-1] == "close"


def test_trackers_are_found_by_name(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_through(TrackerSet.from_names(["jsonl", "tensorboard"]), tmp_path)
    assert (tmp_path / "metrics.jsonl").is_file()
    assert list((tmp_path / "tensorboard").iterdir())


def test_a_misspelt_tracker_is_an_error_at_start() -> None:
    with pytest.raises(ConfigError, match='did you mean "jsonl"'):
        TrackerSet.from_names(["jsnol"])


def test_a_tracker_named_twice_is_an_error() -> None:
    with pytest.raises(ConfigError, match="twice"):
        TrackerSet.from_names(["jsonl", "jsonl"])


@pytest.mark.parametrize("make", [ConsoleTracker, JsonlTracker, TensorBoardTracker])
def test_close_works_without_start_and_twice(make: type[Tracker]) -> None:
    tracker = make()
    tracker.close()
    tracker.close()


def test_eval_sets_are_found_by_their_keys() -> None:
    keys = ["reward/mean", "eval/b/pass@1", "eval/b/pass@1_low", "eval/a/x/pass@1", "eval/c/failed"]
    assert eval_sets(keys) == ["b", "a/x"]


# jsonl


def read_lines(run_dir: Path) -> list[dict[str, float | None]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_every_jsonl_line_is_one_flat_object_with_step_first(tmp_path: Path) -> None:
    run_through(JsonlTracker(), tmp_path)
    rows = read_lines(tmp_path)
    assert rows == [{"step": 0, **EVAL}, {"step": 1, **STEP, **EVAL}]
    assert all(next(iter(row)) == "step" for row in rows)


def test_jsonl_lines_are_on_disk_before_close(tmp_path: Path) -> None:
    tracker = JsonlTracker()
    tracker.start(info(tmp_path))
    tracker.log(1, {"reward/mean": 0.5})
    assert read_lines(tmp_path) == [{"step": 1, "reward/mean": 0.5}]
    tracker.close()


def test_non_finite_values_are_null_in_jsonl(tmp_path: Path) -> None:
    tracker = JsonlTracker()
    tracker.start(info(tmp_path))
    tracker.log(1, {"a": math.nan, "b": -math.inf, "c": 1.0})
    tracker.close()
    assert read_lines(tmp_path) == [{"step": 1, "a": None, "b": None, "c": 1.0}]


@pytest.mark.parametrize(
    ("left_behind", "kept"), [('{"step": 1}\n', 1), ('{"step": 1}', 1), ('{"step": 1}\n{"step": 2, "rew', 1), ("", 0)]
)
def test_a_resumed_run_appends_and_a_torn_line_is_cut(tmp_path: Path, left_behind: str, kept: int) -> None:
    (tmp_path / "metrics.jsonl").write_text(left_behind)
    tracker = JsonlTracker()
    tracker.start(info(tmp_path))
    tracker.log(2, {})
    tracker.close()
    assert read_lines(tmp_path) == [*[{"step": 1}] * kept, {"step": 2}]


# tensorboard


def read_events(path: Path) -> dict[tuple[int, str], float]:
    """Scalars by (step, tag). A record is: length, its checksum, the event, its checksum."""
    from tensorboardX.proto import event_pb2

    data, found = path.read_bytes(), {}
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        event = event_pb2.Event.FromString(data[12 : 12 + length])  # pyright: ignore[reportAttributeAccessIssue]
        scalars = [value for value in event.summary.value if not value.HasField("tensor")]  # settings are a text
        found |= {(event.step, value.tag): value.simple_value for value in scalars}
        data = data[16 + length :]
    return found


def test_tensorboard_events_read_back_under_their_own_keys(tmp_path: Path) -> None:
    run_through(TensorBoardTracker(), tmp_path)
    (path,) = (tmp_path / "tensorboard").iterdir()
    expected = {(0, key): value for key, value in EVAL.items()} | {(1, key): v for key, v in (STEP | EVAL).items()}
    assert read_events(path) == pytest.approx(expected, rel=1e-6)


def test_a_quick_restart_keeps_the_event_file_before(tmp_path: Path) -> None:
    run_through(TensorBoardTracker(), tmp_path)
    run_through(TensorBoardTracker(), tmp_path)
    assert len(list((tmp_path / "tensorboard").iterdir())) == 2


# console


def plain(steps: list[Mapping[str, float]], tmp_path: Path) -> list[str]:
    out = io.StringIO()
    tracker = ConsoleTracker(Console(file=out, width=40))
    tracker.start(info(tmp_path))
    for step, metrics in enumerate(steps):
        tracker.log(step, metrics)
    tracker.message("saved [bold]step 1[/bold]")
    tracker.close()
    return out.getvalue().splitlines()


def test_without_a_terminal_each_step_is_one_plain_line(tmp_path: Path) -> None:
    assert plain([EVAL, STEP | EVAL | {"episodes/failed": 3.0}], tmp_path) == [
        "before training  eval countdown 0.310",
        "step 1/60  reward 0.412  eval countdown 0.310  gen 5.2k tok/s  train 9.1k tok/s  failed 3  2.1 s/step",
        "saved [bold]step 1[/bold]",
    ]


def test_missing_metrics_are_left_out_of_the_line(tmp_path: Path) -> None:
    assert plain([{}, {"policy/loss": math.nan}], tmp_path)[:2] == ["before training", "step 1/60  loss nan"]


def test_without_rollouts_the_loss_is_shown_and_no_speed_of_sampling(tmp_path: Path) -> None:
    given = {"policy/loss": 1.25, "tokens/generated_per_s": 0.0, "tokens/trained_per_s": 900.0}
    assert plain([{}, given], tmp_path)[1] == "step 1/60  loss 1.250  train 900 tok/s"
    pairs = {"dpo/loss": math.log(2), "policy/entropy": 1.0}
    assert plain([{}, pairs], tmp_path)[1] == "step 1/60  loss 0.693"
    assert plain([{}, {"reward/mean": 0.5, **pairs}], tmp_path)[1] == "step 1/60  reward 0.500"


class Clock:
    """Seconds that pass when told."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def live_view(steps: Mapping[int, Mapping[str, float]], tmp_path: Path, total: int = 60) -> tuple[str, str]:
    """What is left on a terminal after the run, and everything that was sent to it."""
    out, clock = io.StringIO(), Clock()
    terminal = Console(file=out, width=100, height=40, force_terminal=True, color_system=None, _environ={})
    tracker = ConsoleTracker(terminal, live=True, clock=clock)
    tracker.start(info(tmp_path, total))
    for step, metrics in steps.items():
        clock.now_s += 10.0
        tracker.log(step, metrics)
    tracker.message("a line for people")
    tracker.close()
    return out.getvalue().rsplit("╭", 1)[1], out.getvalue()


def test_the_live_view_shows_the_key_metrics(tmp_path: Path) -> None:
    first = EVAL | {"eval/countdown/pass@1": 0.12}
    view, sent = live_view({0: first, 1: STEP | {"reward/mean": 0.2}, 2: STEP | EVAL}, tmp_path)
    for shown in ("demo", "2/60", "30s · 9m 40s left", "0.200 →  0.412", "0.120 →  0.310", "▁█", "0.270–0.350"):
        assert shown in view
    for shown in ("grad 0.830", "kl 3.1e-07", "generate 5.2k/s", "trained 128", "staleness 0", "step 2.1 s"):
        assert shown in view
    assert "a line for people" in sent


def test_a_resumed_run_estimates_from_its_own_steps(tmp_path: Path) -> None:
    view, _ = live_view({41: STEP, 42: STEP}, tmp_path)
    assert "20s · 3m 00s left" in view


@pytest.mark.parametrize(
    "metrics",
    [
        {},
        {"reward/mean": math.nan},
        {"eval/x/pass@1": -math.inf},
        {"time/step_s": 0.0},
        {"time/step_s": math.inf},
        {"time/train_s": 1.0},
        EVAL,
        STEP,
        dict.fromkeys(STEP | EVAL, math.nan),
        dict.fromkeys(STEP | EVAL, 0.0),
    ],
)
@pytest.mark.parametrize("total", [0, 1, 60])
def test_no_metric_can_break_the_view_and_the_cursor_comes_back(
    tmp_path: Path, metrics: dict[str, float], total: int
) -> None:
    view, sent = live_view({0: metrics, 1: metrics}, tmp_path, total)
    assert f"1/{total}" in view
    assert sent.rfind("\x1b[?25h") > sent.rfind("\x1b[?25l") >= 0


def test_the_terminal_is_restored_when_drawing_fails(tmp_path: Path) -> None:
    out = io.StringIO()
    tracker = ConsoleTracker(Console(file=out, force_terminal=True, _environ={}), live=True)
    bad: Mapping[str, float] = {"reward/mean": "high"}  # pyright: ignore[reportAssignmentType]
    trackers = TrackerSet({"console": tracker})
    trackers.start(info(tmp_path))
    with pytest.warns(RuntimeWarning, match='"console" failed in log'):
        trackers.log(1, bad)
    assert out.getvalue().rfind("\x1b[?25h") > out.getvalue().rfind("\x1b[?25l") >= 0


# plot


def draw(run_dir: Path, rows: list[str]) -> Path | None:
    plot = pytest.importorskip("headrace.tracking.plot", exc_type=ImportError)
    (run_dir / "metrics.jsonl").write_text("\n".join(rows))
    return plot.draw_curves(run_dir)


def test_the_curves_are_a_png_in_the_run_folder(tmp_path: Path) -> None:
    rows = [json.dumps({"step": step, **STEP, **(EVAL if step % 5 == 0 else {})}) for step in range(12)]
    assert draw(tmp_path, rows) == tmp_path / "curves.png"
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


@pytest.mark.parametrize("row", [{"step": 0, **EVAL}, {"step": 3, "reward/mean": 0.5}, {"step": 0, "eval/a/pass@1": 0}])
def test_a_single_point_is_drawn(tmp_path: Path, row: dict[str, float]) -> None:
    assert draw(tmp_path, [json.dumps(row)]) is not None


@pytest.mark.parametrize("rows", [[], ['{"step": 1, "policy/loss": 2.0}'], ['{"step": 1, "reward/mean": null}']])
def test_nothing_to_draw_draws_nothing(tmp_path: Path, rows: list[str]) -> None:
    assert draw(tmp_path, rows) is None
    assert not (tmp_path / "curves.png").exists()


def test_no_metrics_file_draws_nothing(tmp_path: Path) -> None:
    plot = pytest.importorskip("headrace.tracking.plot", exc_type=ImportError)
    assert plot.draw_curves(tmp_path) is None


def test_a_repeated_step_counts_as_it_was_last_and_a_torn_line_not_at_all(tmp_path: Path) -> None:
    plot = pytest.importorskip("headrace.tracking.plot", exc_type=ImportError)
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 2, "a": 1.0}\n{"step": 1, "a": 0.5}\n{"step": 2, "a": 3.0, "b": null}\n{"step": 3, "a')
    assert plot.read_rows(path) == {1: {"a": 0.5}, 2: {"a": 3.0}}


def test_smoothing_keeps_a_constant_and_the_length(tmp_path: Path) -> None:
    plot = pytest.importorskip("headrace.tracking.plot", exc_type=ImportError)
    assert plot.smooth([2.0] * 7, 3) == [2.0] * 7
    assert plot.smooth([0.0, 3.0, 6.0], 3) == [1.5, 3.0, 4.5]
