"""A module of Headrace in a process of its own, at the other end of a pair of sockets: the separate engine, a rank."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from headrace.utils.interrupts import stop_signals_blocked


class Tail:
    """Reads what a process prints, and keeps the end."""

    def __init__(self, lines: Iterable[bytes], kept: int = 20) -> None:
        self._kept: deque[str] = deque(maxlen=kept)
        self._thread = threading.Thread(target=self._read, args=(lines,), name="headrace-output", daemon=True)
        self._thread.start()

    def _read(self, lines: Iterable[bytes]) -> None:
        for line in lines:
            self._kept.append(line.decode(errors="replace").rstrip())

    def text(self) -> str:
        self._thread.join(1.0)  # the process has ended; its last lines may be on their way
        return self.so_far()

    def so_far(self) -> str:
        return "\n".join(tuple(self._kept))


class WorkerProcess:
    """`python -m MODULE SOCKET FILE...`, with the numbers of inherited files.

    A session of its own keeps Ctrl-C in the terminal away from it. SIGTERM is sent to all processes of a job, whatever
    their session: it does not listen to it, and ends when its socket is closed, which the end of this process does.
    """

    def __init__(
        self, module: str, files: Sequence[int] = (), environment: Mapping[str, str] | None = None, kept_lines: int = 20
    ) -> None:
        self.connection, theirs = socket.socketpair()
        inherited = (theirs.fileno(), *files)
        with stop_signals_blocked():
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, *map(str, inherited)],
                pass_fds=inherited,
                env=os.environ | dict(environment or {}),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        theirs.close()
        self.pid = self._process.pid
        assert self._process.stdout is not None
        self.output = Tail(self._process.stdout, kept_lines)

    def last_output(self) -> str:
        """The end of what it has printed."""
        return self.output.text()

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal, if it is still there."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """Kill it; the connection says when it has gone."""
        self._process.kill()

    def end(self, grace_s: float = 0.0) -> int:
        """Kill it, unless it ends by itself within the grace; its exit code, negative for a signal."""
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
