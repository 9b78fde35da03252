"""Whole runs of the trainer on the bundled model: short, real, and looked at from outside."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from headrace import Task, Trajectory, UnifiedTrainer, load_config, registry
from headrace.config import RunConfig
from headrace.config.loading import build_config
from headrace.errors import ConfigError, DataError
from headrace.rollout.model_client import Model
from headrace.run.checkpoint import list_checkpoints, step_of
from headrace.tracking.base import RunInfo

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "countdown.toml"


def small(tmp_path: Path, *overrides: str) -> RunConfig:
    return load_config(
        EXAMPLE,
        [f"--run.dir={tmp_path}", "--trainer.batch_size=2", "--rollout.group_size=4", "--rollout.max_tokens=12",
         "--trainer.steps=2", "--run.deterministic=true", "--eval.sets.countdown.args.count=4", *overrides],
    )  # fmt: skip


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def weights(run_dir: Path) -> dict[str, Any]:
    return load_file(list_checkpoints(run_dir)[-1] / "weights.safetensors")


def same(one: dict[str, Any], two: dict[str, Any]) -> bool:
    return one.keys() == two.keys() and all((one[key] == two[key]).all() for key in one)


def test_a_run_leaves_config_metrics_checkpoint_and_curves(tmp_path: Path) -> None:
    result = UnifiedTrainer(small(tmp_path)).fit()
    assert result.steps == 2 and not result.interrupted
    rows = metrics(result.run_dir)
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert "eval/countdown/pass@1" in rows[0] and "eval/countdown/pass@1" in rows[2]
    for key in ("reward/mean", "staleness/max", "time/generate_s", "tokens/generated", "episodes/filtered",
                "policy/kl_to_sampler", "episodes/trained"):  # fmt: skip
        assert key in rows[1], key
    assert rows[2]["staleness/max"] == 0
    assert rows[2]["episodes/trained"] == rows[2]["episodes/dispatched"] == 16
    assert RunConfig.model_validate_json((result.run_dir / "config.json").read_text()).trainer.steps == 2
    assert (result.run_dir / "curves.png").is_file() and (result.run_dir / "log.txt").is_file()
    assert list((result.run_dir / "tensorboard").iterdir())


def test_the_same_file_gives_the_same_run(tmp_path: Path) -> None:
    runs = [UnifiedTrainer(small(tmp_path, f"--run.name=r{i}")).fit().run_dir for i in (1, 2)]
    assert same(weights(runs[0]), weights(runs[1]))


def test_another_seed_gives_another_run(tmp_path: Path) -> None:
    runs = [UnifiedTrainer(small(tmp_path, f"--run.name=r{i}", f"--run.seed={i}")).fit().run_dir for i in (1, 2)]
    assert not same(weights(runs[0]), weights(runs[1]))


class StopAt:
    """A tracker that stops its trainer after a step."""

    def __init__(self, step: int, trainer: UnifiedTrainer) -> None:
        self._step, self._trainer = step, trainer

    def start(self, info: RunInfo) -> None: ...
    def message(self, text: str) -> None: ...
    def close(self) -> None: ...

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if step == self._step:
            self._trainer.stop()


def test_an_interrupted_run_resumes_to_the_same_weights(tmp_path: Path) -> None:
    whole = UnifiedTrainer(small(tmp_path, "--run.name=whole", "--trainer.steps=4")).fit()
    part = UnifiedTrainer(
        small(tmp_path, "--run.name=part", "--trainer.steps=4", "--track.trackers", '["jsonl", "stopper"]')
    )
    registry.register("tracker", "stopper", lambda: StopAt(2, part))
    assert part.fit().interrupted
    result = UnifiedTrainer(small(tmp_path, "--run.name=part", "--trainer.steps=4")).fit()
    assert result.steps == 4
    assert same(weights(whole.run_dir), weights(result.run_dir))
    assert [row["step"] for row in metrics(result.run_dir)] == [0, 1, 2, 3, 4]


def test_a_finished_run_is_never_overwritten_and_that_is_said_first(tmp_path: Path) -> None:
    first = UnifiedTrainer(small(tmp_path)).fit()
    second = UnifiedTrainer(small(tmp_path)).fit()
    assert second.run_dir.name == f"{first.run_dir.name}-2"
    assert f"is finished; this run is {second.run_dir.name}" in (second.run_dir / "log.txt").read_text().splitlines()[0]


def test_three_lines_of_python_train_an_own_agent(tmp_path: Path) -> None:
    async def short_answer(task: Task, model: Model) -> float:
        reply = await model.chat(task.messages, max_tokens=8)
        return 1.0 if len(reply.completion_ids) < 8 else 0.0

    tasks = [Task(id=str(i), instruction=f"Make {i} from 1 2 3.") for i in range(4)]
    result = UnifiedTrainer(small(tmp_path), workflow=short_answer, tasks=tasks).fit()
    assert result.steps == 2
    assert 0.0 <= result.metrics["reward/mean"] <= 1.0


async def test_fit_async_runs_inside_a_running_loop(tmp_path: Path) -> None:
    result = await UnifiedTrainer(small(tmp_path, "--trainer.steps=1")).fit_async()
    assert result.steps == 1


def test_several_updates_per_batch_are_off_policy_and_counted_as_steps(tmp_path: Path) -> None:
    config = small(tmp_path, "--trainer.steps=5", "--trainer.updates_per_batch=2", "--optimizer.lr=1e-3")
    result = UnifiedTrainer(config).fit()
    rows = metrics(result.run_dir)
    assert [row["step"] for row in rows] == [0, 2, 4, 5]  # the last batch has one step left
    assert rows[1]["policy/logprob_gap_max"] > 1e-3  # the second update of a batch is not on-policy
    assert rows[-1]["episodes/trained"] == 3 * 8


def test_supervised_training_lowers_the_loss(tmp_path: Path) -> None:
    config = build_config(
        {
            "run": {"dir": str(tmp_path)},
            "data": {"tasks": "countdown_demonstrations", "args": {"count": 64, "careful": 1.0, "max_number": 3}},
            "algorithm": {"objective": "sft"},
            "optimizer": {"lr": 1e-3},
            "trainer": {"steps": 8, "batch_size": 32},
        }
    )
    result = UnifiedTrainer(config).fit()
    losses = [row["policy/loss"] for row in metrics(result.run_dir) if "policy/loss" in row]
    assert losses[-1] < losses[0]


def test_a_workflow_that_always_fails_ends_the_run_with_its_error(tmp_path: Path) -> None:
    async def broken(task: Task, model: Model) -> float:
        raise RuntimeError("no such tool")

    with pytest.raises(DataError, match=r"^2 groups in a row.*no such tool"):  # one batch, not a hundred groups
        UnifiedTrainer(small(tmp_path), workflow=broken).fit()


def test_a_step_that_teaches_nothing_says_so_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def always_right(task: Task, model: Model) -> float:
        await model.chat(task.messages, max_tokens=1)
        return 1.0

    UnifiedTrainer(small(tmp_path), workflow=always_right).fit()
    assert capsys.readouterr().out.count("nothing was learned") == 1


@pytest.mark.parametrize(
    ("setting", "body", "says"),
    [
        ("loss", "def own(context): return context.logprobs_M.sum()", "must return \\(one value per token"),
        ("loss", "def own(context): return context.logprobs_M.sum(), {}", "got values of shape \\(\\)"),
        ("estimator", "def own(groups, algorithm): return [0.0 for _ in groups]", "one list per group"),
    ],
)
def test_an_own_loss_or_estimator_of_the_wrong_form_is_named(
    tmp_path: Path, setting: str, body: str, says: str
) -> None:
    (tmp_path / "mine.py").write_text(body)
    with pytest.raises(DataError, match=says):
        UnifiedTrainer(small(tmp_path, f"--algorithm.{setting}={tmp_path / 'mine.py'}:own")).fit()


def test_some_failing_episodes_are_counted_and_the_run_continues(tmp_path: Path) -> None:
    calls = 0

    async def shaky(task: Task, model: Model) -> float:
        nonlocal calls
        calls += 1
        if calls % 4 == 0:
            raise RuntimeError("flaky")
        await model.chat(task.messages)
        return float(calls % 2)

    result = UnifiedTrainer(small(tmp_path, "--eval.sets={}", "--eval.every=0"), workflow=shaky).fit()
    last = metrics(result.run_dir)[-1]
    assert last["episodes/failed"] == 4
    assert last["episodes/trained"] == last["episodes/dispatched"] - 4


def test_uniform_groups_are_replaced_until_the_data_cannot(tmp_path: Path) -> None:
    async def always_right(task: Task, model: Model) -> float:
        await model.chat(task.messages, max_tokens=1)
        return 1.0

    with pytest.raises(DataError, match="uniform rewards"):
        UnifiedTrainer(small(tmp_path, "--filters.drop_uniform=true"), workflow=always_right).fit()


def test_two_roles_form_two_groups(tmp_path: Path) -> None:
    async def two_roles(task: Task, model: Model) -> list[Trajectory]:
        await model.chat(task.messages, role="solver", max_tokens=4)
        await model.chat(task.messages, role="critic", max_tokens=4)
        solver, critic = model.trajectories()
        return [Trajectory(solver.steps, "solver", 1.0), Trajectory(critic.steps, "critic", 0.0)]

    result = UnifiedTrainer(small(tmp_path, "--trainer.steps=1"), workflow=two_roles).fit()
    assert result.metrics["batch/rows"] == 16


def test_too_few_tasks_for_a_batch_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="only 4 tasks"):
        UnifiedTrainer(small(tmp_path, "--data.args.count=4", "--trainer.batch_size=8")).fit()


def test_a_signal_to_the_engine_too_finishes_the_step_saves_and_says_how_to_resume(tmp_path: Path) -> None:
    """As systemd and Slurm send it, to every process of the job: the step needs the engine to its end."""
    command = [sys.executable, "-m", "headrace", "train", str(EXAMPLE), "--run-dir", str(tmp_path / "r"),
               "--trainer.steps", "500", "--trainer.batch_size", "2", "--eval.before", "false",
               "--trainer.placement", "separate"]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    rows = tmp_path / "r" / "metrics.jsonl"
    _wait_for(lambda: rows.exists() and rows.stat().st_size > 0, process)
    for pid in (*_children(process.pid), process.pid):
        os.kill(pid, signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "the same command resumes from here" in " ".join(out.split())
    (saved,) = list_checkpoints(tmp_path / "r")
    assert step_of(saved) == metrics(tmp_path / "r")[-1]["step"]
    assert "Traceback" not in err and "restart" not in (tmp_path / "r" / "log.txt").read_text()


def _children(pid: int) -> list[int]:
    threads = Path(f"/proc/{pid}/task").iterdir()
    found = [int(word) for thread in threads for word in (thread / "children").read_text().split()]
    assert found, "there is no engine process"
    return found


def _wait_for(condition: Any, process: subprocess.Popen[str]) -> None:
    for _ in range(1800):
        if condition() or process.poll() is not None:
            return
        time.sleep(0.1)


def test_fit_returns_to_a_clean_event_loop(tmp_path: Path) -> None:
    async def run_and_count() -> int:
        await UnifiedTrainer(small(tmp_path, "--trainer.steps=1")).fit_async()
        return len([task for task in asyncio.all_tasks() if task is not asyncio.current_task()])

    assert asyncio.run(run_and_count()) == 0
