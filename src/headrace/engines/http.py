"""JSON over HTTP, tried again where the server is at fault: no connection, too many requests, a failure of its own."""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from time import time
from typing import Any

import httpx2

from headrace.errors import ConfigError, HeadraceError, InfrastructureError, RefusedError, UnreachableError

_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 60.0
_SHOWN = 200  # characters of an answer that an error quotes
_AGAIN = {408, 409, 425, 429}  # besides everything from 500 on


class HttpJson:
    """Posts JSON to URLs, so many requests at once, each as often as `retries` allows. The key is never shown."""

    def __init__(
        self,
        api_key_env: str | None = None,
        timeout_s: float = 600.0,
        retries: int = 5,
        max_concurrent: int = 64,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._headers = {**(headers or {}), **authorization(api_key_env)}
        self._timeout_s = timeout_s
        self._retries = retries
        self._max_concurrent = max_concurrent
        self._jitter = random.Random()  # its own: nobody else's numbers are to depend on a server
        self._client: httpx2.AsyncClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def post(self, url: str, payload: Any) -> Any:
        """The answer to a payload."""
        client, slots = self._connections()
        async with slots:
            for attempt in range(self._retries + 1):
                failure, wait_s = await self._try(client, url, payload)
                if not isinstance(failure, HeadraceError):
                    return _parsed(url, failure)
                if attempt == self._retries:
                    raise type(failure)(f"{failure}; given up after {attempt + 1} attempts")
                await asyncio.sleep(self._pause_s(attempt) if wait_s is None else min(wait_s, _LONGEST_PAUSE_S))
        raise AssertionError("retries are at least 0")

    async def close(self) -> None:
        """Let connections go."""
        client, self._client = self._client, None
        if client is not None and self._loop is asyncio.get_running_loop():
            await client.aclose()

    async def _try(
        self, client: httpx2.AsyncClient, url: str, payload: Any
    ) -> tuple[InfrastructureError | httpx2.Response, float | None]:
        """An answer, or what may be gone at the next attempt and how long the server wants to be left alone."""
        try:
            response = await client.post(url, content=json.dumps(payload).encode(), headers=self._headers)
        except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
            return UnreachableError(f"cannot reach {url}: {error or type(error).__name__}"), None
        except httpx2.TimeoutException:
            return InfrastructureError(f"{url} gave no answer within {self._timeout_s:g} s"), None
        except httpx2.TransportError as error:
            return InfrastructureError(f"the connection to {url} broke: {error or type(error).__name__}"), None
        except httpx2.InvalidURL as error:
            raise ConfigError(f"{url!r} is no URL: {error}") from None
        if response.status_code < 300:
            return response, None
        said = f"{url} answered {response.status_code}: {_message(response)}"
        if response.status_code >= 500 or response.status_code in _AGAIN:
            return InfrastructureError(said), _retry_after_s(response)
        raise RefusedError(said, response.status_code, response.text)

    def _connections(self) -> tuple[httpx2.AsyncClient, asyncio.Semaphore]:
        """Connections belong to an event loop, and judgers are made before there is one."""
        loop = asyncio.get_running_loop()
        if self._client is None or self._loop is not loop:
            limits = httpx2.Limits(max_connections=self._max_concurrent)
            self._client = httpx2.AsyncClient(timeout=self._timeout_s, limits=limits)
            self._slots = asyncio.Semaphore(self._max_concurrent)
            self._loop = loop
        return self._client, self._slots

    def _pause_s(self, attempt: int) -> float:
        """Doubled each time, and spread: those who were refused together do not come back together."""
        return min(_FIRST_PAUSE_S * 2**attempt, _LONGEST_PAUSE_S) * self._jitter.uniform(0.5, 1.0)


def authorization(api_key_env: str | None) -> dict[str, str]:
    """The headers of a request: JSON, and the key that an environment variable holds."""
    headers = {"Content-Type": "application/json"}
    if api_key_env is None:
        return headers
    key = os.environ.get(api_key_env, "").strip()
    if not key:
        raise ConfigError(f"the environment variable {api_key_env}, which is to hold the API key, is not set")
    return {**headers, "Authorization": f"Bearer {key}"}


def _parsed(url: str, response: httpx2.Response) -> Any:
    try:
        return response.json()
    except ValueError:
        raise RefusedError(
            f"{url} answered with something else than JSON: {response.text[:_SHOWN]!r}",
            response.status_code,
            response.text,
        ) from None


def _message(response: httpx2.Response) -> str:
    """What the server says went wrong, in the forms that servers have for it."""
    try:
        body = response.json()
    except ValueError:
        return response.text[:_SHOWN].strip() or response.reason_phrase
    found: Any = body
    for key in ("error", "message", "detail"):
        if isinstance(found, dict) and key in found:
            found = found[key]
    return (found if isinstance(found, str) else json.dumps(found))[:_SHOWN]


def _retry_after_s(response: httpx2.Response) -> float | None:
    """Seconds that the server wants to be left alone, given as a number or as a date."""
    text = response.headers.get("retry-after", "").strip()
    if not text:
        return None
    try:
        return max(0.0, float(text))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - time())
    except ValueError:
        return None
