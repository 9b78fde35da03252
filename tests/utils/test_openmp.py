"""OpenMP's threads wait awake on a quiet machine and asleep on a busy one, and never against the user's choice."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from headrace.utils.openmp import CpuTimes, Load, cpu_times, loaded_runtime

PLAIN = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}

WATCHES = """
import threading
from headrace.models.tensor_threads import run_apart
run_apart(int)
run_apart(int)
print([thread.name for thread in threading.enumerate()].count("headrace-load-watch"))
"""

SPINS = """
import time, torch
from headrace.utils.openmp import SleepingThreads, loaded_runtime

torch.set_num_threads(2)
waiting, numbers = SleepingThreads(loaded_runtime()), torch.ones(1 << 20)

def burnt_s():
    began = time.process_time()
    for _ in range(150):  # a thread that waits awake for the next operation burns the time between two
        numbers.add_(1)
        time.sleep(0.002)
    return time.process_time() - began

awake = burnt_s()
waiting.switch(True)
time.sleep(0.2)
asleep = burnt_s()
waiting.switch(False)
time.sleep(0.2)
print(asleep / awake, asleep / burnt_s())
"""


def run(script: str, **environment: str) -> str:
    command = [sys.executable, "-c", script]
    return subprocess.run(command, env=PLAIN | environment, capture_output=True, text=True, check=True).stdout


def looks(load: Load, *shares: tuple[float, float]) -> list[bool]:
    """`shares`: cores that others and this process took since the look before."""
    now, found = CpuTimes(0.0, 0.0, 0.0), []
    for others, own in shares:
        before, now = now, CpuTimes(now.at + 0.2, now.machine + 0.2 * (others + own), now.own + 0.2 * own)
        found.append(load.look(before, now))
    return found


def test_a_machine_is_busy_once_others_take_what_this_process_needs() -> None:
    assert looks(Load(2, 2), (0.0, 2.0), (0.3, 1.7), (1.0, 1.0), (1.0, 0.8)) == [False, False, True, True]
    assert looks(Load(2, 1), (1.0, 1.0), (1.2, 1.0)) == [False, False], "a process with one thread has room beside one"
    assert looks(Load(64, 16), (10.0, 16.0), (40.0, 16.0), (50.0, 14.0)) == [False, False, True]


def test_a_machine_that_is_busy_before_this_process_does_anything_is_busy() -> None:
    assert looks(Load(2, 2), (2.0, 0.0), (1.4, 0.6), (1.3, 0.7)) == [True, True, True]


def test_a_machine_is_quiet_again_after_some_looks_and_not_between_two() -> None:
    load = Load(2, 2)
    assert looks(load, (0.0, 2.0), (4.0, 0.5), (0.0, 1.5), (4.0, 0.5), (0.0, 1.5), (0.0, 1.5), (0.0, 1.5)) == [
        False, True, True, True, True, True, False,
    ]  # fmt: skip


def test_this_process_is_part_of_the_machine() -> None:
    before = cpu_times()
    if before is None:
        pytest.skip("this system has no /proc/stat")
    sum(range(3_000_000))
    now = cpu_times()
    assert now is not None and now.own > before.own and now.machine >= before.machine >= before.own


@pytest.mark.parametrize(
    ("chosen", "watches"), [({}, 1), ({"GOMP_SPINCOUNT": "7"}, 0), ({"OMP_WAIT_POLICY": "PASSIVE"}, 0)]
)
def test_tensor_threads_adapt_to_the_load_unless_the_user_has_chosen(chosen: dict[str, str], watches: int) -> None:
    if cpu_times() is None:
        pytest.skip("this system has no /proc/stat")
    assert run(WATCHES, **chosen).split() == [str(watches)]


def test_threads_that_are_told_to_sleep_burn_no_time_between_operations() -> None:
    import torch  # which loads its OpenMP

    if loaded_runtime() is None:
        pytest.skip(f"torch {torch.__version__} does not use GNU's OpenMP here")
    while_on, once_off = map(float, run(SPINS).split())
    assert while_on < 0.7 and once_off < 0.7
