"""The viewer in a process beside a run: `headrace train --view`. It ends with the run, however the run ends."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from headrace.errors import HeadraceError
from headrace.viewer.options import ViewOptions
from headrace.viewer.run import serve_for

_WATCH_S = 1.0
_END_S = 5.0


@contextmanager
def viewer_beside(folder: Path) -> Iterator[str]:
    """The URL of a viewer over a folder, in a process of its own: it takes no time from the run's."""
    command = [sys.executable, "-m", "headrace.viewer.beside", str(folder)]
    # a session of its own: Ctrl-C is for the run, which finishes its step first
    child = subprocess.Popen(
        command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, start_new_session=True, text=True
    )
    try:
        assert child.stdout is not None
        yield child.stdout.readline().strip()
    finally:
        child.terminate()
        with suppress(subprocess.TimeoutExpired):
            child.wait(_END_S)
        child.kill()
        child.wait()


async def _until_orphaned(parent: int) -> None:
    while os.getppid() == parent:  # noqa: ASYNC110  (the system has no event for it)
        await asyncio.sleep(_WATCH_S)


def main() -> None:
    """In the child: print the URL, serve until the parent is gone."""
    parent = os.getppid()
    try:
        asyncio.run(serve_for(ViewOptions(root=Path(sys.argv[1])), _until_orphaned(parent), print_url))
    except HeadraceError as error:
        print(f"error: {error}", flush=True)


def print_url(url: str) -> None:
    """One line, which the parent reads."""
    print(url, flush=True)


if __name__ == "__main__":
    main()
