"""Scripted servers of both kinds as engines see them: started, lost, started again; and the weight sync to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from scripted_sglang import ScriptedSglang
from scripted_vllm import VOCABULARY, ScriptedVllm, ToyModel, row_table

from headrace.engines.pool import EnginePool
from headrace.engines.servers.client import ServerClient
from headrace.engines.servers.engine import ServerEngine
from headrace.engines.servers.life import ServerOptions
from headrace.engines.servers.server import GivenServer
from headrace.engines.sglang.engine import SglangEngine
from headrace.engines.vllm.engine import VllmEngine
from headrace.errors import EngineError
from headrace.weights.base import Transfer
from headrace.weights.canary import Canary, canary_rows
from headrace.weights.sender import ServerSender
from headrace.weights.source import ModelWeights
from headrace.weights.sync import WeightSync
from headrace.weights.transfers.disk import DiskTransfer
from headrace.weights.transfers.file import FileTransfer

LENGTH = 255
SMOKE = "smoke came out of the server"


def detokenize(ids: Sequence[int]) -> str:
    return "".join(f"[{token}]" for token in ids)


class VllmServer:
    """A server that is started anew as often as `lives` allows."""

    url, found = "", False
    new: ClassVar[type[ScriptedVllm]] = ScriptedVllm
    engine: ClassVar[type[ServerEngine]] = VllmEngine
    transport: ClassVar[str] = "file"
    transfer: ClassVar[Callable[[], Transfer]] = FileTransfer

    def __init__(self, model: ToyModel, lives: int = 1, **options: Any) -> None:
        self._model, self._lives, self._options = model, lives, options
        self.incarnation = 0
        self.scripted: Any = None

    @property
    def running(self) -> Any:
        assert self.scripted is not None
        return self.scripted

    async def start(self) -> None:
        self._lives -= 1
        fresh = self.new(ToyModel().arrays() if self.incarnation else self._model.arrays(), **self._options)
        self.scripted = await fresh.start()
        self.url = self.scripted.url

    async def replace(self) -> None:
        if not self._lives:
            raise EngineError(SMOKE)
        self.incarnation += 1
        await self.start()

    def gone(self) -> str | None:
        return None

    def answered(self) -> None: ...

    async def close(self) -> None:
        if self.scripted is not None:
            await self.scripted.die()


class SglangServer(VllmServer):
    """Lives of a scripted SGLang."""

    new = ScriptedSglang
    engine = SglangEngine
    transport = "disk"
    transfer = DiskTransfer
    returns_experts = False

    async def start(self) -> None:
        await super().start()
        self.running.info["enable_return_routed_experts"] = self.returns_experts


def new_engine(server: Any, kind: type[VllmServer] | None = None, **options: Any) -> Any:
    """An engine of the server's kind."""
    kind = kind or type(server)
    given: dict[str, Any] = {"vocabulary": VOCABULARY, "max_model_length": LENGTH, "detokenize": detokenize}
    given |= {"health_every_s": 0.002, "transport": kind.transport, **options}
    limit = given.get("hang_s", 60.0)
    return kind.engine(server, lambda: ServerClient(server.url, timeout_s=limit), ServerOptions(**given))


def new_sync(engine: Any, model: ToyModel, canary: bool = True) -> WeightSync:
    """The weight sync from a toy model to an engine, or to a pool of them."""
    source = ModelWeights(model)
    one: Any = engine.replicas[0].engine if isinstance(engine, EnginePool) else engine
    sender = ServerSender((FileTransfer if one.kind == "vllm" else DiskTransfer)(), source)
    sender.bind(engine.endpoints)

    async def score(rows: Any) -> list[list[float]]:
        tables = [row_table(model.arrays(), row) for row in rows]
        return [[float(t[i, k]) for i, k in enumerate(row[1:])] for row, t in zip(rows, tables, strict=True)]

    rows = Canary(canary_rows(VOCABULARY), score, 1e-3) if canary else None
    return WeightSync(source, sender, engine, rows, pauses=True)


def given_server(scripted: ScriptedVllm) -> GivenServer:
    """One that somebody else runs."""

    async def ask() -> None:
        client = ServerClient(scripted.url)
        try:
            await client.get("/health", 1.0)
        finally:
            await client.close()

    return GivenServer(scripted.url, ask, 5.0)
