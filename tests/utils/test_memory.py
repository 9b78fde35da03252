"""Freed memory is kept, in one heap for all threads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = '''
import ctypes, re, sys
from pathlib import Path
from headrace import UnifiedTrainer

def heaps():
    """How many glibc has for the threads of this process."""
    libc, path = ctypes.CDLL("libc.so.6"), Path(sys.argv[1], "heaps.xml")
    libc.fopen.restype = ctypes.c_void_p
    file = libc.fopen(str(path).encode(), b"w")
    libc.malloc_info(0, ctypes.c_void_p(file))
    libc.fclose(ctypes.c_void_p(file))
    return len(re.findall("<heap nr=", path.read_text()))

UnifiedTrainer({
    "run": {"dir": sys.argv[1], "name": "run"},
    "workflow": {"judger": "countdown"},
    "rollout": {"group_size": 2, "max_tokens": 4},
    "trainer": {"steps": 3, "batch_size": 1, "placement": "separate"},
    "track": {"trackers": ["jsonl"], "plot": False},
}).fit()
print("heaps:", heaps())
'''


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="heaps of threads are glibc's")
def test_threads_of_a_learner_that_come_and_go_leave_no_heaps_behind(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert "heaps: 1\n" in done.stdout, done.stdout + done.stderr
