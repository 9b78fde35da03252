"""Saves a checkpoint again and again, and is killed at the next operation on the disk each time.

An audit hook sees every operation before it is made. The parent looks at what each kill left.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import checkpoint_data
from headrace.run.checkpoint import load_newest
from headrace.run.checkpoint_writer import tidy

_CHANGES = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir")


def killed_at(operation: int, run_dir: Path, kind: str, step: int) -> bool:
    """In a process of its own: whether it was killed before so many operations were made."""
    pid = os.fork()
    if not pid:
        _kill_at(operation, run_dir)
        asyncio.run(checkpoint_data.save_one(run_dir, step, _backend(kind, step)))
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL, status
        return True
    assert os.WEXITSTATUS(status) == 0, status
    return False


def _kill_at(operation: int, run_dir: Path) -> None:
    left = operation

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal left
        if event in _CHANGES and (isinstance(arguments[0], int) or _is_ours(arguments, run_dir)):
            if not left:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1

    sys.addaudithook(hook)


def _is_ours(arguments: tuple[Any, ...], run_dir: Path) -> bool:
    return str(arguments[0]).startswith(str(run_dir)) or "/" not in str(arguments[0])  # relative: within rmtree


def _backend(kind: str, step: int) -> Any:
    return getattr(checkpoint_data, kind)(step)


def look_at(run_dir: Path) -> None:
    """One of the newer checkpoints is whole, and the run can be saved on."""
    tidy(run_dir)
    backend: Any = checkpoint_data.FileBackend()
    told: list[str] = []
    state = asyncio.run(load_newest(run_dir, backend, told.append))
    assert state is not None and state.step == backend.weights and state.step >= 10, (state, backend.weights)
    assert len(told) == 1, told  # nothing was passed over: what bears the name is whole
    asyncio.run(checkpoint_data.save_one(run_dir, 20))
    assert not list((run_dir / "checkpoints").glob(".*"))


def main(place: Path, kind: str, step: int) -> None:
    os.fsync = lambda descriptor: None  # a kill loses nothing that was written, only a power cut does
    kills, killed = 0, True
    while killed:
        run_dir = place / str(kills)
        for before in (5, 10):
            asyncio.run(checkpoint_data.save_one(run_dir, before))
        killed = killed_at(kills, run_dir, kind, step)
        look_at(run_dir)
        shutil.rmtree(run_dir)
        kills += killed
    print(kills)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
