"""The head of the cluster and the controller are lost together; the run resumes from its folder on another cluster."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from headrace import UnifiedTrainer

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.slow

from two_raylets import new_cluster, run_values, synced, two_raylets  # noqa: E402

STEPS = 6


def values(folder: Path, address: Any) -> dict[str, Any]:
    cluster = {"address": address, "learner": {"CPU": 0.5}, "engine": {"CPU": 0.5}, "strategy": "SPREAD"}
    ranks = {"name": "fsdp", "ranks": 2, "threads": 1}
    found = run_values(folder, STEPS, backend=ranks, cluster=cluster, engine={"replicas": 2, "threads": 1})
    found["trainer"]["save_every"] = 2
    return found


def test_a_run_resumes_with_the_same_bits_when_head_and_controller_are_lost(tmp_path: Path) -> None:
    lost = new_cluster()
    controller = start(values(tmp_path / "hit", lost.address), tmp_path)
    try:
        wait_for_step(tmp_path / "hit" / "run", 3, controller)
        head: Any = lost.head_node
        head.kill_gcs_server()
        head.kill_raylet()
    finally:
        controller.kill()
        controller.wait()
        lost.shutdown()
    with two_raylets() as nodes:
        resumed = UnifiedTrainer(values(tmp_path / "hit", nodes.address)).fit()
        calm = UnifiedTrainer(values(tmp_path / "calm", nodes.address)).fit()
        assert resumed.steps == calm.steps == STEPS
        assert synced(resumed.run_dir, STEPS) == synced(calm.run_dir, STEPS)


def start(given: dict[str, Any], folder: Path) -> subprocess.Popen[bytes]:
    program = "import json, sys, headrace; headrace.UnifiedTrainer(json.load(open(sys.argv[1]))).fit()"
    file = folder / "run.json"
    file.write_text(json.dumps(given))
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}
    return subprocess.Popen([sys.executable, "-c", program, str(file)], env=environment)


def wait_for_step(folder: Path, step: int, controller: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + 300
    while True:
        assert controller.poll() is None and time.monotonic() < end
        metrics = folder / "metrics.jsonl"
        if metrics.is_file() and any(f'"step": {step}' in line for line in metrics.read_text().splitlines()):
            return
        time.sleep(0.05)
