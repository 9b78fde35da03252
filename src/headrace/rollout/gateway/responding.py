"""Shared by the servers that speak OpenAI's API: errors as answers, streams as bytes, clients that disconnect."""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from headrace.errors import HeadraceError
from headrace.rollout.gateway.wire import ApiFormat, Refusal, refusal_of

log = logging.getLogger("headrace")

NO_RETRY = {"x-should-retry": "false"}  # honoured by the clients of OpenAI and Anthropic
_LATER = (408, 429, 503)


async def respond(
    api: ApiFormat, who: str, endpoint: Callable[[Request], Awaitable[Response]], request: Request
) -> Response:
    """Call an endpoint; answer errors in the format of the API."""
    try:
        return await endpoint(request)
    except ClientDisconnect:
        return Response(status_code=499)
    except HeadraceError as error:
        refusal = refusal_of(error)
    except Exception as error:  # a bug in the server: log it and report it to the client
        log.exception("%s failed to answer a request", who)
        refusal = Refusal(500, f"{who} failed: {type(error).__name__}: {error}", "internal_error")
    return JSONResponse(api.error(refusal), refusal.status, retry_headers(refusal.status))


def retry_headers(status: int) -> dict[str, str]:
    """Whether a client should try again."""
    return {} if status in _LATER else NO_RETRY


async def disconnected(request: Request) -> None:
    """Return when the client has disconnected."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def frame(name: str | None, data: dict[str, Any] | str) -> bytes:
    """A server-sent event."""
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return f"event: {name}\ndata: {text}\n\n".encode() if name else f"data: {text}\n\n".encode()
