"""A sign of life: live on a terminal, and lines that grow rarer anywhere else."""

from __future__ import annotations

import asyncio
import io
import threading
import time
from pathlib import Path

import pytest
from rich.console import Console as RichConsole

from headrace.tracking.base import RunInfo
from headrace.tracking.console import ConsoleTracker
from headrace.tracking.terminal import Pulse, working
from headrace.utils.threads import run_in_thread


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def spoken(pulse: Pulse, clock: Clock, until_s: int) -> list[tuple[int, str]]:
    found: list[tuple[int, str]] = []
    while clock.now_s < until_s:
        clock.now_s += 1
        if line := pulse.line():
            found.append((int(clock.now_s), line))
    return found


@pytest.fixture
def still(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pulse's thread does nothing: the tests ask for its lines."""
    monkeypatch.setattr(Pulse, "_run", lambda self: None)


def test_silence_is_broken_after_seconds_and_then_more_and_more_rarely(still: None) -> None:
    clock = Clock()
    pulse = Pulse(print, clock)
    pulse.doing("loading")
    found = spoken(pulse, clock, 200)
    assert [at for at, _ in found] == [5, 15, 35, 75, 135, 195]
    assert found[1][1] == "loading (15 s)"


def test_other_lines_put_the_sign_of_life_off_and_a_function_is_asked_each_time(still: None) -> None:
    clock, done = Clock(), 0
    pulse = Pulse(print, clock)
    pulse.doing(lambda: f"{done} of 9 episodes")
    assert spoken(pulse, clock, 4) == []
    pulse.spoke()
    assert spoken(pulse, clock, 8) == []
    done = 3
    assert spoken(pulse, clock, 9) == [(9, "3 of 9 episodes (9 s)")]


def test_a_run_without_a_terminal_says_what_takes_so_long_before_its_first_step(still: None) -> None:
    clock, out = Clock(), io.StringIO()
    tracker = ConsoleTracker(RichConsole(file=out), clock=clock)
    tracker.progress("loading the model")
    clock.now_s = 6.0
    assert tracker._pulse.line() == "loading the model (6 s)"
    tracker.log(0, {"eval/dev/pass@1": 0.25})
    assert out.getvalue() == "before training  eval dev 0.250\n"
    tracker.close()


def test_the_live_view_shows_what_is_done_before_and_during_the_run(tmp_path: Path) -> None:
    out = io.StringIO()
    tracker = ConsoleTracker(RichConsole(file=out, force_terminal=True, width=90), live=True)
    tracker.progress("loading the model")
    tracker._live.refresh()  # pyright: ignore[reportOptionalMemberAccess]
    assert "loading the model" in out.getvalue() and "╭" not in out.getvalue()
    tracker.start(RunInfo("demo", tmp_path, 3, {}))
    tracker.progress(lambda: "step 1/3: 2 of 8 groups complete")
    tracker.log(1, {"reward/mean": 0.5})
    assert "2 of 8 groups complete" in out.getvalue()
    tracker.close()


def test_a_command_without_a_terminal_says_what_it_does(capsys: pytest.CaptureFixture[str]) -> None:
    pulse = Pulse(print, waits_s=(0.05, 60.0))
    pulse.doing("reading")
    deadline = time.monotonic() + 10
    while not (said := capsys.readouterr().out) and time.monotonic() < deadline:
        time.sleep(0.01)
    pulse.close()
    assert said == "reading (0 s)\n"
    with working("reading") as doing:  # too short for a line
        doing("writing")
    assert capsys.readouterr().err == ""


def test_nobody_waits_for_a_load_that_was_cancelled() -> None:
    release = threading.Event()

    async def cancelled() -> None:
        loading = asyncio.ensure_future(run_in_thread(release.wait, 30))
        await asyncio.sleep(0.05)
        loading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await loading

    began = time.monotonic()
    asyncio.run(cancelled())
    assert time.monotonic() - began < 5
    release.set()
