"""SIGTERM to a run whose ranks are on Ray: Ray's own handler would end the process three seconds later."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("ray")
pytestmark = pytest.mark.slow

WORKFLOW = """
import asyncio
from pathlib import Path

async def slow(task, model):
    reply = await model.chat(task.messages, max_tokens=4)
    Path({begun!r}).touch()
    await asyncio.sleep(10)
    return float(len(reply.text) % 3)
"""


def test_a_run_with_ranks_on_ray_finishes_its_step_and_saves(tmp_path: Path) -> None:
    begun, workflow = tmp_path / "begun", tmp_path / "slow.py"
    workflow.write_text(WORKFLOW.format(begun=str(begun)))
    command = [
        sys.executable, "-m", "headrace", "train", "examples/countdown.toml", "benchmarks/two_raylets.toml",
        "--cluster.address=local", "--cluster.strategy=PACK", f"--run.dir={tmp_path}", "--run.name=run",
        f"--workflow.name={workflow}:slow", "--workflow.judger=", "--eval.sets={}", "--eval.every=0",
        "--rollout.group_size=2", "--trainer.batch_size=1", "--track.plot=false",
    ]  # fmt: skip
    environment = os.environ | {"RAY_USAGE_STATS_ENABLED": "0"}
    process = subprocess.Popen(
        command, cwd=Path(__file__).parents[2], env=environment, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        end = time.monotonic() + 240
        while not begun.exists():
            assert process.poll() is None and time.monotonic() < end
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        printed, _ = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 130 and "stopped     after step 1 of" in printed, printed
    assert "SIGTERM received" not in printed
    assert (tmp_path / "run" / "checkpoints" / "step_000001").is_dir()
