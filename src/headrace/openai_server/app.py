"""The routes of `headrace serve openai`, and how they answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from functools import partial
from typing import Any, Protocol

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from headrace.errors import HeadraceError, first_of
from headrace.openai_server.answers import Answer
from headrace.openai_server.generate import TokenAnswer, read_token_request
from headrace.openai_server.options import OpenAIOptions
from headrace.openai_server.sampling import read_request
from headrace.openai_server.served import Served
from headrace.rollout.gateway.chat import ChatCompletions
from headrace.rollout.gateway.completions import Completions
from headrace.rollout.gateway.responding import NO_RETRY, disconnected, frame, respond, retry_headers
from headrace.rollout.gateway.stream import EventStream
from headrace.rollout.gateway.wire import Refusal, openai_error, refusal_of
from headrace.utils.http_server import Rules

_WHO = "the server"
_CHAT, _COMPLETE = ChatCompletions(), Completions()
_END = b""
_GENERATE = "/inference/v1/generate"
_PATHS = f"POST to {_CHAT.path}, {_COMPLETE.path} or {_GENERATE}, or GET /v1/models"


class StreamedOrWhole(Protocol):
    """An answer that can be given either way."""

    frames: asyncio.Queue[bytes]

    async def complete(self) -> dict[str, Any]: ...
    async def stream(self) -> None: ...


class Routes:
    """Turns requests into calls of the engine."""

    def __init__(self, served: Served, options: OpenAIOptions) -> None:
        self._served, self._options = served, options
        self._created = int(time.time())

    def app(self) -> Starlette:
        """The application."""
        endpoints = {
            ("POST", _CHAT.path): partial(self._answer, _CHAT),
            ("POST", _COMPLETE.path): partial(self._answer, _COMPLETE),
            ("POST", _GENERATE): self._generate,
            ("GET", "/v1/models"): self._models,
            ("GET", "/v1/models/{name:path}"): self._model,
            ("GET", "/health"): self._health,
        }
        routes = [
            Route(path, partial(respond, _CHAT, _WHO, endpoint), methods=[method])
            for (method, path), endpoint in endpoints.items()
        ]
        app = Starlette(routes=routes, exception_handlers={HTTPException: _no_such_route})
        app.router.redirect_slashes = False
        return app

    def rules(self) -> Rules:
        """Who may ask, and how much at once."""
        options = self._options
        return Rules(
            host=options.host, public_host=options.public_host, token=options.api_key,
            token_remedy="send what --api-key says", refuse=_refuse, max_body_mb=options.max_body_mb,
            body_remedy="raise --max-body-mb",
        )  # fmt: skip

    async def _answer(self, api: ChatCompletions, request: Request) -> Response:
        asked = read_request(api, await request.body(), self._served, self._options.max_tokens)
        return await self._given(request, Answer(api, self._served, asked), asked.call.stream, len(asked.seeds))

    async def _generate(self, request: Request) -> Response:
        wanted = read_token_request(await request.body(), self._served, self._options.max_tokens)
        answer = TokenAnswer(self._served, wanted)
        return await self._given(request, answer, wanted.stream, len(wanted.asked.seeds))

    async def _given(self, request: Request, answer: StreamedOrWhole, streams: bool, count: int) -> Response:
        """Answer; a client that disconnects frees its slots in the engine."""
        self._require_room(count)
        call: asyncio.Task[Any] = asyncio.create_task(_unwrapped(answer.stream() if streams else answer.complete()))
        call.add_done_callback(lambda _: answer.frames.put_nowait(_END))
        gone = asyncio.create_task(disconnected(request))
        first = asyncio.create_task(answer.frames.get())
        response: Response | None = None
        try:
            wait_s = self._options.keep_alive_s if streams else None
            await asyncio.wait({first, gone}, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
            if gone.done() and not first.done():
                return Response(status_code=499)
            if not streams or (first.done() and first.result() == _END):
                return JSONResponse(await call)  # raises what a status code can still report
            response = EventStream(self._frames(answer.frames, first, call), gone, call)
            return response
        finally:
            if response is None:
                for task in (gone, first, call):
                    task.cancel()  # no effect if it is done

    async def _frames(
        self, frames: asyncio.Queue[bytes], waiting: asyncio.Task[bytes], call: asyncio.Task[Any]
    ) -> AsyncIterator[bytes]:
        """What is sampled, as it is; comments while nothing is."""
        try:
            while True:
                await asyncio.wait({waiting}, timeout=self._options.keep_alive_s)
                if not waiting.done():
                    yield b": sampling\n\n"
                    continue
                if waiting.result() == _END:
                    break
                yield waiting.result()
                waiting = asyncio.create_task(frames.get())
        finally:
            waiting.cancel()
        if call.cancelled():  # the client has disconnected
            return
        try:
            await call
        except HeadraceError as error:
            yield frame(*_CHAT.error_event(refusal_of(error)))

    def _require_room(self, count: int) -> None:
        waiting = self._served.engine.health().waiting
        if waiting and waiting + count > self._options.max_waiting:
            said = f"{waiting} sequences wait already; try again later, or raise --max-waiting"
            raise Refusal(429, said, "too_many_requests")

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def _model(self, request: Request) -> Response:
        if request.path_params["name"] != self._served.name:
            raise Refusal(404, f'this server has only "{self._served.name}"', "model_not_found")
        return JSONResponse(self._card())

    def _card(self) -> dict[str, Any]:
        card = {"id": self._served.name, "object": "model", "created": self._created, "owned_by": "headrace"}
        return {**card, "max_model_len": self._served.max_length, "version": self._served.version}

    async def _health(self, request: Request) -> Response:
        health = self._served.engine.health()
        status = 200 if health.alive and health.error is None else 503
        return JSONResponse({"running": health.running, "waiting": health.waiting, "error": health.error}, status)


async def _unwrapped(work: Any) -> Any:
    """The exception that ended a TaskGroup, alone."""
    try:
        return await work
    except BaseExceptionGroup as group:
        error = first_of(group)
        raise error from error.__cause__


def _refuse(path: str, status: int, sentence: str) -> tuple[dict[str, Any], dict[str, str]]:
    return openai_error(Refusal(status, sentence)), retry_headers(status)


async def _no_such_route(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    refusal = Refusal(status, f"this server has no {request.method} {request.url.path[:200]}; {_PATHS}")
    return JSONResponse(openai_error(refusal), status, NO_RETRY)
