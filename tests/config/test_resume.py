"""Runs that are stopped, gone on with, extended and branched off, as one does it on the command line."""

from __future__ import annotations

import errno
import json
import random
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from headrace import UnifiedTrainer, registry
from headrace.cli.main import run
from headrace.config.loading import build_config
from headrace.data.task import Task
from headrace.errors import CheckpointError
from headrace.rollout.model_client import Model
from headrace.run.checkpoint import TrainerState, checkpoint_folder, list_checkpoints, step_of
from headrace.trainer.callbacks import Callback, TrainerHandle
from null_backend import NULL_ENGINE, Null, NullBackend, null_config, null_trainer, some_tasks

Caught = pytest.CaptureFixture[str]
FILE = """
[run]
name = "named"
[backend]
name = "null"
[engine]
name = "null"
[data]
tasks = "test_resume:tasks"
[workflow]
name = "null_backend:scattered"
[rollout]
group_size = 2
max_tokens = 8
[trainer]
steps = 4
batch_size = 3
[track]
trackers = ["jsonl"]
plot = false
"""


def tasks() -> list[Task]:
    return some_tasks()


class StopAtTwo(Callback):
    """As Ctrl-C at the second step would."""

    def on_train_start(self, trainer: TrainerHandle) -> None:
        self._trainer = trainer

    def on_batch_end(self, step: int, metrics: Mapping[str, float]) -> None:
        if step == 2:
            self._trainer.stop()


class StopAtOne(StopAtTwo):
    """As Ctrl-C while recorded steps are repeated would."""

    def on_batch_end(self, step: int, metrics: Mapping[str, float]) -> None:
        self._trainer.stop()


class BreaksAtThree(Callback):
    """As a kill in the third step would."""

    def on_batch_end(self, step: int, metrics: Mapping[str, float]) -> None:
        if step == 3:
            raise ZeroDivisionError


class Breaks(Callback):
    """As a kill after the third step would."""

    def on_batch_end(self, step: int, metrics: Mapping[str, float]) -> None:
        raise ZeroDivisionError


STOP = ["--trainer.callbacks", "test_resume:StopAtTwo"]
GO_ON = ["--trainer.callbacks", "[]"]


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """`headrace train` with a run file of the null backend, in a folder of its own."""
    monkeypatch.setattr(registry, "_registered", {})
    monkeypatch.chdir(tmp_path)
    registry.register("backend", "null", Null())
    registry.register("engine", "null", NULL_ENGINE)
    (tmp_path / "run.toml").write_text(FILE)
    return lambda *words: run(["train", *words])


def made(run_dir: str | Path) -> list[int]:
    """Steps in the order in which they were reported."""
    return [json.loads(line)["step"] for line in (Path(run_dir) / "metrics.jsonl").read_text().splitlines()]


def saved(run_dir: str | Path) -> list[int]:
    return [step_of(folder) for folder in list_checkpoints(Path(run_dir))]


def test_a_stopped_run_resumes_by_its_folder_alone(train: Callable[..., int]) -> None:
    assert train("run.toml", "--run-dir", "r", *STOP) == 130
    assert made("r") == [1, 2] and saved("r") == [2]
    assert train("--resume", "r", *GO_ON) == 0
    assert made("r") == [1, 2, 3, 4] and saved("r") == [2, 4]
    assert not Path("r-2").exists()


def test_a_stop_while_recorded_steps_are_repeated_is_honoured_after_the_step(train: Callable[..., int]) -> None:
    with pytest.raises(ZeroDivisionError):
        train("run.toml", "--run-dir", "r", "--trainer.callbacks", "test_resume:BreaksAtThree")
    assert saved("r") == []
    assert train("--resume", "r", "--trainer.callbacks", "test_resume:StopAtOne") == 130
    assert saved("r") == [1]
    assert train("--resume", "r", *GO_ON) == 0
    assert made("r") == [1, 2, 3, 4]


def test_a_file_is_laid_over_the_settings_of_a_resumed_run(train: Callable[..., int]) -> None:
    assert train("run.toml", "--run-dir", "r", *STOP) == 130
    Path("more.toml").write_text("[trainer]\nsteps = 5\ncallbacks = []\n")
    assert train("--resume", "r", "more.toml") == 0
    assert made("r") == [1, 2, 3, 4, 5]


def test_the_same_command_resumes_too(train: Callable[..., int]) -> None:
    train("run.toml", "--run-dir", "r", *STOP)
    assert train("run.toml", "--run-dir", "r") == 0
    assert made("r") == [1, 2, 3, 4]


def test_a_run_whose_folder_was_moved_resumes_where_it_is(train: Callable[..., int]) -> None:
    train("run.toml", "--run-dir", "r", *STOP)
    Path("r").rename("moved")
    assert train("--resume", "moved", *GO_ON) == 0
    assert made("moved") == [1, 2, 3, 4] and not Path("r").exists()


def test_a_finished_run_is_extended_by_more_steps_and_else_left_alone(
    train: Callable[..., int], capsys: Caught
) -> None:
    assert train("run.toml", "--run-dir", "r") == 0
    assert train("--resume", "r") == 2
    assert "r is finished after 4 steps; give a larger --trainer.steps" in capsys.readouterr().err
    assert train("--resume", "r", "--trainer.steps", "6") == 0
    assert made("r") == [1, 2, 3, 4, 5, 6] and (Path("r") / "finished").exists()
    assert train("run.toml", "--run-dir", "r", "--trainer.steps", "8") == 0
    assert len(made("r")) == 6 and len(made("r-2")) == 8


def test_never_starts_beside_an_unfinished_run(train: Callable[..., int]) -> None:
    train("run.toml", "--run-dir", "r", *STOP)
    assert train("run.toml", "--run-dir", "r", "--run.resume", "never") == 0
    assert made("r") == [1, 2] and made("r-2") == [1, 2, 3, 4]


def test_a_path_starts_a_run_of_its_own_from_there(train: Callable[..., int]) -> None:
    train("run.toml", "--run-dir", "r", "--trainer.save_every", "1", "--trainer.keep_last", "9")
    words = ["run.toml", "--run-dir", "b", "--run.resume", "r/checkpoints/step_000002", "--optimizer.lr", "1e-3"]
    assert train(*words, *STOP, "--trainer.steps", "5") == 0  # step 2 was made before
    assert made("b") == [3, 4, 5] and made("r") == [1, 2, 3, 4]
    first, again = (json.loads((list_checkpoints(Path(name))[-1] / "trainer.json").read_text()) for name in "rb")
    assert (first["step"], again["step"]) == (4, 5) and again["version"] == 5
    assert train("run.toml", "--run-dir", "c", "--run.resume", "r", "--trainer.steps", "6") == 0
    assert made("c") == [5, 6]


@pytest.mark.parametrize("again", [["run.toml", "--run-dir", "b", "--run.resume", "r"], ["--resume", "b"]])
def test_a_branch_stands_on_its_own_from_its_beginning(train: Callable[..., int], again: list[str]) -> None:
    train("run.toml", "--run-dir", "r", *STOP)
    with pytest.raises(ZeroDivisionError):  # before it has made a checkpoint
        train("run.toml", "--run-dir", "b", "--run.resume", "r", "--trainer.callbacks", "test_resume:Breaks")
    assert saved("b") == [2]
    shutil.rmtree("r/checkpoints")
    assert train(*again, *GO_ON) == 0
    assert made("b")[-2:] == [3, 4] and not Path("b-2").exists()
    assert json.loads(Path("b/config.json").read_text())["run"]["resume"] == "r"  # where it comes from


def test_other_settings_are_refused_and_the_run_can_still_be_resumed(train: Callable[..., int], capsys: Caught) -> None:
    train("run.toml", "--run-dir", "r", *STOP)
    capsys.readouterr()
    assert train("--resume", "r", *GO_ON, "--optimizer.lr", "1") == 2
    err = capsys.readouterr().err
    assert "optimizer.lr: 1e-05 → 1" in err and 'run.resume = "never"' in err and err.count("\n") == 1
    assert train("--resume", "r", *GO_ON, "--trainer.save_every", "1") == 0
    assert made("r") == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--resume", "nowhere"], "nowhere holds no run to resume"),
        (["--resume", "r", "named.toml"], "run.name of named.toml has no effect; leave it out"),
        (["--resume", "r", "nowhere.toml"], "there is no run file nowhere.toml"),
        (["--resume", "r", "--run-dir", "x"], "--run-dir x has no effect"),
        (["--resume", "r", "--run.name", "x"], "--run.name has no effect"),
        (["--resume", "r", "--run.resume=never"], "--run.resume has no effect"),
        (["--resume", "r", "--dryrun"], 'did you mean "--dry-run"?'),
        (["--resme", "r"], 'did you mean "--resume"?'),
        (["--resume", "r", "--trainer.stpes", "3"], 'did you mean "steps"?'),
        (["--resume", "r/checkpoints/step_000004"], "holds no run to resume"),
        (["run.toml", "--run.resume", "nevr"], 'did you mean "never"?'),
    ],
)
def test_a_mistake_in_resuming_is_one_line(
    train: Callable[..., int], capsys: Caught, words: list[str], says: str
) -> None:
    train("run.toml", "--run-dir", "r")
    Path("named.toml").write_text("[run]\nname = 'x'\n")
    capsys.readouterr()
    assert train(*words) == 2
    err = capsys.readouterr().err
    assert says in err and err.startswith("error: ") and err.count("\n") == 1


def test_a_dry_run_of_a_resumed_run_shows_its_settings_and_changes_nothing(
    train: Callable[..., int], capsys: Caught
) -> None:
    train("run.toml", "--run-dir", "r", *STOP)
    before = (Path("r") / "config.json").read_bytes()
    assert train("--resume", "r", "--trainer.steps", "9", "--dry-run") == 0
    assert "# run directory: r\n" in capsys.readouterr().out
    assert (Path("r") / "config.json").read_bytes() == before


# ---- inside ----------------------------------------------------------------------------------------------------------


def test_a_resumed_run_uses_the_random_numbers_that_it_would_have_drawn(tmp_path: Path) -> None:
    drawn: dict[str, list[float]] = {}

    def drawing(name: str, stop: int = 0) -> Callback:
        class Drawing(StopAtTwo):
            def on_batch_end(self, step: int, metrics: Mapping[str, float]) -> None:
                drawn.setdefault(name, []).append(random.random())
                if step == stop:
                    self._trainer.stop()

        return Drawing()

    whole: dict[str, Any] = {"run": {"dir": str(tmp_path), "name": "whole"}, "trainer": {"steps": 4, "batch_size": 3}}
    part: dict[str, Any] = whole | {"run": {"dir": str(tmp_path), "name": "part"}}
    random.seed(7)
    null_trainer(tmp_path, callbacks=[drawing("whole")], **whole).fit()
    random.seed(7)
    null_trainer(tmp_path, callbacks=[drawing("part", stop=2)], **part).fit()
    random.seed(99)  # another process
    null_trainer(tmp_path, callbacks=[drawing("part")], **part).fit()
    assert drawn["part"] == drawn["whole"] and len(drawn["whole"]) == 4


def test_evaluations_are_in_the_checkpoint_and_outlive_a_restart(tmp_path: Path) -> None:
    sections: dict[str, Any] = {
        "eval": {"every": 1, "before": True, "after": False, "sets": {"dev": {"tasks": "test_resume:tasks"}}},
        "trainer": {"steps": 4, "batch_size": 3, "save_last": True},
    }
    null_trainer(tmp_path, callbacks=[StopAtTwo()], **sections).fit()
    result = null_trainer(tmp_path, **sections).fit()
    state = TrainerState.read(list_checkpoints(result.run_dir)[-1])
    assert [found["eval/step"] for found in state.evaluations] == [0, 1, 2, 3]
    assert result.first_evaluation == state.first_evaluation != {}


def test_the_best_checkpoints_of_a_run_are_kept(tmp_path: Path) -> None:
    rewards = iter([0.1, 0.9, 0.3, 0.2, 0.4, 0.0, 0.0])
    reward = 0.0

    async def judged(task: Task, model: Model) -> float:
        await model.chat(task.messages)
        return reward

    class Next(Callback):
        def on_validation_start(self, step: int) -> None:
            nonlocal reward
            reward = next(rewards)

    trainer = null_trainer(
        tmp_path,
        judged,
        callbacks=[Next()],
        eval={"every": 1, "sets": {"dev": {"tasks": "test_resume:tasks"}}},
        trainer={"save_every": 1, "keep_last": 1, "keep_best": 2, "best_metric": "eval/dev/reward", "save_last": True},
    )
    assert saved(trainer.fit().run_dir) == [2, 5, 6]


class FullBackend(NullBackend):
    """The disk is full from the second checkpoint on."""

    saves = 0

    async def snapshot(self) -> Callable[[Path], None]:
        FullBackend.saves += 1
        copied, full = Path(tempfile.mkdtemp()) / "copied", FullBackend.saves > 1
        await self.save(copied)

        def write(folder: Path) -> None:
            shutil.copytree(copied, folder)
            if full:
                raise OSError(errno.ENOSPC, "No space left on device")

        return write


class FullNull(Null):
    def __call__(self, config: Any) -> NullBackend:
        self.made.append(FullBackend(config, self))
        return self.made[-1]


def test_a_disk_that_fills_up_beside_training_ends_the_run_loudly(tmp_path: Path) -> None:
    FullBackend.saves = 0
    steps: dict[str, Any] = {"trainer": {"steps": 50, "save_every": 2, "batch_size": 3}}
    with pytest.raises(CheckpointError, match=r"step_000004: No space left on device; step_000002 is intact"):
        null_trainer(tmp_path, null=FullNull(), **steps).fit()
    run_dir = tmp_path / null_config(tmp_path).run.name
    assert [path.name for path in (run_dir / "checkpoints").iterdir()] == ["step_000002"]
    assert not (run_dir / "finished").exists()
    assert null_trainer(tmp_path, **steps).fit().steps == 50


def test_a_checkpoint_written_beside_training_gives_the_weights_of_the_uninterrupted_run(tmp_path: Path) -> None:
    """On the real backend: what is written while the next steps are made is the state of its own step."""

    def train(name: str, resume: str = "auto") -> Path:
        run = {"dir": str(tmp_path), "name": name, "resume": resume, "deterministic": True}
        trainer = {"steps": 4, "batch_size": 2, "save_every": 1, "keep_last": 9, "save_async": True}
        rollout = {"group_size": 4, "max_tokens": 12}
        track = {"trackers": ["jsonl"], "plot": False}
        workflow = {"judger": "countdown"}
        optimizer = {"lr": 1e-3}
        config = build_config(
            {"run": run, "trainer": trainer, "rollout": rollout, "track": track, "workflow": workflow,
             "optimizer": optimizer}
        )  # fmt: skip
        return UnifiedTrainer(config).fit().run_dir

    whole = train("whole")
    assert saved(whole) == [1, 2, 3, 4]
    for step in (1, 3):
        branch = train(f"from-{step}", str(checkpoint_folder(whole, step)))
        assert saved(branch) == list(range(step, 5))
        for file in ("weights.safetensors", "optimizer.safetensors"):
            one, two = (checkpoint_folder(run_dir, 4) / file for run_dir in (whole, branch))
            assert one.read_bytes() == two.read_bytes()
