"""The sender of weights to servers: the async face of a `Transfer`, which runs on the learner's thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from headrace.errors import ConfigError, EngineError
from headrace.registry import load_object
from headrace.weights.base import Endpoint, Reachable, Transfer
from headrace.weights.source import ModelWeights

_TRANSFERS = {
    "file": "headrace.weights.transfers.file:FileTransfer",
    "gloo": "headrace.weights.transfers.gloo:GlooTransfer",
    "nccl": "headrace.weights.transfers.nccl:NcclTransfer",
    "ipc": "headrace.weights.transfers.ipc:IpcTransfer",
    "disk": "headrace.weights.transfers.disk:DiskTransfer",
    "adapter": "headrace.weights.transfers.adapter:AdapterTransfer",
}
TO_SERVERS = tuple(_TRANSFERS)
"""Transports of the senders that are made here."""


class ServerSender:
    """Sends to the endpoints that the engine names; the engine binds itself when it is built."""

    in_place = False

    def __init__(self, transfer: Transfer, source: ModelWeights) -> None:
        self.transfer = transfer
        self._source = source
        self._endpoints: Callable[[], Sequence[Endpoint]] | None = None

    def bind(self, endpoints: Callable[[], Sequence[Endpoint]]) -> None:
        """Say who the receivers are. Asked before every send: a restarted server is another incarnation."""
        self._endpoints = endpoints

    async def send(self, version: int) -> str | None:
        if self._endpoints is None:
            raise EngineError(f"version {version} is sent, but no engine has bound itself to the sender")
        return await self._send(list(self._endpoints()), version)

    async def send_to(self, engine: Reachable, version: int) -> str | None:
        """Send to the servers of one engine only: a replica that was started again."""
        return await self._send(list(engine.endpoints()), version)

    async def _send(self, endpoints: Sequence[Endpoint], version: int) -> str | None:
        def run() -> str | None:
            self.transfer.open(endpoints)
            return self.transfer.send(self._source.stream(), version)

        return await self._source.on_learner(run)

    def close(self) -> None:
        """Give back what the transfer holds."""
        self.transfer.close()


def server_sender(transport: str, source: ModelWeights) -> ServerSender:
    """The sender of a transport to servers."""
    arguments = (source.adapter_config(),) if transport == "adapter" else ()
    return ServerSender(new_transfer(transport, *arguments), source)


def new_transfer(transport: str, *arguments: Any) -> Transfer:
    """How a transport to servers travels. "adapter" needs the configuration of the adapters."""
    if transport not in _TRANSFERS:
        raise ConfigError(f'there is no transport "{transport}" to servers; there are {", ".join(_TRANSFERS)}')
    return load_object(_TRANSFERS[transport])(*arguments)
