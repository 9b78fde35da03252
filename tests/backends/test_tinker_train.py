"""Whole runs through the Tinker API: in step, ahead, every objective, and from where another run ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tinker_equality import tinker_server

from fakes import ROOT
from headrace.cli.main import run as run_command
from headrace.ledger import LedgerReader

SMALL = [
    "--trainer.batch_size=2", "--rollout.max_tokens=8", "--rollout.group_size=2", "--eval.before=false",
    "--data.args.count=16", "--eval.sets.countdown.limit=2", "--tinker.rank=4", "--trainer.steps=2",
    "--filters.drop_uniform=false",
]  # fmt: skip


pytestmark = pytest.mark.usefixtures("through_tinker")


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the run files say that they are started."""
    monkeypatch.chdir(ROOT)


def train(folder: Path, *more: str) -> list[dict[str, float]]:
    words = ["train", "examples/countdown_tinker.toml", *SMALL, f"--run-dir={folder}", *more]
    assert run_command(words) == 0
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    "more",
    [
        (),
        ("--trainer.stream=false",),
        ("--trainer.max_staleness=2",),
        ("--trainer.max_staleness=1", "--tinker.segment_tokens=3", "--engine.cache_on_publish=recompute"),
        ("--trainer.updates_per_batch=2", "--algorithm.proximal=recompute"),
        ("--algorithm.kl.coef=0.1",),
        ("--tinker.vocabulary=511", "--algorithm.entropy_coef=0.01", "--rollout.temperature=0.8"),
        ("--algorithm.estimator=distill",),
    ],
    ids=" ".join,
)
def test_a_run_trains_through_the_service(more: tuple[str, ...], tmp_path: Path) -> None:
    rows = train(tmp_path / "run", *more)
    last = rows[-1]
    assert last["step"] == 2 and last["policy/grad_norm"] >= 0 and last["tokens/trained"] > 0
    assert last["eval/countdown/failed"] == 0 and last["episodes/failed"] == 0
    assert abs(rows[0]["policy/kl_to_sampler"]) < 1e-4


@pytest.mark.parametrize(
    ("command", "file", "more"),
    [
        ("train", "countdown_dpo", ("--trainer.batch_size=4", "--rollout.max_tokens=60")),
        ("sft", "countdown_sft", ("--trainer.batch_size=2",)),
    ],
)
def test_every_objective_trains_through_the_service(
    command: str, file: str, more: tuple[str, ...], tmp_path: Path
) -> None:
    words = [f"--run-dir={tmp_path / 'run'}", "--backend.name=tinker", "--tinker.rank=4", "--trainer.steps=1"]
    words += ["--eval.before=false", "--data.args.count=16", "--eval.sets.countdown.limit=2", *more]
    assert run_command([command, f"examples/{file}.toml", *words]) == 0
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["tokens/trained"] > 0 and last["policy/grad_norm"] > 0


def test_a_run_resumes_from_where_another_ended(tmp_path: Path) -> None:
    train(tmp_path / "first")
    (state,) = (tmp_path / "first").rglob("tinker.json")
    assert json.loads(state.read_text())["updates"] == 2
    train(tmp_path / "second", f"--run.resume={tmp_path / 'first'}", "--trainer.steps=4")
    states = [json.loads(path.read_text()) for path in sorted((tmp_path / "second").rglob("tinker.json"))]
    assert states[-1]["updates"] > 2


def test_a_checkpoint_can_be_evaluated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tmp_path / "run")
    assert run_command(["eval", str(tmp_path / "run")]) == 0
    assert "countdown" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 2])
def test_a_server_that_is_killed_and_started_again_loses_nothing(staleness: int, tmp_path: Path) -> None:
    run, states = tmp_path / "run", tmp_path / "server"
    more = (
        f"--trainer.max_staleness={staleness}",
        "--trainer.steps=8",
        "--trainer.save_every=2",
        "--data.args.count=64",
    )
    with tinker_server(states) as address:
        words = ["train", "examples/countdown_tinker.toml", *SMALL, f"--run-dir={run}", f"--tinker.base_url={address}"]
        training = subprocess.Popen([sys.executable, "-m", "headrace", *words, *more])
        _wait_for(lambda: (run / "metrics.jsonl").exists() and len(steps_told(run)) >= 4, training)
        os.kill(_server_of(address), signal.SIGKILL)
    with tinker_server(states) as address:
        # the address is another, so the run cannot find its session; with the same one it is told that it is gone
        training.terminate()
        training.wait(60)
        assert run_command([*words[:2], *SMALL, f"--run-dir={run}", *more, f"--tinker.base_url={address}"]) == 0
    assert steps_told(run) == list(range(1, 9))
    with LedgerReader.read(run) as reader:
        account = reader.account()
        assert account.trained == 8 * 2 * 2 and account.failed == account.filtered == 0


def steps_told(run: Path) -> list[int]:
    return [row["step"] for row in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()) if row["step"]]


def _wait_for(condition: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    for _ in range(1200):
        if condition():
            return
        assert process.poll() is None, "the run ended too early"
        time.sleep(0.1)
    raise AssertionError("it took too long")


def _server_of(address: str) -> int:
    """Its process id, by the port in its command."""
    port = address.rsplit(":", 1)[1]
    for folder in Path("/proc").glob("[0-9]*"):
        words = (folder / "cmdline").read_bytes().split(b"\0")
        if b"serve" in words and port.encode() in words:
            return int(folder.name)
    raise AssertionError("there is no such server")
