"""Transport "tinker_path": weights stay on the service, and a sampling client for them goes to the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import tinker

from headrace.errors import EngineError


@dataclass(frozen=True, slots=True)
class Served:
    """Weights that the service samples from, and the digest of how they came to be."""

    client: tinker.SamplingClient
    digest: str


class TinkerPath:
    """`serve` makes a sampling client of the learner's weights as they are now."""

    in_place = False

    def __init__(self, serve: Callable[[], Awaitable[Served]]) -> None:
        self._serve = serve
        self._serving = asyncio.Lock()
        self._sent: Served | None = None

    async def serve(self) -> Served:
        """The weights as they are now; asked for twice at once, the service keeps them once."""
        async with self._serving:
            return await self._serve()

    async def send(self, version: int) -> None:
        """Have the service keep the weights for sampling."""
        self._sent = await self.serve()

    def take_sent(self) -> Served:
        """What was sent last, once."""
        if self._sent is None:
            raise EngineError("end_update came before weights were sent; send them after begin_update")
        served, self._sent = self._sent, None
        return served
