"""A streamed response that ends the call under way when its reader hangs up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send


class EventStream(Response):
    """Server-sent events. `gone` ends when the client hangs up; then `call` is cancelled."""

    media_type = "text/event-stream"

    def __init__(self, frames: AsyncIterator[bytes], gone: asyncio.Task[None], call: asyncio.Task[Any]) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._frames = frames
        self._gone = gone
        self._call = call

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until all is said, or nobody listens."""
        self._gone.add_done_callback(self._hang_up)
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for frame in self._frames:
                await send({"type": "http.response.body", "body": frame, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._gone.cancel()
            self._call.cancel()

    def _hang_up(self, gone: asyncio.Task[None]) -> None:
        if not gone.cancelled():
            self._call.cancel()
