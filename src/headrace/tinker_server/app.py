"""The routes of the Tinker API, and how they answer."""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from tinker import types

from headrace.errors import HeadraceError
from headrace.tinker_server.catalogue import Catalogue
from headrace.tinker_server.checks import digest
from headrace.tinker_server.options import Refusal
from headrace.tinker_server.sample_request import start_sample
from headrace.tinker_server.service import Service
from headrace.tinker_server.wire import read_json
from headrace.utils.http_server import JSON, PROTOBUF, Rules

log = logging.getLogger("headrace")

_POLL_S = 20.0  # the SDK hangs up after 45
_CLIENT_CONFIG = {
    "pjwt_auth_enabled": False,
    "parallel_fwdbwd_chunks": True,
    "proto_compress_fwdbwd": False,
    "create_model_via_load_weights": False,
    "sample_use_retrieve_futures": False,
    "custom_loss_server_side": False,
    "use_pyqwest_transport": False,
}
_DYNAMIC_CONFIG = {"sample_cancel_enabled": True}
Answer = Callable[[Request, bytes], Awaitable[Any]]


class Routes:
    """Turns requests into calls of the service."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._catalogue = Catalogue(service)

    def app(self) -> Starlette:
        """The application."""
        service, catalogue = self._service, self._catalogue
        table: list[tuple[str, str, Answer]] = [
            ("GET", "healthz", _plain(lambda: {"status": "ok"})),
            ("POST", "telemetry", _plain(lambda: {"status": "accepted"})),
            ("POST", "client/config", _plain(lambda: _CLIENT_CONFIG)),
            ("POST", "client/dynamic_config", _plain(lambda: _DYNAMIC_CONFIG)),
            ("GET", "get_server_capabilities", _plain(catalogue.capabilities)),
            ("POST", "create_session", _typed(types.CreateSessionRequest, service.create_session)),
            ("POST", "session_heartbeat", _typed(types.SessionHeartbeatRequest, _heart(service))),
            ("POST", "create_model", _raw(types.CreateModelRequest, service.create_model)),
            ("POST", "forward_backward", self._forward_backward),
            ("POST", "forward", self._forward_backward),
            ("POST", "optim_step", _raw(types.OptimStepRequest, service.optim_step)),
            ("POST", "save_weights", _raw(types.SaveWeightsRequest, service.save_weights)),
            ("POST", "save_weights_for_sampler", _raw(types.SaveWeightsForSamplerRequest, service.save_for_sampler)),
            ("POST", "load_weights", _raw(types.LoadWeightsRequest, service.load_weights)),
            (
                "POST",
                "unload_model",
                _typed(types.UnloadModelRequest, lambda one: service.unload(one.model_id)),
            ),
            ("POST", "create_sampling_session", _typed(_CreateSampling, service.create_sampling_session)),
            ("POST", "asample", self._sample),
            ("POST", "retrieve_future", self._retrieve),
            ("POST", "cancel_future", self._cancel),
            ("POST", "get_info", _typed(types.GetInfoRequest, lambda request: catalogue.info(request.model_id))),
            ("POST", "weights_info", self._weights_info),
            *catalogue.routes(),
        ]
        routes = [Route(f"/api/v1/{path}", self._told(answer), methods=[method]) for method, path, answer in table]
        app = Starlette(routes=routes, exception_handlers={HTTPException: _no_such_route})
        app.router.redirect_slashes = False
        return app

    def rules(self) -> Rules:
        """Who may ask, and how much at once."""
        options = self._service.options
        return Rules(
            host=options.host, public_host=options.public_host, token=options.api_key,
            token_remedy="set TINKER_API_KEY to what --api-key says", refuse=lambda *why: ({"detail": why[-1]}, {}),
            body_types=(JSON, PROTOBUF), max_body_mb=options.max_body_mb, body_remedy="raise --max-body-mb",
        )  # fmt: skip

    def _told(self, answer: Answer) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            try:
                found = await answer(request, await request.body())
                if isinstance(found, Response):
                    return found
                return Response(status_code=204) if found is None else JSONResponse(found)
            except ClientDisconnect:
                return Response(status_code=499)
            except Refusal as refusal:
                return JSONResponse({"detail": str(refusal)}, refusal.status)
            except HeadraceError as error:
                return JSONResponse({"detail": str(error)}, 400)
            except Exception as error:  # a fault of the server: logged here, and reported to the client
                log.exception("the server failed to answer a request")
                return JSONResponse({"detail": f"the server failed: {type(error).__name__}: {error}"}, 500)

        return endpoint

    async def _forward_backward(self, request: Request, raw: bytes) -> Any:
        return self._service.forward_backward(raw)

    async def _sample(self, request: Request, raw: bytes) -> Any:
        return start_sample(self._service, read_json(types.SampleRequest, raw), digest(raw))

    async def _retrieve(self, request: Request, raw: bytes) -> Any:
        wanted = read_json(types.FutureRetrieveRequest, raw)
        outcome = await self._service.outcome(wanted.request_id, _POLL_S)
        if outcome is None:  # the SDK tries again at once
            pending = {"type": "try_again", "request_id": wanted.request_id, "queue_state": "active"}
            return JSONResponse(pending, 408)
        return Response(outcome.body, media_type=outcome.media_type)

    async def _cancel(self, request: Request, raw: bytes) -> Any:
        self._service.promises.cancel(_field(raw, "request_id"))

    async def _weights_info(self, request: Request, raw: bytes) -> Any:
        return self._catalogue.weights_info(_field(raw, "tinker_path"))


_CreateSampling = types.CreateSamplingSessionRequest


def _plain(function: Callable[[], Any]) -> Answer:
    async def answer(request: Request, raw: bytes) -> Any:
        return function()

    return answer


def _typed(kind: Any, function: Callable[[Any], Any]) -> Answer:
    async def answer(request: Request, raw: bytes) -> Any:
        return function(read_json(kind, raw))

    return answer


def _raw(kind: Any, function: Callable[[Any, bytes], Any]) -> Answer:
    async def answer(request: Request, raw: bytes) -> Any:
        return function(read_json(kind, raw), raw)

    return answer


def _heart(service: Service) -> Callable[[Any], Any]:
    return lambda request: service.heartbeat(request.session_id)


def _field(raw: bytes, name: str) -> str:
    try:
        found = json.loads(raw)[name]
    except (ValueError, KeyError, TypeError):
        found = None
    if not isinstance(found, str):
        raise Refusal(f'the body must be an object with the text "{name}"')
    return found


async def _no_such_route(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    return JSONResponse({"detail": f"this server has no {request.method} {request.url.path}"}, status)
