"""A streamed response that cancels its call when the client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send


class EventStream(Response):
    """Server-sent events. When the task `disconnected` ends, `call` is cancelled."""

    media_type = "text/event-stream"

    def __init__(self, frames: AsyncIterator[bytes], disconnected: asyncio.Task[None], call: asyncio.Task[Any]) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._frames = frames
        self._disconnected = disconnected
        self._call = call

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the stream ends or the client disconnects."""
        self._disconnected.add_done_callback(self._cancel_call)
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for frame in self._frames:
                await send({"type": "http.response.body", "body": frame, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._disconnected.cancel()
            self._call.cancel()

    def _cancel_call(self, disconnected: asyncio.Task[None]) -> None:
        if not disconnected.cancelled():
            self._call.cancel()
