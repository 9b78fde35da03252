"""The engine process as a Ray actor, on any node. It serves the learner over TCP, by the messages of the pipe.

On the trainer's machine it reads the learner's buffers themselves. On another it has buffers of its own, which are
filled through Ray's object store: what was put there once serves the replicas of all nodes.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import secrets
import signal
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
from ray.exceptions import GetTimeoutError, RayError

from headrace.cluster.placement import Placed
from headrace.engines.process.wire import EngineOptions
from headrace.engines.process.worker import serve
from headrace.errors import EngineError
from headrace.utils.machine import machine
from headrace.weights.shared_memory import SharedBuffers, anonymous_file, mapped

_TOKEN_BYTES = 32
_GREETING_S = 30.0
_SILENT_S = 5


@dataclass(frozen=True, slots=True)
class Buffers:
    """The learner's buffers as another process finds them: on which machine, in which process, and how large."""

    machine: str
    pid: int
    files: tuple[int, ...]
    size: int


class EngineActor:
    """What runs in an actor. Buffers are filled beside it, on a thread of their own."""

    def listen(self, buffers: Buffers) -> tuple[str, int, int, bool]:
        """Where the learner reaches it, its process, and whether it reads the learner's own memory."""
        shared = _opened(buffers)
        self._files = shared or [anonymous_file(buffers.size) for _ in buffers.files]
        self._size = buffers.size
        host = ray.util.get_node_ip_address()
        self._listening = socket.create_server((host, 0))
        return host, self._listening.getsockname()[1], os.getpid(), bool(shared)

    def serve(self, token: bytes) -> None:
        """Until the learner has gone; the process ends with it. Nothing is read of anyone who has not the token."""
        with self._listening as listening:
            connection = _greeted(listening, token)
        asyncio.run(serve(connection, self._files))

    def fill(self, buffer: int, content: np.ndarray) -> None:
        np.copyto(np.frombuffer(mapped(self._files[buffer], self._size), dtype=np.uint8), content)


class Copies:
    """Contents of buffers in the object store: the newest one, for all replicas."""

    def __init__(self, buffers: SharedBuffers) -> None:
        self._buffers = buffers
        self._lock = threading.Lock()
        self._newest: tuple[tuple[int, int], Any] | None = None

    def reference(self, buffer: int) -> Any:
        """Of what is in a buffer now."""
        with self._lock:
            key = (buffer, self._buffers.writes[buffer])
            if self._newest is None or self._newest[0] != key:
                self._newest = key, ray.put(self._buffers.content(buffer))
            return self._newest[1]


class RayChild:
    """An actor, as an engine sees its process."""

    def __init__(self, actor: Any, buffers: Buffers, copies: Copies, patience_s: float) -> None:
        self.pid = 0
        self._actor, self._buffers, self._copies, self._patience_s = actor, buffers, copies, patience_s
        self._connection: socket.socket | None = None
        self._shares = True
        self._why = ""

    def connect(self) -> socket.socket:
        token = secrets.token_bytes(_TOKEN_BYTES)
        try:
            asked = self._actor.listen.remote(self._buffers)
            host, port, self.pid, self._shares = ray.get(asked, timeout=self._patience_s)
        except GetTimeoutError:
            raise EngineError(
                f"no node took an engine replica within cluster.patience_s = {self._patience_s:g}; add nodes, or raise "
                f"it"
            ) from None
        except RayError as error:
            self._why = str(error).strip()
            raise ConnectionError(self._why) from None
        self._actor.serve.remote(token)
        connection = socket.create_connection((host, port), timeout=_GREETING_S)
        connection.sendall(token)
        self._connection = watched(connection)
        return self._connection

    def fill(self, buffer: int) -> None:
        if self._shares:  # or it is not connected yet, and is filled when it is
            return
        with suppress(RayError):  # it has gone, which the connection says
            beside = self._actor.fill.options(concurrency_group="fill")
            ray.get(beside.remote(buffer, self._copies.reference(buffer)))

    def last_output(self) -> str:
        return self._why

    def kill(self) -> None:
        with suppress(RayError, ValueError):
            ray.kill(self._actor)

    def end(self, grace_s: float = 0.0) -> int:
        if self._connection is not None:
            self._connection.close()
        if ray.is_initialized():
            self.kill()
        return -signal.SIGKILL


class RayLaunch:
    """Starts an engine in its bundle. If the bundle's node is lost, Ray finds another for it."""

    def __init__(
        self, placed: Placed, index: int, buffers: SharedBuffers, copies: Copies, patience_s: float, shares: bool = True
    ) -> None:
        self._placed, self._index, self._patience_s = placed, index, patience_s
        self._buffers, self._copies, self._shares = buffers, copies, shares

    def __call__(self, options: EngineOptions, files: Sequence[int]) -> RayChild:
        where = machine() if self._shares else ""
        found = Buffers(where, os.getpid(), tuple(files), self._buffers.layout.size)
        remote: Any = ray.remote  # whose types do not know all that it takes
        kind = remote(concurrency_groups={"fill": 1}, max_restarts=0)(EngineActor)
        env = {"OMP_NUM_THREADS": str(options.threads), "OMP_WAIT_POLICY": "PASSIVE"}
        actor = kind.options(**self._placed.options(self._index), runtime_env={"env_vars": env}).remote()
        return RayChild(actor, found, self._copies, self._patience_s)


def watched(connection: socket.socket) -> socket.socket:
    """Without delays, and closed within half a minute if the other machine is gone without a word."""
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name in ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT"):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), _SILENT_S)
    return connection


def _greeted(listening: socket.socket, token: bytes) -> socket.socket:
    while True:
        connection, _ = listening.accept()
        connection.settimeout(_GREETING_S)
        with suppress(OSError):
            if hmac.compare_digest(connection.recv(len(token), socket.MSG_WAITALL), token):
                return watched(connection)
        connection.close()


def _opened(buffers: Buffers) -> list[int]:
    """The learner's own files; none on another machine, or where the system does not lend them."""
    if buffers.machine != machine():
        return []
    try:
        return [os.open(f"/proc/{buffers.pid}/fd/{file}", os.O_RDWR) for file in buffers.files]
    except OSError:
        return []
