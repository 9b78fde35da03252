"""OpenMP's threads wait awake on a quiet machine, asleep on a busy one, and share a core on a crowded one.

Never against the user's choice.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from headrace.utils.openmp import Above, CpuTimes, busy, cpu_times, crowded, loaded_runtime, others_took

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

CROWDED = """
import os, torch
from pathlib import Path
from headrace.models.tensor_threads import TensorThread
from headrace.utils import openmp

torch.set_num_threads(2)
numbers = torch.ones(1 << 20)

def places():
    torch.exp(numbers)  # the team is there
    return sorted(len(os.sched_getaffinity(int(task.name))) for task in Path("/proc/self/task").iterdir())

thread = TensorThread("work", stays=True)
cores = len(os.sched_getaffinity(0))
thread.submit(places).result()
openmp._team = openmp.Team(openmp.loaded_runtime(), 2)  # which nothing watches
for crowded in (False, True, False):
    openmp._team.crowded = crowded
    found = thread.submit(places).result()
    print(cores, found.count(1), len(os.sched_getaffinity(0)))
"""


def run(script: str, **environment: str) -> str:
    command = [sys.executable, "-c", script]
    return subprocess.run(command, env=PLAIN | environment, capture_output=True, text=True, check=True).stdout


def looks(above: Above, *others: float) -> list[bool]:
    """`others`: cores that other processes took since the look before."""
    return [above.look(cores) for cores in others]


def test_what_others_took_is_what_this_process_did_not() -> None:
    before, now = CpuTimes(5.0, 70.0, 3.0), CpuTimes(5.5, 71.0, 3.25)
    assert others_took(before, now) == 1.5


def test_a_machine_is_busy_once_others_take_what_this_process_needs() -> None:
    assert looks(busy(2, 2), 0.0, 0.3, 1.0, 1.0) == [False, False, True, True]
    assert looks(busy(2, 1), 1.0, 1.2) == [False, False], "a process with one thread has room beside one"
    assert looks(busy(64, 16), 10.0, 40.0, 50.0) == [False, False, True]


def test_a_machine_is_crowded_once_others_leave_less_than_a_core() -> None:
    assert looks(crowded(2), 1.0, 1.3) == [False, True], "beside one process, two threads have more than a core"
    assert looks(crowded(64), 60.0, 63.5) == [False, True]


def test_a_machine_that_is_busy_before_this_process_does_anything_is_busy() -> None:
    assert looks(busy(2, 2), 2.0, 1.4, 1.3) == [True, True, True]


def test_a_machine_is_quiet_again_after_some_looks_and_not_between_two() -> None:
    found = looks(busy(2, 2), 0.0, 4.0, 0.0, 4.0, 0.0, 0.0, 0.0)
    assert found == [False, True, True, True, True, True, False]


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


def test_on_a_crowded_machine_the_threads_of_an_operation_share_a_core_and_no_other_thread_does() -> None:
    import torch  # which loads its OpenMP

    if loaded_runtime() is None or len(os.sched_getaffinity(0)) < 2:
        pytest.skip(f"torch {torch.__version__} does not use GNU's OpenMP here, or there is one core")
    quiet, crowded_now, quiet_again = ([int(n) for n in line.split()] for line in run(CROWDED).splitlines())
    cores = quiet[0]
    assert quiet == quiet_again == [cores, 0, cores]
    assert crowded_now == [cores, 2, cores], "two threads of the team; the thread that begins processes is free"
