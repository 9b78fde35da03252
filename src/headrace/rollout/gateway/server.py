"""The HTTP server: one per event loop, started by the first session."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import socket
from collections.abc import AsyncIterator
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from headrace.config import GatewaySection
from headrace.errors import ConfigError
from headrace.rollout.gateway.anthropic import Messages, read_conversation
from headrace.rollout.gateway.chat import ChatCompletions
from headrace.rollout.gateway.completions import Completions
from headrace.rollout.gateway.responding import NO_RETRY, disconnected, frame, respond, retry_headers
from headrace.rollout.gateway.responses import Responses
from headrace.rollout.gateway.session import Session
from headrace.rollout.gateway.stream import EventStream
from headrace.rollout.gateway.wire import ApiFormat, Call, Fields, Identity, Refusal, Reply, openai_error, parse_json
from headrace.rollout.model_client import Model
from headrace.utils.http_server import HttpServer, Rules, listen

log = logging.getLogger("headrace")

API_FORMATS: tuple[ApiFormat, ...] = (ChatCompletions(), Completions(), Responses(), Messages())
_DRAIN_S = 1.0  # for answers that are being sent when the server stops
_WHO = "the gateway"


class Gateway:
    """The sessions of a process and the server in front of them."""

    def __init__(self, settings: GatewaySection) -> None:
        self._settings = settings
        self._token = _token(settings)
        self._sessions: dict[str, Session] = {}
        self._warned: set[str] = set()
        self._socket: socket.socket | None = None
        self._server: HttpServer | None = None
        self._serving: asyncio.Task[None] | None = None

    @property
    def sessions(self) -> int:
        """Number of open sessions."""
        return len(self._sessions)

    @property
    def api_key(self) -> str:
        """The key that clients must send."""
        return self._token or "headrace"

    def url(self, session: Session) -> str:
        """The URL of a session."""
        assert self._socket is not None
        host = self._settings.public_host or self._settings.host
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        shown = f"[{host}]" if ":" in host else host
        return f"http://{shown}:{self._socket.getsockname()[1]}/s/{session.id}"

    def open(self, model: Model) -> Session:
        """A session for an episode's model."""
        session = Session(model, self._warn_once)
        self._sessions[session.id] = session
        return session

    async def drop(self, session: Session) -> None:
        """End a session and cancel its running calls."""
        self._sessions.pop(session.id, None)
        await session.close()

    async def start(self) -> None:
        """Start to listen."""
        self._socket = _listen(self._settings)
        self._server = HttpServer(self._app(), self._rules())
        self._serving = await self._server.begin(self._socket)
        self._serving.add_done_callback(lambda _: _forget(self))

    async def close(self) -> None:
        """End all sessions and stop the server."""
        for session in list(self._sessions.values()):
            await self.drop(session)
        if self._server is None or self._serving is None:
            return
        answering = self._server.server_state.tasks
        if answering:
            await asyncio.wait(set(answering), timeout=_DRAIN_S)
        self._serving.cancel()  # an orderly shutdown takes a tenth of a second or more
        await asyncio.wait({self._serving})

    def _warn_once(self, sentence: str) -> None:
        if sentence not in self._warned:
            self._warned.add(sentence)
            log.warning("%s", sentence)

    def _rules(self) -> Rules:
        settings = self._settings
        return Rules(
            host=settings.host, public_host=settings.public_host, refuse=_refuse, token=self._token or None,
            token_remedy="send gateway.token as API key", max_body_mb=settings.max_body_mb,
            body_remedy="raise gateway.max_body_mb",
        )  # fmt: skip

    # ---- requests ----------------------------------------------------------------------------------------------------

    def _app(self) -> Starlette:
        routes: list[Route] = []
        for prefix in ("/s/{session}", ""):
            for api in API_FORMATS:
                endpoint = partial(respond, api, _WHO, partial(self._answer, api))
                routes.append(Route(prefix + api.path, endpoint, methods=["POST"]))
            count = partial(respond, API_FORMATS[-1], _WHO, self._count_tokens)
            routes.append(Route(f"{prefix}/v1/messages/count_tokens", count, methods=["POST"]))
            models = partial(respond, API_FORMATS[0], _WHO, self._models)
            routes.append(Route(f"{prefix}/v1/models", models, methods=["GET"]))
        app = Starlette(routes=routes, exception_handlers={HTTPException: _no_such_route})
        app.router.redirect_slashes = False
        return app

    async def _answer(self, api: ApiFormat, request: Request) -> Response:
        session = self._session_of(request)
        raw = await request.body()
        warn = session.warn_once if self._settings.unsupported == "warn" else None
        call = api.read(Fields(parse_json(raw), warn=warn), session)
        task = session.start(call, _identity(request, raw))
        gone = asyncio.create_task(disconnected(request))
        streaming = False
        try:
            wait_s = self._settings.keep_alive_s if call.stream else None
            await asyncio.wait({task, gone}, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
            if call.stream and not gone.done():
                if task.done():
                    _result(task)  # raises now, while the status code can still report a failure
                streaming = True
                return EventStream(self._frames(api, call, task), gone, task)
            if not task.done():
                return Response(status_code=499)  # the client has disconnected
            return JSONResponse(api.response(call, _result(task)))
        finally:
            if not streaming:
                gone.cancel()
                task.cancel()  # no effect if it is done

    async def _frames(self, api: ApiFormat, call: Call, task: asyncio.Task[Reply]) -> AsyncIterator[bytes]:
        """The bytes of a stream: comments while the model samples, then the complete reply in a few events."""
        while not task.done():
            await asyncio.wait({task}, timeout=self._settings.keep_alive_s)
            if not task.done():
                yield b": sampling\n\n"
        try:
            reply = _result(task)
        except Refusal as refusal:
            yield frame(*api.error_event(refusal))
            return
        yield b"".join(frame(name, data) for name, data in api.events(call, reply))

    async def _count_tokens(self, request: Request) -> Response:
        session = self._session_of(request)
        fields = Fields(parse_json(await request.body()))
        messages, tools = read_conversation(fields)
        return JSONResponse({"input_tokens": session.count_tokens(messages, tools)})

    async def _models(self, request: Request) -> Response:
        self._session_of(request)
        model = {"id": "headrace/agent", "object": "model", "created": 0, "owned_by": "headrace"}
        return JSONResponse({"object": "list", "data": [model]})

    def _session_of(self, request: Request) -> Session:
        """The session named by the URL or, if it names none, by the API key (after the token, if there is one)."""
        scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
        key = bearer.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")
        name = request.path_params.get("session")
        if name is None:
            name = key.rpartition(":")[2]
        session = self._sessions.get(name)
        if session is None:
            known = "path" if request.path_params else "API key"
            status = 404 if request.path_params else 401
            raise Refusal(status, f"the {known} names no open session; a session ends with its episode", "no_session")
        return session


_running: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Task[Gateway]] = WeakKeyDictionary()


async def running(settings: GatewaySection) -> Gateway:
    """The gateway of this event loop."""
    loop = asyncio.get_running_loop()
    if loop not in _running:
        _running[loop] = loop.create_task(_started(settings))
    starting = _running[loop]
    try:
        return await asyncio.shield(starting)
    except Exception:
        if _running.get(loop) is starting:
            del _running[loop]
        raise


async def close_running() -> None:
    """End the gateway of this event loop, if there is one."""
    starting = _running.pop(asyncio.get_running_loop(), None)
    if starting is not None:
        with contextlib.suppress(ConfigError):  # it never started
            await (await starting).close()


def _forget(gateway: Gateway) -> None:
    """Remove a stopped gateway: it would keep its event loop alive."""
    loop = asyncio.get_running_loop()
    known = _running.get(loop)
    if known is None or not known.done() or known.cancelled() or known.exception() is not None:
        return
    if known.result() is gateway:
        del _running[loop]


async def _started(settings: GatewaySection) -> Gateway:
    gateway = Gateway(settings)
    await gateway.start()
    return gateway


def _token(settings: GatewaySection) -> str:
    """The token itself; "$NAME" stands for a variable, so that no secret is written into a run's folder."""
    token = settings.token or ""
    if not token.startswith("$"):
        return token
    found = os.environ.get(token[1:], "")
    if not found:
        raise ConfigError(f'gateway.token is "{token}", and the environment has no such variable; set it')
    return found


def _listen(settings: GatewaySection) -> socket.socket:
    return listen(settings.host, settings.port, "the gateway", "change gateway.host or gateway.port")


def _refuse(path: str, status: int, sentence: str) -> tuple[dict[str, Any], dict[str, str]]:
    """The answer to a request that reaches no route, in the format of the API it was meant for."""
    api = next((one for one in API_FORMATS if path.endswith(one.path)), API_FORMATS[0])
    return api.error(Refusal(status, sentence)), retry_headers(status)


def _identity(request: Request, raw: bytes) -> Identity:
    """Use the client's idempotency key. The clients of OpenAI and Anthropic send none, but count their retries."""
    key = request.headers.get("idempotency-key")
    if key:
        return Identity(f"key {key}", unique=True, retried=True)
    path: str = request.scope["path"]
    digest = hashlib.blake2b(path.encode() + b"\0" + raw, digest_size=16).hexdigest()
    return Identity(digest, unique=False, retried=request.headers.get("x-stainless-retry-count", "0") not in ("0", ""))


def _result(task: asyncio.Task[Reply]) -> Reply:
    if task.cancelled():
        raise Refusal(404, "the session has ended, and the call with it", "no_session")
    return task.result()


async def _no_such_route(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    known = ", ".join(api.path for api in API_FORMATS)
    refusal = Refusal(status, f"there is no such route ({status}); POST to {known}, under the session's URL")
    return JSONResponse(openai_error(refusal), status, NO_RETRY)
