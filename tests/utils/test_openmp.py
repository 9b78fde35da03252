"""How OpenMP's threads wait is settled before torch is loaded, in every process, and never against the user."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from headrace.utils.openmp import SPINS, unchanged_environment

SCRIPT = "import headrace, os, sys; print(os.environ.get('GOMP_SPINCOUNT'), 'torch' in sys.modules)"


@pytest.mark.parametrize(
    ("chosen", "found"),
    [
        ({}, SPINS),
        ({"GOMP_SPINCOUNT": "7"}, "7"),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, "None"),
        ({"OMP_WAIT_POLICY": "PASSIVE"}, "None"),
    ],
)
def test_importing_headrace_bounds_the_wait_unless_the_user_has_chosen(chosen: dict[str, str], found: str) -> None:
    plain = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=plain | chosen, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [found, "False"]


def test_programs_of_others_get_the_environment_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOMP_SPINCOUNT", SPINS)
    assert "GOMP_SPINCOUNT" not in unchanged_environment() and unchanged_environment()["PATH"] == os.environ["PATH"]
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    assert unchanged_environment()["GOMP_SPINCOUNT"] == "7"
