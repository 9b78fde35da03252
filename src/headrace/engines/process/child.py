"""Starting and ending the engine process."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Protocol

from headrace.engines.process.wire import EngineOptions
from headrace.utils.interrupts import stop_signals_blocked


class Child(Protocol):
    """An engine process."""

    pid: int
    connection: socket.socket

    def last_output(self) -> str:
        """The end of what it has printed."""
        ...

    def kill(self) -> None:
        """Kill it; the connection says when it has gone."""
        ...

    def end(self, grace_s: float = 0.0) -> int:
        """Kill it, unless it ends by itself within the grace; its exit code, negative for a signal."""
        ...


class Launch(Protocol):
    """Starts an engine process that inherits the buffers' files."""

    def __call__(self, options: EngineOptions, files: Sequence[int]) -> Child: ...


class Tail:
    """Reads what a process prints, and keeps the end."""

    def __init__(self, lines: Iterable[bytes]) -> None:
        self._kept: deque[str] = deque(maxlen=20)
        self._thread = threading.Thread(target=self._read, args=(lines,), name="headrace-engine-output", daemon=True)
        self._thread.start()

    def _read(self, lines: Iterable[bytes]) -> None:
        for line in lines:
            self._kept.append(line.decode(errors="replace").rstrip())

    def text(self) -> str:
        self._thread.join(1.0)  # the process has ended; its last lines may be on their way
        return "\n".join(self._kept)


class ProcessChild:
    """An engine process of its own session, so that Ctrl-C in the terminal does not reach it.

    SIGTERM is sent to all processes of a job, whatever their session: it does not listen to it, and ends with us.
    """

    program: tuple[str, ...] = ("-m", "headrace.engines.process.worker")

    def __init__(self, options: EngineOptions, files: Sequence[int]) -> None:
        self.connection, theirs = socket.socketpair()
        inherited = (theirs.fileno(), *files)
        with stop_signals_blocked():
            self._process = subprocess.Popen(
                [sys.executable, "-P", *self.program, *map(str, inherited)],
                pass_fds=inherited,
                env=os.environ | {"OMP_NUM_THREADS": str(options.threads)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        theirs.close()
        self.pid = self._process.pid
        assert self._process.stdout is not None
        self._tail = Tail(self._process.stdout)

    def last_output(self) -> str:
        return self._tail.text()

    def kill(self) -> None:
        self._process.kill()

    def end(self, grace_s: float = 0.0) -> int:
        self.connection.close()
        try:
            return self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()


def describe_exit(code: int) -> str:
    """An exit code in words."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
