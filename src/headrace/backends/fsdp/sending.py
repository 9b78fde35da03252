"""The controller's side of weights that ranks hold: they gather them, and write them where the engine reads them."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np
import torch

from headrace.backends.fsdp.group import LearnerGroup
from headrace.weights.base import Endpoint, TensorInfo
from headrace.weights.sender import ServerSender
from headrace.weights.shared_memory import Layout, SharedBuffers, plain_layout

OnThread = Callable[[Callable[[], Any]], Awaitable[Any]]


class RankWeights:
    """The ranks' trained weights, as they are now."""

    def __init__(self, group: LearnerGroup, on_thread: OnThread) -> None:
        self._group = group
        self.on_thread = on_thread

    async def digest(self) -> str:
        return await self.on_thread(lambda: self._group.together("write_weights", None, "", ())[0])

    async def send(self, transport: str, endpoints: Sequence[Endpoint], version: int) -> str | None:
        """Have the ranks send them to servers; a digest of what arrived, if someone reports it."""
        given = (transport, tuple(endpoints), version)
        return await self.on_thread(lambda: self._group.together("send_weights", *given)[0])

    def write(self, layout: Layout, path: str, content: np.ndarray) -> None:
        """Gather them into memory that every rank of this machine can map."""
        writers = self._group.local_ranks()
        if writers:
            self._group.together("write_weights", layout, path, writers)
            return
        _, tensors = self._group.together("read_weights")[0]
        starts = {slot.name: slot.start for slot in layout.slots}
        for name, piece in tensors:
            np.copyto(content[starts[name] : starts[name] + len(piece)], piece)


class RankBuffers(SharedBuffers):
    """Transport "shared_memory": ranks write into the buffers that an engine process decodes with."""

    def __init__(self, weights: RankWeights, infos: Sequence[TensorInfo]) -> None:
        self._weights = weights
        super().__init__(plain_layout([(info.name, getattr(torch, info.dtype), info.shape) for info in infos]))

    async def on_learner(self, function: Callable[[], Any]) -> Any:
        return await self._weights.on_thread(function)

    def copy_into(self, buffer: int) -> None:
        path = f"/proc/{os.getpid()}/fd/{self.files[buffer]}"
        self._weights.write(self.layout, path, self.content(buffer))


class RankSender(ServerSender):
    """Transports to servers, by which the ranks themselves send."""

    def __init__(self, transport: str, weights: RankWeights) -> None:
        self._transport, self._weights = transport, weights
        self._endpoints = None

    async def _send(self, endpoints: Sequence[Endpoint], version: int) -> str | None:
        return await self._weights.send(self._transport, endpoints, version)

    def close(self) -> None:
        """What the ranks hold ends with them."""
