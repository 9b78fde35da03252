"""Real vLLM servers for tests, of the environment that `make vllm` makes. Shared, since one takes long to start."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.engines.servers.client import ServerClient
from headrace.engines.servers.server import StartedServer
from headrace.engines.vllm.command import Launch
from headrace.errors import EngineError
from headrace.weights.base import Endpoint
from headrace.weights.source import ModelWeights
from headrace.weights.transfers.file import FileTransfer

_ROOT = Path(__file__).parents[2]
_PYTHON = Path(os.environ.get("HEADRACE_VLLM_PYTHON", _ROOT / ".venv-vllm" / "bin" / "python"))
CPU = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


def vllm_python() -> str:
    """The interpreter that has vLLM; the test is skipped where there is none."""
    if not _PYTHON.exists():
        pytest.skip(f"there is no {_PYTHON} with vLLM; `make vllm` makes it, or set HEADRACE_VLLM_PYTHON")
    return str(_PYTHON)


def new_server(folder: Path, log: Path, transport: str = "file", **changes: Any) -> StartedServer:
    """A server that is not started yet."""
    options: dict[str, Any] = {
        "dtype": "float32", "max_length": None, "max_batch": 64, "prefill_tokens": 2048, "sleeps": False, "threads": 1,
        "arguments": ("--enforce-eager",), "variables": CPU,
    }  # fmt: skip
    launch = Launch(vllm_python(), str(folder), transport=transport, **{**options, **changes})
    made: list[StartedServer] = []

    async def ask() -> None:
        client = ServerClient(made[0].url)
        try:
            await client.get("/health", 5.0)
        finally:
            await client.close()

    made.append(StartedServer("the test's vLLM server", launch.command, launch.environment(), log, ask, 400.0))
    return made[0]


class SharedServers:
    """Servers of one model, by how many sequences they decode at once; each is started when it is first needed."""

    def __init__(self, folder: Path, logs: Path) -> None:
        self.folder, self._logs = folder, logs
        self._servers: dict[int, StartedServer] = {}

    async def running(self, max_batch: int) -> StartedServer:
        server = self._servers.get(max_batch)
        if server is None or server.gone():
            server = new_server(self.folder, self._logs / f"vllm_{max_batch}.log", max_batch=max_batch)
            self._servers[max_batch] = server
            await server.start()
        return server

    async def start(self, *max_batches: int) -> None:
        await asyncio.gather(*map(self.running, max_batches))

    def close(self) -> None:
        for server in self._servers.values():
            if server.child is not None:
                server.child.end()


class LentServer:
    """A shared server as one test sees it: nothing under way, and the weights of the test's model as version 0."""

    incarnation, found = 0, False
    url = ""

    def __init__(self, servers: SharedServers, max_batch: int, hf_model: Any) -> None:
        self._servers, self._max_batch, self._model = servers, max_batch, hf_model

    async def start(self) -> None:
        server = await self._servers.running(self._max_batch)
        self.url, self.server = server.url, server
        client = ServerClient(self.url)
        await client.post("/abort_requests", {})
        await client.post("/pause?mode=keep&clear_cache=true")
        await client.post("/start_weight_update")
        await asyncio.to_thread(self._send)
        await client.post("/finish_weight_update")
        await client.post("/resume")
        await client.close()

    def _send(self) -> None:
        transfer = FileTransfer()
        transfer.open([Endpoint(self.url)])
        transfer.send(ModelWeights(self._model).stream(), 0)
        transfer.close()

    async def replace(self) -> None:
        raise EngineError(self.SMOKE)

    SMOKE = "smoke came out of the server"

    def gone(self) -> str | None:
        return self.server.gone()

    def answered(self) -> None: ...

    async def close(self) -> None: ...


def shared(folder: Path, logs: Path) -> Iterator[SharedServers]:
    """For a fixture of a module."""
    vllm_python()
    servers = SharedServers(folder, logs)
    try:
        yield servers
    finally:
        servers.close()
