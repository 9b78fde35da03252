"""Whole runs on disks that fill up or cannot be written, with clocks that jump, and with a rival: a clear error,
nothing damaged, and the run is gone on with as if nothing had happened."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import crash_scenarios
from crash_checks import check_run, check_same
from crash_scenarios import TASKS, config_of
from headrace import UnifiedTrainer, registry
from headrace.errors import LedgerError
from headrace.ledger import ledger as ledger_module
from headrace.ledger.files import connect_writer
from headrace.trainer.callbacks import Callback, Metrics, TrainerHandle

TESTS = Path(__file__).parents[1]
SCENARIO = "null_synchronous"


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing happened to."""
    run_dir = tmp_path_factory.mktemp("reference") / "run"
    crash_scenarios.train(SCENARIO, run_dir)
    return run_dir


def check_gone_on_with(run_dir: Path, reference: Path) -> None:
    crash_scenarios.train(SCENARIO, run_dir)
    check_run(run_dir, TASKS)
    check_same(run_dir, reference)


class At(Callback):
    """Does something after a step."""

    def __init__(self, step: int, act: Callable[[], object]) -> None:
        self._step, self._act = step, act

    def on_train_start(self, trainer: TrainerHandle) -> None: ...

    def on_batch_end(self, step: int, metrics: Metrics) -> None:
        if step == self._step:
            self._act()


def train_with(run_dir: Path, callback: Callback) -> None:
    registry.register("backend", "null", crash_scenarios.RememberingNull(lambda seed: seed % 5 / 2000, 0.001))
    UnifiedTrainer(config_of(SCENARIO, run_dir), callbacks=[callback]).fit()


# ---- disks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pages", [24, 28, 33])
def test_a_ledger_that_cannot_grow_ends_the_run_which_resumes_when_it_can(
    tmp_path: Path, reference: Path, monkeypatch: pytest.MonkeyPatch, pages: int
) -> None:
    def connect(path: Path) -> sqlite3.Connection:
        connection = connect_writer(path)
        connection.execute(f"PRAGMA max_page_count = {pages}")
        return connection

    with monkeypatch.context() as patch:
        patch.setattr(ledger_module, "connect_writer", connect)
        for _ in range(2):  # and again, while it is still full
            with pytest.raises(LedgerError, match=r"cannot write the ledger .*full; free some space and run the same"):
                crash_scenarios.train(SCENARIO, tmp_path / "run")
    check_gone_on_with(tmp_path / "run", reference)


IN_NAMESPACE = """
import sys
sys.path.insert(0, "trainer")
from pathlib import Path
import subprocess
import crash_scenarios
from headrace.errors import HeadraceError
from test_adversity import At, check_gone_on_with, train_with
disk, reference, at_step, spoil, mend = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:]
do = lambda command: subprocess.run(command.format(disk=disk), shell=True, check=True)
try:
    train_with(disk / "run", At(at_step, lambda: do(spoil)))
except HeadraceError as error:
    print(f"{type(error).__name__}: {error}", file=sys.stderr)
do(mend)
check_gone_on_with(disk / "run", reference)
"""


@pytest.mark.parametrize("at_step", [1, 2, 3])
@pytest.mark.parametrize(
    ("spoil", "mend", "says"),
    [
        ("head -c 20m /dev/zero > {disk}/other; true", "rm {disk}/other", ("disk is full", "No space left on device")),
        ("mount --bind {disk} {disk} && mount -o remount,ro,bind {disk}", "umount {disk}", ("Read-only file system",)),
    ],
    ids=["full", "read-only"],
)
def test_a_disk_that_fails_in_the_midst_of_a_run(
    tmp_path: Path, reference: Path, at_step: int, spoil: str, mend: str, says: tuple[str, ...]
) -> None:
    """A real one, of ten megabytes, where one may be mounted."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = f"mount -t tmpfs -o size=10m tmpfs {disk}"
    if subprocess.run(["unshare", "-rm", "sh", "-c", mount], capture_output=True, check=False).returncode:
        pytest.skip("mounting is not allowed here")
    command = f'{mount} && exec {sys.executable} -W ignore - "$@"'
    words = [str(disk), str(reference), str(at_step), spoil, mend]
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", command, "sh", *words],
        input=IN_NAMESPACE, cwd=TESTS, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    errors = [line for line in done.stderr.splitlines() if line.startswith(("LedgerError: ", "CheckpointError: "))]
    assert len(errors) == 1 and any(words in errors[0] for words in says), done.stderr[-3000:]


# ---- clocks ----------------------------------------------------------------------------------------------------------


def test_a_clock_that_jumps_changes_nothing(tmp_path: Path, reference: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, jumps = time.time, iter(range(10**6))

    def jumping() -> float:
        return real() + (-1) ** (number := next(jumps)) * 86400.0 * (number % 400)

    def crash() -> None:
        raise ConnectionError("the machine is gone")

    monkeypatch.setattr(time, "time", jumping)
    with pytest.raises(ConnectionError):
        train_with(tmp_path / "run", At(3, crash))
    monkeypatch.setattr(time, "time", lambda: real() - 86400.0 * 3650)  # ten years back
    check_gone_on_with(tmp_path / "run", reference)


# ---- two at once -----------------------------------------------------------------------------------------------------


def test_a_second_process_is_refused_and_the_first_continues(tmp_path: Path, reference: Path) -> None:
    said: list[str] = []

    def rival() -> None:
        folder = str(tmp_path / "run")
        code = f"from pathlib import Path; import crash_scenarios as c; c.train({SCENARIO!r}, Path({folder!r}))"
        done = subprocess.run([sys.executable, "-c", code], cwd=TESTS, capture_output=True, text=True, check=False)
        said.append(done.stderr.splitlines()[-1])

    train_with(tmp_path / "run", At(2, rival))
    assert f"is in use by process {os.getpid()}" in said[0] and "choose another folder with --run-dir" in said[0]
    check_run(tmp_path / "run", TASKS)
    check_same(tmp_path / "run", reference)
