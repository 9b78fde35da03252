"""What ends before the first step leaves no folder behind, and never takes anything away that was there."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace import Task, UnifiedTrainer, registry
from headrace.cli.main import run
from headrace.config import RunConfig
from headrace.config.loading import build_config
from headrace.errors import HeadraceError
from headrace.rollout.model_client import Model
from headrace.trainer.callbacks import Callback
from null_backend import Null, scattered, some_tasks


@pytest.fixture(autouse=True)
def null() -> None:
    registry.register("backend", "null", Null())


def config(tmp_path: Path, **sections: Any) -> RunConfig:
    values: dict[str, Any] = {
        "run": {"dir": str(tmp_path / "new" / "runs"), "name": "try"},
        "backend": {"name": "null"},
        "engine": {"name": "null"},
        "rollout": {"group_size": 2, "max_tokens": 4},
        "trainer": {"steps": 3, "batch_size": 2},
        "eval": {"sets": {"dev": {"tasks": "unused"}}},
        "track": {"trackers": ["jsonl", "tensorboard"], "plot": False},
    }
    return build_config({name: values.get(name, {}) | sections.get(name, {}) for name in {*values, *sections}})


def trainer(config: RunConfig, **given: Any) -> UnifiedTrainer:
    usual = {"workflow": scattered, "tasks": some_tasks(8), "eval_tasks": {"dev": some_tasks(2)}}
    return UnifiedTrainer(config, **{**usual, **given})


STARTS: dict[str, tuple[list[str], str]] = {
    "model": (["--model.name", "nosuch"], 'unknown model "nosuch"'),
    "model folder": (["--model.name", "./nosuch"], "there is no model folder"),
    "tasks": (["--data.tasks", "nosuch.jsonl", "--data.args", "{}"], "nosuch.jsonl"),
    "tracker": (["--track.trackers", '["cosole"]'], 'did you mean "console"'),
    "judger": (["--workflow.judger", "nosuch.py:judge"], "nosuch.py"),
}


@pytest.mark.parametrize(("words", "says"), STARTS.values(), ids=list(STARTS))
def test_a_mistake_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], says: str
) -> None:
    example = Path(__file__).parents[2] / "examples" / "countdown.toml"
    monkeypatch.chdir(tmp_path)
    assert run(["train", str(example), *words]) == 2
    assert says in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def always_fails() -> None:
    raise HeadraceError("the engine does not start")


class Failing(Callback):
    def on_train_start(self, trainer: Any) -> None:
        always_fails()


def test_what_fails_after_loading_leaves_no_folder_either(tmp_path: Path) -> None:
    with pytest.raises(HeadraceError, match="does not start"):
        trainer(config(tmp_path, eval={"before": False}), callbacks=[Failing()]).fit()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_was_there_stays_and_so_does_what_others_wrote(tmp_path: Path) -> None:
    there = tmp_path / "new" / "runs" / "try"

    class Writing(Failing):
        def on_train_start(self, trainer: Any) -> None:
            (there / "notes.txt").write_text("mine")
            super().on_train_start(trainer)

    with pytest.raises(HeadraceError):
        trainer(config(tmp_path, eval={"before": False}), callbacks=[Writing()]).fit()
    assert (there / "notes.txt").read_text() == "mine"
    (there / "notes.txt").unlink()
    with pytest.raises(HeadraceError):
        trainer(config(tmp_path, eval={"before": False}), callbacks=[Failing()]).fit()
    assert there.is_dir()


def test_an_evaluation_that_was_made_stays(tmp_path: Path) -> None:
    class Later(Callback):
        def on_batch_start(self, step: int) -> None:
            always_fails()

    with pytest.raises(HeadraceError):
        trainer(config(tmp_path), callbacks=[Later()]).fit()
    assert (tmp_path / "new" / "runs" / "try" / "metrics.jsonl").read_text().count("\n") == 1


# ---- Ctrl-C before the first step ------------------------------------------------------------------------------------


@pytest.fixture
def interrupt_soon() -> Iterator[None]:
    before = signal.getsignal(signal.SIGALRM), signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before[0])
    signal.signal(signal.SIGINT, before[1])


def slow_tasks() -> Iterator[Task]:
    yield from some_tasks(4)
    time.sleep(8)


async def slow(task: Task, model: Model) -> float:
    await asyncio.sleep(30)
    return 1.0


@pytest.mark.parametrize("given", [{"tasks": slow_tasks()}, {"workflow": slow}], ids=["loading", "first evaluation"])
def test_an_interrupt_before_the_first_step_ends_it_soon_and_leaves_nothing(
    tmp_path: Path, interrupt_soon: None, given: dict[str, Any]
) -> None:
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        trainer(config(tmp_path), **given).fit()
    assert time.monotonic() - began < 6
    assert list(tmp_path.iterdir()) == []
