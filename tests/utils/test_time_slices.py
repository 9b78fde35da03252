"""Threads ask for short time slices, and stay what they were otherwise."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

SCRIPT = """
import ctypes, os, struct, threading
from headrace.utils.time_slices import shorten_time_slices

def slice_of(task):
    buffer = ctypes.create_string_buffer(48)
    assert ctypes.CDLL(None).syscall({"x86_64": 315, "aarch64": 275}[os.uname().machine], task, buffer, 48, 0) == 0
    size, policy, flags, nice, priority, runtime, *_ = struct.unpack("=IIQiIQQQ", buffer.raw)
    return policy, nice, runtime

os.nice(3)
waits = threading.Event()
threading.Thread(target=waits.wait, daemon=True).start()
before = {slice_of(int(task)) for task in os.listdir("/proc/self/task")}
shorten_time_slices()
after = {slice_of(int(task)) for task in os.listdir("/proc/self/task")}
waits.set()
print(before, after, sep=";")
"""


@pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64") or sys.platform != "linux", reason="Linux only")
def test_every_thread_gets_short_slices_and_keeps_its_priority() -> None:
    printed = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True).stdout
    before, after = map(eval, printed.split(";"))
    if {runtime for *_, runtime in before} == {0}:
        pytest.skip("this kernel has no time slices of a thread's own (Linux 6.12 and later)")
    assert {(policy, nice) for policy, nice, _ in after} == {(0, 3)}
    assert {runtime for *_, runtime in after} == {100_000}
