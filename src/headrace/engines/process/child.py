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


def launch_engine(options: EngineOptions, files: Sequence[int]) -> Child:
    """An engine process of its own."""
    return WorkerProcess("headrace.engines.process.worker", files, {"OMP_NUM_THREADS": str(options.threads)})
