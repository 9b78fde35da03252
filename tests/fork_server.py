"""Engine processes and ranks by fork: the suite starts many of them, and importing torch takes seconds each time.

A server imports once what such a process needs, and forks one for each launch. `kill -USR1` breaks the model of an
engine process.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from headrace.engines.process.wire import EngineOptions
from headrace.utils.worker_process import Tail

SMOKE = "the forward went up in smoke"


class ForkedChild:
    """A process whose parent is the server."""

    def __init__(self, pid: int, connection: socket.socket, printed: int) -> None:
        self.pid, self.connection = pid, connection
        self.output = Tail(os.fdopen(printed, "rb"), 400)

    def connect(self) -> socket.socket:
        return self.connection

    def fill(self, buffer: int) -> None:
        """The memory is shared."""

    def last_output(self) -> str:
        return self.output.text()

    def signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def end(self, grace_s: float = 0.0) -> int:
        self.connection.close()
        self.kill()
        while is_running(self.pid):
            time.sleep(0.001)
        return -signal.SIGKILL


class ForkServer:
    """Launches `ForkedChild`s: engine processes, or ranks."""

    def __init__(self, kind: str = "engine") -> None:
        self._socket, theirs = socket.socketpair()
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno()), kind],
            pass_fds=[theirs.fileno()],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        theirs.close()

    def launch(self, options: EngineOptions | None = None, files: Sequence[int] = ()) -> ForkedChild:
        ours, theirs = socket.socketpair()
        printed, prints = os.pipe()
        socket.send_fds(self._socket, [b"fork"], [theirs.fileno(), prints, *files])
        pid = int(self._socket.recv(32))
        theirs.close()
        os.close(prints)
        return ForkedChild(pid, ours, printed)

    def launch_rank(self, environment: Mapping[str, str]) -> Any:
        return self.launch()

    def close(self) -> None:
        self._socket.close()
        self._process.wait(10)


def is_running(pid: int) -> bool:
    """Whether there is such a process, and not only what is left of one."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _serve_engines(connection: socket.socket) -> None:
    import transformers.models.llama.modeling_llama  # what loading the model would import
    from transformers import PreTrainedTokenizerFast  # noqa: F401

    from headrace.engines.process import worker
    from headrace.models.llama import LlamaModel
    from slow_models import slowed

    assert transformers
    LlamaModel.decode_and_sample = slowed(LlamaModel.decode_and_sample)

    def run(files: Sequence[int]) -> None:
        signal.signal(signal.SIGUSR1, _break_models)
        worker.main(files[0], files[2:])

    _serve(connection, run)


def _serve_ranks(connection: socket.socket) -> None:
    import transformers.models.llama.modeling_llama
    from transformers import PreTrainedTokenizerFast  # noqa: F401

    import headrace.backends.fsdp.rank
    from headrace.backends.ranks import worker

    assert transformers and headrace
    _serve(connection, lambda files: worker.main(files[0]))


def _serve(connection: socket.socket, run: Callable[[Sequence[int]], None]) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no one waits for the children
    while True:
        message, files, _, _ = socket.recv_fds(connection, 16, 16)
        if not message:
            os._exit(0)
        pid = os.fork()
        if not pid:
            connection.close()
            for stream in (1, 2):
                os.dup2(files[1], stream)
            run(files)
        for file in files:
            os.close(file)
        connection.send(str(pid).encode())


def _break_models(*_: Any) -> None:
    from headrace.models.fallback import TransformersModel
    from headrace.models.llama import LlamaModel

    def broken(*_: Any) -> Any:
        raise RuntimeError(SMOKE)

    models: list[Any] = [LlamaModel, TransformersModel]
    for model in models:
        model.prefill = model.decode = model.decode_and_sample = broken


if __name__ == "__main__":
    {"engine": _serve_engines, "rank": _serve_ranks}[sys.argv[2]](socket.socket(fileno=int(sys.argv[1])))
