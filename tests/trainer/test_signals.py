"""Ctrl-C and SIGTERM, as a terminal, systemd and Slurm send them: to every process of a run at once."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from fakes import ROOT
from headrace.data.task import Task
from headrace.rollout.model_client import Model
from headrace.run.checkpoint import list_checkpoints, step_of
from headrace.utils.interrupts import STOP, on_interrupt
from null_backend import scattered

PATHS = os.pathsep.join(str(ROOT / folder) for folder in ("src", "tests", "tests/trainer"))

FILE = """
[backend]
name = "null_backend:NullBackend"
[engine]
name = "null_backend:NULL_ENGINE"
[data]
tasks = "null_backend:some_tasks"
[workflow]
name = "test_signals:{workflow}"
[rollout]
group_size = 2
max_tokens = 8
[trainer]
steps = 2000
batch_size = 3
[track]
trackers = ["jsonl"]
plot = false
"""


async def slow(task: Task, model: Model) -> float:
    await asyncio.sleep(0.01)
    return await scattered(task, model)


async def hanging(task: Task, model: Model) -> float:
    if os.path.exists("hang"):  # noqa: ASYNC240
        print("hangs", flush=True)
        await asyncio.sleep(600)
    return await slow(task, model)


async def hangs_in_evaluations(task: Task, model: Model) -> float:
    return await (slow if model.training else hanging)(task, model)


async def blocking(task: Task, model: Model) -> float:
    """Blocks the event loop, and swallows whatever would end it."""
    if os.path.exists("hang"):  # noqa: ASYNC240
        print("hangs", flush=True)
        while True:
            with suppress(BaseException):
                time.sleep(600)  # noqa: ASYNC251
    return await slow(task, model)


Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """`headrace train` in a process group of its own, which is gone at the end of the test."""
    with ExitStack() as held:

        def start(*words: str, workflow: str = "slow", before: Callable[[], Any] | None = None) -> Any:
            (tmp_path / "run.toml").write_text(FILE.format(workflow=workflow))
            command = [sys.executable, "-m", "headrace", "train", "run.toml", "--run-dir", "r", *words]
            settings = os.environ | {"PYTHONPATH": PATHS, "OMP_NUM_THREADS": "1"}
            process = subprocess.Popen(
                command, cwd=tmp_path, env=settings, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                start_new_session=True, preexec_fn=before,
            )  # fmt: skip
            held.callback(process.communicate)
            held.callback(process.kill)
            return process

        yield start


def steps(folder: Path) -> list[int]:
    path = folder / "r" / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line)["step"] for line in lines if line.endswith("}")]


def wait_for(ready: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    until = time.monotonic() + 60
    while not ready():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.02)


@pytest.mark.parametrize("number", STOP)
def test_a_signal_to_the_group_finishes_the_step_and_saves_and_the_run_continues(
    tmp_path: Path, start: Start, number: signal.Signals
) -> None:
    process = start()
    wait_for(lambda: len(steps(tmp_path)) >= 2, process)
    os.killpg(process.pid, number)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130 and "Traceback" not in err, err
    assert "the same command resumes from here" in " ".join(out.split())
    (saved,) = [step_of(folder) for folder in list_checkpoints(tmp_path / "r")]
    assert saved == steps(tmp_path)[-1]
    assert "a second Ctrl-C or SIGTERM aborts" in (tmp_path / "r" / "log.txt").read_text()
    if number == signal.SIGINT:
        return
    again = start()
    wait_for(lambda: steps(tmp_path)[-1] >= saved + 2, again)
    again.kill()
    again.communicate()
    assert steps(tmp_path) == list(range(1, steps(tmp_path)[-1] + 1))


def test_sigterm_saves_where_ctrl_c_is_ignored_as_in_the_background_of_a_script(tmp_path: Path, start: Start) -> None:
    process = start(before=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN))
    wait_for(lambda: len(steps(tmp_path)) >= 2, process)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    assert list_checkpoints(tmp_path / "r")


@pytest.mark.parametrize("number", STOP)
def test_a_second_signal_aborts_at_once(tmp_path: Path, start: Start, number: signal.Signals) -> None:
    process = start(workflow="hanging")
    wait_for(lambda: len(steps(tmp_path)) >= 2, process)
    (tmp_path / "hang").touch()
    assert process.stdout is not None and process.stdout.readline() == "hangs\n"
    os.killpg(process.pid, signal.SIGTERM)
    wait_for(lambda: "SIGTERM aborts" in (tmp_path / "r" / "log.txt").read_text(), process)
    time.sleep(0.2)
    assert process.poll() is None  # it waits for the step
    os.killpg(process.pid, number)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130 and "aborted" in err and "Traceback" not in err, err


def test_one_signal_is_enough_though_user_code_blocks_the_loop_and_swallows_interruptions(
    tmp_path: Path, start: Start
) -> None:
    process = start(workflow="blocking")
    wait_for(lambda: len(steps(tmp_path)) >= 2, process)
    (tmp_path / "hang").touch()
    assert process.stdout is not None and process.stdout.readline() == "hangs\n"
    os.killpg(process.pid, signal.SIGTERM)
    _, err = process.communicate(timeout=40)
    assert process.returncode == 130 and "since the stop signal" in err and "Traceback" not in err, err


def test_a_step_that_waits_longer_than_the_grace_period_is_given_up_and_the_run_resumes(
    tmp_path: Path, start: Start
) -> None:
    process = start("--run.grace_s", "0.5", workflow="hanging")
    wait_for(lambda: len(steps(tmp_path)) >= 2, process)
    (tmp_path / "hang").touch()
    assert process.stdout is not None and process.stdout.readline() == "hangs\n"
    os.killpg(process.pid, signal.SIGTERM)
    began = time.monotonic()
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130 and "Traceback" not in err, err
    assert 0.4 < time.monotonic() - began < 15  # of 600 that the step would take
    assert "run.grace_s = 0.5 s are over" in (tmp_path / "r" / "log.txt").read_text()
    made = steps(tmp_path)
    assert [step_of(folder) for folder in list_checkpoints(tmp_path / "r")] == made[-1:]
    (tmp_path / "hang").unlink()
    again = start(workflow="hanging")
    wait_for(lambda: steps(tmp_path)[-1] >= made[-1] + 2, again)
    again.kill()
    again.communicate()
    assert steps(tmp_path) == list(range(1, steps(tmp_path)[-1] + 1))
    last = json.loads((tmp_path / "r" / "metrics.jsonl").read_text().splitlines()[-1])
    ends = ("trained", "filtered", "failed", "stale", "pending")
    assert last["episodes/dispatched"] == sum(last[f"episodes/{end}"] for end in ends)
    assert last["episodes/failed"] == 0 and last["episodes/trained"] + last["episodes/filtered"] >= 6 * last["step"]


@pytest.mark.parametrize(("every", "last"), [(3, 2000), (0, 3)])
def test_an_evaluation_is_given_up_at_a_signal_and_made_when_the_run_is_resumed(
    tmp_path: Path, start: Start, every: int, last: int
) -> None:
    own = ["--eval.every", str(every), "--eval.before", "false", "--trainer.steps", str(last)]
    own += ["--eval.sets.own.tasks", "null_backend:some_tasks", "--eval.sets.own.args.count", "4"]

    def evaluated() -> list[tuple[int, float]]:
        rows = [json.loads(line) for line in (tmp_path / "r" / "metrics.jsonl").read_text().splitlines()]
        return [(row["step"], row["eval/step"]) for row in rows if "eval/own/pass@1" in row]

    process = start(*own, workflow="hangs_in_evaluations")
    (tmp_path / "hang").touch()
    assert process.stdout is not None and "hangs\n" in iter(process.stdout.readline, "")
    process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130 and "Traceback" not in err, err
    assert time.monotonic() - began < 15  # of 600 that the evaluation would take
    assert "stopping without this evaluation" in (tmp_path / "r" / "log.txt").read_text()
    assert steps(tmp_path) == [1, 2, 3] and evaluated() == []
    assert [step_of(folder) for folder in list_checkpoints(tmp_path / "r")] == [3]
    (tmp_path / "hang").unlink()
    again = start(*own, workflow="hangs_in_evaluations")
    if every:
        wait_for(lambda: steps(tmp_path)[-1] >= 7, again)
        again.kill()
    out, err = again.communicate(timeout=30)
    assert evaluated()[:2] == ([(3, 3.0), (6, 6.0)] if every else [(3, 3.0)]), (out, err)
    assert every or (again.returncode == 0 and steps(tmp_path) == [1, 2, 3, 3])


def test_a_run_is_saved_by_time_and_a_kill_costs_no_more(tmp_path: Path, start: Start) -> None:
    process = start("--trainer.save_every_s", "0.3")
    wait_for(lambda: len(list_checkpoints(tmp_path / "r")) >= 2, process)
    process.kill()
    process.communicate()
    saved = [step_of(folder) for folder in list_checkpoints(tmp_path / "r")]
    assert 1 <= len(saved) <= 3 and saved[-1] <= steps(tmp_path)[-1]


@pytest.mark.parametrize("number", STOP)
def test_the_second_signal_raises_and_without_one_all_is_as_before(number: signal.Signals) -> None:
    before = [signal.getsignal(one) for one in STOP]

    async def signalled(really: bool) -> bool:
        came = asyncio.Event()
        with on_interrupt(came.set):
            if really:
                signal.raise_signal(signal.SIGTERM)
                await came.wait()
                with pytest.raises(KeyboardInterrupt):
                    signal.raise_signal(number)
        return came.is_set()

    assert not asyncio.run(signalled(False))
    assert [signal.getsignal(one) for one in STOP] == before
    try:
        assert asyncio.run(signalled(True))
    finally:
        for one, handler in zip(STOP, before, strict=True):
            signal.signal(one, handler)
