"""Starting and ending the engine process."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Protocol

from headrace.engines.process.wire import EngineOptions
from headrace.utils.worker_process import WorkerProcess


class Child(Protocol):
    """An engine process."""

    pid: int

    def connect(self) -> socket.socket:
        """The socket at whose other end it is. May take long; OSError if it has gone meanwhile."""
        ...

    def fill(self, buffer: int) -> None:
        """Bring what is in a buffer to where the process reads it."""
        ...

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
    """Starts an engine process that has the buffers' files."""

    def __call__(self, options: EngineOptions, files: Sequence[int]) -> Child: ...


class EngineProcess(WorkerProcess):
    """A process of this machine, which has inherited the buffers."""

    def connect(self) -> socket.socket:
        return self.connection

    def fill(self, buffer: int) -> None:
        """It reads the same memory that the learner writes."""


def launch_engine(options: EngineOptions, files: Sequence[int]) -> Child:
    """An engine process of its own."""
    return EngineProcess("headrace.engines.process.worker", files, {"OMP_NUM_THREADS": str(options.threads)})
