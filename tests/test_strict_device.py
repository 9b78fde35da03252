"""The suites of tests/strict_device, each in a process of its own: the device that they register stays registered."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SUITES = sorted((Path(__file__).parent / "strict_device").glob("strict_*.py"))


@pytest.mark.parametrize("suite", SUITES, ids=lambda path: path.stem)
def test_on_the_strict_device(suite: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(suite)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
