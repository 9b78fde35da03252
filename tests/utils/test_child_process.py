"""A program that Headrace runs ends with Headrace, whoever is killed, in whatever order."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from headrace.utils.child_process import ChildProcess
from headrace.utils.reaper import descendants
from stubborn_program import left, started, stubborn

PARENT = """
import sys, time
from pathlib import Path
from headrace.utils.child_process import ChildProcess
folder = Path(sys.argv[1])
child = ChildProcess(sys.argv[2:], {}, folder / "log")
(folder / "new").write_text(str(child.pid))
(folder / "new").rename(folder / "watcher")
time.sleep(600)
"""
Kill = Callable[[str, float], list[int]]


@pytest.fixture
def kill(tmp_path: Path) -> Iterator[Kill]:
    """Kills processes in this order, and says which processes of the program are left."""
    pids = tmp_path / "pids"
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path), *stubborn(pids)])
    program = started(pids)
    (outer,) = started(tmp_path / "watcher")
    named = {"parent": parent.pid, "outer": outer, "inner": descendants(outer)[0]}
    assert descendants(outer)[1:] == program

    def in_order(names: str, limit_s: float) -> list[int]:
        for name in names.split():
            with suppress(ProcessLookupError):  # an earlier kill ended it
                os.kill(named[name], signal.SIGKILL)
        return left([*program, outer, named["inner"]], limit_s)

    yield in_order
    for pid in (parent.pid, *left(program, 0)):
        os.kill(pid, signal.SIGKILL)
    parent.wait()


@pytest.mark.parametrize("names", ["parent", "outer", "inner", "parent outer", "outer parent", "parent inner",
                                   "inner parent"])  # fmt: skip
def test_everything_ends_whoever_is_killed(kill: Kill, names: str) -> None:
    assert kill(names, 5.0) == []


@pytest.mark.parametrize("names", ["inner outer", "outer inner", "parent outer inner"])
def test_the_program_itself_ends_even_without_anybody_to_watch(kill: Kill, names: str) -> None:
    """Its children may be left if all that watch are killed within a millisecond."""
    assert len(kill(names, 0.5)) <= 1


def test_a_program_is_ended_with_its_children(tmp_path: Path) -> None:
    child = ChildProcess(stubborn(tmp_path / "pids"), {}, tmp_path / "log")
    program = started(tmp_path / "pids")
    assert child.descendants() == program and child.exit_code() is None
    assert child.end() == -signal.SIGKILL and left(program, 0) == []


@pytest.mark.parametrize(("ending", "code"), [("sys.exit(3)", 3), ("os.kill(os.getpid(), 15)", -15)])
def test_how_a_program_ended_is_known_and_its_children_end_with_it(tmp_path: Path, ending: str, code: int) -> None:
    program = stubborn(tmp_path / "pids")[2].replace(
        "time.sleep(600)\n", f"signal.signal(15, signal.SIG_DFL)\n{ending}"
    )
    child = ChildProcess([sys.executable, "-c", program, str(tmp_path / "pids")], {}, tmp_path / "log")
    assert child._process.wait(30) is not None and child.exit_code() == code
    assert left(started(tmp_path / "pids"), 0) == []


def test_what_cannot_be_started_ends_at_once(tmp_path: Path) -> None:
    child = ChildProcess([str(tmp_path / "nothing")], {}, tmp_path / "log")
    assert child._process.wait(30) == 1 and "No such file" in child.last_output()


def test_the_error_that_began_it_is_known_however_much_follows_and_none_of_an_earlier_program(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("ValueError: of an earlier program\n")
    began = "(Worker pid=7) ERROR 11-19 22:36:40 [executor.py:10] ValueError: 0.6 GiB is less than requested"
    program = f"import sys; sys.stderr.write({began!r} + '\\n  File x' * 100 + '\\n'); raise RuntimeError('see above')"
    child = ChildProcess([sys.executable, "-c", program], {}, tmp_path / "log")
    assert child._process.wait(30) == 1
    assert child.last_errors() == "ValueError: 0.6 GiB is less than requested\nRuntimeError: see above"
    silent = ChildProcess([sys.executable, "-c", "print('no more')"], {}, tmp_path / "log")
    assert silent._process.wait(30) == 0 and silent.last_errors() == "no more"
