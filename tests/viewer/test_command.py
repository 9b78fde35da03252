"""`headrace view` and `headrace train --view` as commands: what they print, how they end."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx2
import pytest
from made_runs import finished_run

HEADRACE = (sys.executable, "-m", "headrace")
URL = re.compile(r"http://127\.0\.0\.1:\d+")


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_the_viewer_ends_when_it_is_asked_to_though_a_browser_is_listening(tmp_path: Path, how: signal.Signals) -> None:
    finished_run(tmp_path / "finished")
    command = [*HEADRACE, "view", str(tmp_path), "--port", "0", "--no-browser"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as viewer:
        assert viewer.stdout is not None
        found = URL.search(line := viewer.stdout.readline())
        assert found, line
        with httpx2.stream("GET", f"{found[0]}/api/runs/finished/events", timeout=20) as events:
            assert next(events.iter_lines()) == "event: change"
            viewer.send_signal(how)
            assert viewer.wait(20) == 0
        assert viewer.stdout.read() == "stopped\n"


def test_a_viewer_beside_the_run_ends_with_it(tmp_path: Path) -> None:
    run = f"""
        [run]
        dir = "{tmp_path}"
        name = "seen"
        [data]
        tasks = "countdown"
        args = {{ count = 2 }}
        [workflow]
        name = "single_turn"
        judger = "countdown"
        [rollout]
        group_size = 2
        max_tokens = 8
        [trainer]
        steps = 1
        batch_size = 2
        """
    (tmp_path / "run.toml").write_text(run)
    command = [*HEADRACE, "train", str(tmp_path / "run.toml"), "--view"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    found = URL.search(done.stdout)
    assert found and "watch it at" in done.stdout
    with pytest.raises(httpx2.ConnectError):
        httpx2.get(found[0])
