"""A reader that leaves (`| head`), a full disk behind `>`, and Ctrl-C: one line at most, a code, no traceback."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from headrace.tracking.base import TrackerSet
from headrace.tracking.console import ConsoleTracker
from headrace.tracking.terminal import Console
from headrace.utils.interrupts import interruptible, on_interrupt

TALKATIVE = {
    "help": ["--help"],
    "help of a command": ["simulate", "--help"],
    "rich tables": ["algorithms"],
    "plain lines": ["train", "RUN", "--dry-run"],
    "JSON": ["data", "inspect", "countdown", "--json"],
}


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text('[run]\nname = "try"\n[workflow]\njudger = "countdown"\n[data]\ntasks = "countdown"\n')
    return path


def headrace(words: list[str], run_file: Path, output: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "headrace", *(str(run_file) if word == "RUN" else word for word in words)]
    return subprocess.run(command, stdout=output, stderr=subprocess.PIPE, text=True, check=False)


@pytest.mark.parametrize("words", TALKATIVE.values(), ids=list(TALKATIVE))
def test_a_reader_that_has_left_is_no_error(words: list[str], run_file: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = headrace(words, run_file, writing)
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_output_that_cannot_be_written_is_one_line() -> None:
    with Path("/dev/full").open("w") as full:
        done = headrace(["algorithms"], Path(), full.fileno())
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1 and "No space left" in done.stderr


def test_a_run_continues_when_nobody_reads_its_lines_any_more() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as output:
        trackers = TrackerSet({"console": ConsoleTracker(Console(file=output))})
        with pytest.warns(RuntimeWarning, match="nobody reads"):
            trackers.log(1, {"reward/mean": 0.5})
        trackers.log(2, {"reward/mean": 0.5})
        os.dup2(os.open(os.devnull, os.O_WRONLY), output.fileno())  # what is left in its buffer


# ---- Ctrl-C ----------------------------------------------------------------------------------------------------------


def interrupt_soon(seconds: float = 0.05) -> None:
    signal.setitimer(signal.ITIMER_REAL, seconds)


@pytest.fixture
def alarm_interrupts(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A SIGALRM is a Ctrl-C; handlers are as they were afterwards."""
    before = signal.getsignal(signal.SIGALRM), signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before[0])
    signal.signal(signal.SIGINT, before[1])


def test_an_interrupt_lets_async_work_clean_up(alarm_interrupts: None) -> None:
    cleaned: list[bool] = []

    async def work() -> None:
        try:
            interrupt_soon()
            await asyncio.sleep(30)
        finally:
            await asyncio.sleep(0)
            cleaned.append(True)

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(interruptible(work()))
    assert cleaned == [True]


def test_a_second_interrupt_comes_through_a_loop_that_user_code_blocks(alarm_interrupts: None) -> None:
    async def work() -> None:
        with on_interrupt(lambda: None):
            signal.raise_signal(signal.SIGINT)
            interrupt_soon()
            time.sleep(5)  # noqa: ASYNC251  that is the point

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(work())
    assert time.monotonic() - began < 3


STUBBORN = """
import sys, threading, time
from headrace.cli.main import app, main
def stubborn():
    try:
        print("ready", flush=True)
        time.sleep(30)
    finally:
        print("cleaning", flush=True)
        time.sleep(30 if {cleans_slowly} else 0)
app.command(stubborn)
threading.Thread(target=time.sleep, args=(20,)).start()  # one that an ordinary exit would wait for
sys.argv = ["headrace", "stubborn"]
main()
"""


@pytest.mark.parametrize(("cleans_slowly", "says"), [(False, "interrupted"), (True, "aborted")])
def test_one_interrupt_cleans_up_and_two_end_it_at_once(cleans_slowly: bool, says: str) -> None:
    code = STUBBORN.format(cleans_slowly=cleans_slowly)
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for _ in range(2 if cleans_slowly else 1):
            process.stdout.readline()
            process.send_signal(signal.SIGINT)
        began = time.monotonic()
        _, errors = process.communicate(timeout=15)
    assert process.returncode == 130 and time.monotonic() - began < 10
    assert errors.split() == [says]
