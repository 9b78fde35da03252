"""Calls to one server over HTTP: JSON in and out, nothing retried. Who calls decides what a lost server means."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import httpx2

from headrace.errors import EngineError, ServerLostError

_SHOWN = 400


class ServerRefusedError(EngineError):
    """The server understood, and answered with an error."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class ServerClient:
    """One server. Connections belong to the event loop that first uses them."""

    def __init__(self, url: str, headers: Mapping[str, str] | None = None, timeout_s: float = 300.0) -> None:
        self.url = url.rstrip("/")
        self.headers = dict(headers or {})
        self._headers = {"Content-Type": "application/json", **self.headers}
        self._timeout_s = timeout_s
        self._client: httpx2.AsyncClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def post(self, path: str, body: Any = None, timeout_s: float | None = None) -> Any:
        """The answer; ServerLostError if there is none, ServerRefusedError if it is an error."""
        return await self._ask("POST", path, b"" if body is None else json.dumps(body).encode(), timeout_s)

    async def get(self, path: str, timeout_s: float | None = None) -> Any:
        return await self._ask("GET", path, None, timeout_s)

    async def _ask(self, method: str, path: str, content: bytes | None, timeout_s: float | None) -> Any:
        url = self.url + path
        limit = self._timeout_s if timeout_s is None else timeout_s
        try:
            response = await self._connections().request(
                method, url, content=content, headers=self._headers, timeout=limit
            )
        except httpx2.TimeoutException:
            raise ServerLostError(f"{url} gave no answer within {limit:g} s", self.url) from None
        except httpx2.TransportError as error:
            raise ServerLostError(f"no answer from {url}: {error or type(error).__name__}", self.url) from None
        if response.status_code >= 300:
            said = response.text[:_SHOWN]
            raise ServerRefusedError(f"{url} answered {response.status_code}: {said}", response.status_code)
        kind = response.headers.get("content-type", "")
        return response.json() if "json" in kind else response.text

    def _connections(self) -> httpx2.AsyncClient:
        loop = asyncio.get_running_loop()
        if self._client is None or self._loop is not loop:
            limits = httpx2.Limits(max_connections=None, max_keepalive_connections=64)
            # no proxy: servers are machines of one's own
            self._client = httpx2.AsyncClient(limits=limits, trust_env=False)
            self._loop = loop
        return self._client

    async def close(self) -> None:
        """Let connections go."""
        client, self._client = self._client, None
        if client is not None and self._loop is asyncio.get_running_loop():
            await client.aclose()
