"""A server on an address that others reach: it answers only who has its token, whatever is asked."""

import hmac
import os
from typing import Any


class RequireToken:
    """ASGI middleware. vLLM's own keys leave the routes of weight sync open."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._expected = f"Bearer {os.environ['HEADRACE_TOKEN']}".encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "lifespan" and not self._has_token(scope):
            if scope["type"] == "http":
                await send({"type": "http.response.start", "status": 401, "headers": []})
                await send({"type": "http.response.body", "body": b"the token is missing or wrong"})
            else:
                await send({"type": "websocket.close", "code": 1008})
            return
        await self._app(scope, receive, send)

    def _has_token(self, scope: Any) -> bool:
        given = dict(scope.get("headers", ())).get(b"authorization", b"")
        return hmac.compare_digest(given, self._expected)
