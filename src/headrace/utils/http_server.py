"""Shared by all HTTP servers: access rules, limits on time and size, and how a server runs.

A server is `HttpServer(app, Rules(...))` on a socket of `listen`. `Guard` checks each request before the application
gets it; uvicorn runs both.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import re
import resource
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any
from urllib.parse import urlsplit

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from headrace.errors import ConfigError
from headrace.utils.loopback import is_loopback

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Any, Receive, Send], Awaitable[None]]
Refuse = Callable[[str, int, str], tuple[dict[str, Any], dict[str, str]]]
"""From path, status and message to the body of an error answer, in the API's format, and its headers."""

JSON, PROTOBUF = "application/json", "application/x-protobuf"
_DISCARDED = 8  # times the limit: read and discard, so that a client that is still sending gets the answer
_DISCARDED_REFUSED, _DISCARDED_S = 2**20, 2.0  # for unauthorised clients
_SLOWEST = 2**20  # bytes per second: minimum speed of a body after `body_s`
_HELD = 2**30  # bytes of bodies being read, over all connections
_CONNECTIONS = 16_384
_ONCE = (b"host", b"origin", b"content-type", b"content-length", b"transfer-encoding", b"content-encoding")
_HOST = re.compile(r"(?:\[([^\[\]@]+)\]|([^\[\]:@/]*))(?::\d*)?", re.ASCII)
_KEYS = (b"x-api-key", b"authorization")  # clients may send both, and either may hold the key


def most_connections() -> int:
    """Maximum connections: three quarters of the process's file limit; the rest is for the run."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _CONNECTIONS if allowed == resource.RLIM_INFINITY else max(16, min(_CONNECTIONS, allowed * 3 // 4))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Access rules and limits of a server."""

    host: str
    """Address to listen on. On loopback, the Host header must name loopback or `public_host`."""
    refuse: Refuse
    token: str | None = None
    """The key that every request must carry, alone or before a colon. Required unless on loopback."""
    token_remedy: str = ""
    public_host: str | None = None
    open_paths: tuple[str, ...] = ()
    """What needs no token: these paths and, of one that ends with a slash, all below it (of "/" itself only)."""
    body_types: tuple[str, ...] = (JSON,)
    max_body_mb: float
    body_remedy: str
    """How to allow larger ones, for the error message."""
    max_connections: int = field(default_factory=most_connections)
    head_s: float = 10.0
    """Deadline for the headers, from their first byte or the start of the connection."""
    body_s: float = 30.0
    """Deadline for the body, plus a second per MB."""
    write_s: float = 60.0
    """Deadline for the client to read its answer."""
    idle_s: int = 75
    """Between requests; longer than clients keep idle connections, so that none is closed while in use."""

    def __post_init__(self) -> None:
        if not self.token and not is_loopback(self.host):
            raise ConfigError(f"{self.host} can be reached from other machines, and there is no token; set one")


def listen(host: str, port: int, who: str, remedy: str) -> socket.socket:
    """A listening socket; port 0 picks a free one. `who` and `remedy` are for the error message."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host, port), family=family, backlog=4096)
    except OSError as error:
        raise ConfigError(
            f"{who} cannot listen at {host}, port {port}: {error}; {remedy} (0 takes a free one)"
        ) from error
    # headers and body are two packets; the second would wait 40 ms for the acknowledgement of the first
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening


class Refused(Exception):
    """A request that does not reach the application."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


class Guard:
    """ASGI middleware: checks the headers of a request, reads its body, then calls the application.

    A web page can send requests to any server on its machine. With a DNS name that points to 127.0.0.1 it can read the
    answers, too. So the Host must be ours, an Origin must match the Host, and the body must have a type that a page
    cannot send without a preflight request.
    """

    def __init__(self, app: Application, rules: Rules) -> None:
        self.rules = rules
        self._app = app
        self._token = rules.token.encode() if rules.token else None
        self._any_host = not is_loopback(rules.host)  # any name: the token decides
        self._is_ours = lru_cache(64)(self._is_ours)
        self._most = int(rules.max_body_mb * 2**20)
        self._held = 0

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        body: bytes | None = None
        try:
            head = self._check_head(scope)
            if b"content-length" in head or b"transfer-encoding" in head:
                body = await self._body(receive)
                self._check_body(head, body)
        except ConnectionError:  # the client has disconnected
            return
        except Refused as refused:
            await self._answer(scope, receive, send, refused)
            return
        await self._app(scope, receive if body is None else _Read(body, receive), send)

    def _check_head(self, scope: Any) -> dict[bytes, bytes]:
        head: dict[bytes, bytes] = {}
        given: list[bytes] = []
        for name, value in scope["headers"]:
            if name in _KEYS:
                given.append(value)
            elif name in _ONCE:
                if name in head:
                    raise Refused(400, f"the header {name.decode()} came twice; send it once")
                head[name] = value
        host = head.get(b"host", b"")
        if not (self._any_host or self._is_ours(host)):
            raise Refused(403, f'this server is not "{_shown(host)}"; use the address that it listens on')
        origin = head.get(b"origin")
        if origin is not None and not _is_same(origin, host):
            raise Refused(403, f'pages of "{_shown(origin)}" may not call this server; do not call it from a web page')
        if self._token is not None and not (self._is_open(scope) or any(self._is_token(value) for value in given)):
            raise Refused(401, f"the API key is not this server's; {self.rules.token_remedy}")
        return head

    def _is_open(self, scope: Any) -> bool:
        path, kinds = scope["path"], ("GET", "HEAD")
        return scope["method"] in kinds and any(
            path == one or (one.endswith("/") and one != "/" and path.startswith(one)) for one in self.rules.open_paths
        )

    def _is_ours(self, host: bytes) -> bool:
        name = _name(host.decode("latin-1"))
        return is_loopback(name) or (name != "" and name in (self.rules.host, self.rules.public_host))

    def _is_token(self, value: bytes) -> bool:
        assert self._token is not None
        scheme, _, bearer = value.partition(b" ")
        key = (bearer.strip() if scheme.lower() == b"bearer" else value).decode("latin-1").encode()
        size = len(self._token)
        # compare_digest first: the time of the comparison must not depend on the key
        return hmac.compare_digest(key[:size], self._token) and key[size : size + 1] in (b"", b":")

    def _check_body(self, head: Mapping[bytes, bytes], body: bytes) -> None:
        if not body:
            return
        kind = head.get(b"content-type", b"").partition(b";")[0].strip().lower().decode("latin-1")
        if kind not in self.rules.body_types:
            wanted = " or ".join(self.rules.body_types)
            raise Refused(415, f'the Content-Type of the body is "{kind[:80]}"; send {wanted}')
        if head.get(b"content-encoding", b"identity").strip().lower() != b"identity":
            raise Refused(415, "this server reads bodies that are not compressed; send it without Content-Encoding")

    async def _body(self, receive: Receive) -> bytes:
        most = self._most
        size, body, more = 0, bytearray(), True
        try:
            while more and size <= _DISCARDED * most:
                piece, more = await _next(receive)
                size += len(piece)
                if size <= most:
                    body += piece
                    self._held += len(piece)
                if self._held > max(_HELD, 4 * most):
                    raise Refused(503, "this server is reading too many requests; try again")
        finally:
            self._held -= len(body)
        if size > most:
            raise Refused(413, f"the body is larger than {self.rules.max_body_mb:g} MB; {self.rules.body_remedy}")
        return bytes(body)

    async def _answer(self, scope: Any, receive: Receive, send: Send, refused: Refused) -> None:
        if refused.status in (401, 403):  # read some of the body: closing with unread data would discard the answer
            with contextlib.suppress(TimeoutError, ConnectionError):
                async with asyncio.timeout(_DISCARDED_S):
                    size, more = 0, True
                    while more and size < _DISCARDED_REFUSED:
                        piece, more = await _next(receive)
                        size += len(piece)
        form, headers = self.rules.refuse(scope["path"], refused.status, str(refused))
        body = json.dumps(form).encode()
        named = {"content-type": JSON, "content-length": str(len(body)), "connection": "close", **headers}
        pairs = [(name.encode(), value.encode()) for name, value in named.items()]
        await send({"type": "http.response.start", "status": refused.status, "headers": pairs})
        await send({"type": "http.response.body", "body": body})


class _Read:
    """`receive` for a request whose body has been read."""

    __slots__ = ("_body", "_receive")

    def __init__(self, body: bytes, receive: Receive) -> None:
        self._body: bytes | None = body
        self._receive = receive

    async def __call__(self) -> Message:
        if self._body is None:
            return await self._receive()
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}


async def _next(receive: Receive) -> tuple[bytes, bool]:
    message = await receive()
    if message["type"] == "http.disconnect":
        raise ConnectionError
    return message.get("body", b""), message.get("more_body", False)


def _name(host: str) -> str:
    """The name in a Host header, without the port; empty if it is not a name and a port."""
    found = _HOST.fullmatch(host)
    return (found[1] or found[2]).lower().removesuffix(".") if found else ""


def _is_same(origin: bytes, host: bytes) -> bool:
    try:
        return urlsplit(origin.decode("latin-1")).netloc.lower() == host.decode("latin-1").lower() != ""
    except ValueError:
        return False


def _shown(value: bytes) -> str:
    return value[:80].decode("latin-1")


class _Connection(H11Protocol):
    """A connection with deadlines for headers, body and reading the answer; refused if there are too many."""

    def __init__(self, config: uvicorn.Config, *given: Any, **named: Any) -> None:
        super().__init__(config, *given, **named)
        guard = config.app
        assert isinstance(guard, Guard)
        self._rules = guard.rules
        self._read_late: asyncio.TimerHandle | None = None
        self._write_late: asyncio.TimerHandle | None = None
        self._body_until: float | None = None  # while a body is awaited

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._rules.max_connections:
            self._end("503 Service Unavailable")
        else:
            self._await(self._rules.head_s)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        # a request that arrived completely has neither state, and costs no timer
        if self.conn.their_state is h11.SEND_BODY:
            if self._body_until is None:
                self._body_until = self.loop.time() + self._rules.body_s
                self._await(self._rules.body_s)
            self._body_until += len(data) / _SLOWEST
        elif self.conn.their_state is h11.IDLE:
            if self._read_late is None and self.timeout_keep_alive_task is None:  # a part of the next headers
                self._await(self._rules.head_s)
        elif self._read_late is not None:
            self._read_late, self._body_until = _cancelled(self._read_late), None

    def connection_lost(self, exc: Exception | None) -> None:
        self._read_late = _cancelled(self._read_late)
        self._write_late = _cancelled(self._write_late)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._abort_soon()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._write_late = _cancelled(self._write_late)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing() and self.transport.get_write_buffer_size():
            self._abort_soon()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._abort_soon()

    def _await(self, seconds: float) -> None:
        _cancelled(self._read_late)
        self._read_late = self.loop.call_later(seconds, self._too_late)

    def _too_late(self) -> None:
        self._read_late = None
        left_s = 0.0 if self._body_until is None else self._body_until - self.loop.time()
        if left_s > 0:  # more of the body has arrived
            self._await(left_s)
        else:
            self._end("408 Request Timeout")

    def _end(self, status: str) -> None:
        if not self.transport.is_closing():
            self.transport.write(f"HTTP/1.1 {status}\r\nConnection: close\r\nContent-Length: 0\r\n\r\n".encode())
            self.transport.close()
            self._abort_soon()

    def _abort_soon(self) -> None:
        """A closed connection stays until its last bytes are read: abort it after a while."""
        if self._write_late is None:
            self._write_late = self.loop.call_later(self._rules.write_s, self.transport.abort)


def _cancelled(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


class HttpServer(uvicorn.Server):
    """An application behind a guard. Signals are left to the process."""

    def __init__(self, app: Application, rules: Rules) -> None:
        super().__init__(
            uvicorn.Config(
                Guard(app, rules), http=_Connection, lifespan="off", ws="none", loop="none", log_config=None,
                log_level="warning", access_log=False, server_header=False, date_header=False, proxy_headers=False,
                timeout_keep_alive=rules.idle_s, timeout_graceful_shutdown=1,
            )
        )  # fmt: skip

    async def begin(self, listening: socket.socket) -> asyncio.Task[None]:
        """Start to serve. Returns when requests are answered, with a task that ends with the server."""
        serving = asyncio.create_task(self._serve_until_stopped(listening))
        while not (self.started or serving.done()):  # noqa: ASYNC110  (uvicorn has no event for it)
            await asyncio.sleep(0.002)
        if serving.done():
            serving.result()
            raise ConfigError("the server stopped while it was starting")
        return serving

    def stop(self) -> None:
        """Stop after the running requests are answered."""
        self.should_exit = True

    async def _serve_until_stopped(self, listening: socket.socket) -> None:
        """Serve until `stop`, or until the event loop ends and cancels this."""
        try:
            await self.serve([listening])
        finally:
            for listener in getattr(self, "servers", ()):
                listener.close()
            for connection in list(self.server_state.connections):
                if connection.transport is not None:
                    connection.transport.abort()
            listening.close()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
