"""The application: pages as JSON under /api, events of what is live, and the files of the page."""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import AsyncIterator, Callable, Mapping
from importlib.resources import files
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.convertors import Convertor, register_url_convertor
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from headrace.errors import ConfigError, HeadraceError
from headrace.utils.http_server import Rules
from headrace.viewer.batches import group_page, step_page, steps_page
from headrace.viewer.cache import PageCache
from headrace.viewer.cases import case_of
from headrace.viewer.comparison import compare_page, evaluation_page
from headrace.viewer.episodes import episode_page, evaluated_page
from headrace.viewer.options import ViewOptions
from headrace.viewer.overview import account_page, metrics_page, run_page, runs_page
from headrace.viewer.search import Filters, facets_page, search_page
from headrace.viewer.store import Missing, RunShelf, RunView
from headrace.viewer.timeline import timeline_page

log = logging.getLogger("headrace")

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
_KINDS = {
    ".js": "text/javascript",
    ".css": "text/css",
    ".html": "text/html",
    ".svg": "image/svg+xml",
    ".txt": "text/plain",
}
_LIVE_S = 1.0  # how often a run is looked at while somebody watches it
_SILENT_S = 15.0  # after which a line keeps the connection alive
_MOST = 2**63 - 1  # that SQLite can hold
Page = Callable[[RunView, Request], Any]


class _Count(Convertor[int]):
    """A number in a path, of as many digits as SQLite can hold: there is no page for a larger one."""

    regex = "[0-9]{1,18}"

    def convert(self, value: str) -> int:
        return int(value)

    def to_string(self, value: int) -> str:
        return str(value)


register_url_convertor("count", _Count())


class Viewer:
    """Turns requests into pages of the runs on a shelf."""

    def __init__(self, shelf: RunShelf, options: ViewOptions) -> None:
        self._shelf = shelf
        self._options = options
        self._cache = PageCache()
        self.closing = asyncio.Event()

    def app(self) -> Starlette:
        """The application."""
        pages: dict[str, Page] = {
            "": lambda view, _: run_page(view),
            "/metrics": _metrics,
            "/account": lambda view, request: account_page(view, _number(request, "points", 400)),
            "/steps": lambda view, r: steps_page(view, _number(r, "before", None), _number(r, "limit", 100)),
            "/steps/{step:count}": lambda view, r: step_page(view, r.path_params["step"]),
            "/groups/{group:count}": lambda view, r: group_page(view, r.path_params["group"]),
            "/groups/{group:count}/rollouts/{rollout:count}": _episode,
            "/evaluated/{id:count}": lambda view, r: evaluated_page(view, r.path_params["id"]),
            "/evaluations/{step:count}/{set:path}": lambda view, r: evaluation_page(
                view, r.path_params["step"], r.path_params["set"]
            ),
            "/timeline": lambda view, r: timeline_page(view, _seconds(r, "start"), _seconds(r, "end")),
            "/episodes": _episodes,
            "/facets": lambda view, _: facets_page(view),
        }
        routes = [Route(f"/api/runs/{{run}}{path}", self._page(page)) for path, page in pages.items()]
        routes += [
            Route("/api/runs", self._json(lambda _: runs_page(self._shelf))),
            Route("/api/compare", self._json(self._compare)),
            Route("/api/runs/{run}/events", self._events),
            Route("/api/runs/{run}/groups/{group:count}/rollouts/{rollout:count}/test_case", self._test_case),
            Route("/", self._asset),
            Route("/assets/{name:path}", self._asset),
        ]
        return Starlette(routes=routes, exception_handlers={HTTPException: _no_such_route})

    def rules(self) -> Rules:
        """Who may ask. The page itself holds nothing of a run: it needs no token, and sends it with what it asks."""
        options = self._options
        return Rules(
            host=options.host, token=options.token, token_remedy="open the URL that headrace view printed",
            refuse=lambda *why: ({"error": why[-1]}, {}), public_host=options.public_host, max_body_mb=1.0,
            body_remedy="the viewer reads no large bodies", open_paths=("/", "/assets/"),
        )  # fmt: skip

    # ---- pages ------------------------------------------------------------------------------------------------------

    def _page(self, page: Page) -> Callable[[Request], Any]:
        async def endpoint(request: Request) -> Response:
            def answer(_: Request) -> bytes:
                view = self._shelf.run(request.path_params["run"])
                return self._cache.get(
                    (view.id, str(request.url.path), str(request.url.query)),
                    view.revision(),
                    lambda: _packed(page(view, request)),
                )

            return await self._answered(answer, request)

        return endpoint

    def _json(self, answer: Callable[[Request], Any]) -> Callable[[Request], Any]:
        async def endpoint(request: Request) -> Response:
            return await self._answered(lambda asked: _packed(answer(asked)), request)

        return endpoint

    def _compare(self, request: Request) -> Any:
        query = request.query_params
        return compare_page(self._shelf, query.get("a", ""), query.get("b", ""), query.get("set") or None)

    async def _test_case(self, request: Request) -> Response:
        name = ""

        def answer(_: Request) -> bytes:
            nonlocal name
            place = request.path_params
            view = self._shelf.run(place["run"])
            name, content = case_of(view, place["group"], place["rollout"], _number(request, "attempt", None))
            return content.encode()

        made = await self._answered(answer, request)
        if made.status_code == 200:
            made.headers["Content-Type"] = "text/x-python; charset=utf-8"
            made.headers["Content-Disposition"] = f'attachment; filename="{name}"'
        return made

    async def _answered(self, answer: Callable[[Request], bytes], request: Request) -> Response:
        try:
            body = await run_in_threadpool(answer, request)
        except Missing as missing:
            return _refusal(404, str(missing))
        except ConfigError as error:
            return _refusal(400, str(error))
        except HeadraceError as error:  # a damaged record: the page shows the reason
            return _refusal(422, str(error))
        except Exception as error:
            log.exception("the viewer failed to answer %s", request.url.path)
            return _refusal(500, f"the viewer failed: {type(error).__name__}: {error}")
        return Response(body, headers=HEADERS, media_type="application/json")

    # ---- what is live -----------------------------------------------------------------------------------------------

    async def _events(self, request: Request) -> Response:
        try:
            view = await run_in_threadpool(self._shelf.run, request.path_params["run"])
        except Missing as missing:
            return _refusal(404, str(missing))
        return StreamingResponse(self._changes(view), headers=HEADERS, media_type="text/event-stream")

    async def _changes(self, view: RunView) -> AsyncIterator[str]:
        """An event whenever the run has changed; nothing is read for it but the times of its files."""
        known: tuple[Any, ...] | None = None
        silent_s = 0.0
        while not self.closing.is_set():
            now = await run_in_threadpool(view.revision)
            if now != known:
                known, silent_s = now, 0.0
                yield f"event: change\ndata: {json.dumps({'state': view.state().word})}\n\n"
            elif silent_s >= _SILENT_S:
                silent_s = 0.0
                yield ": nothing new\n\n"
            silent_s += _LIVE_S
            try:
                await asyncio.wait_for(self.closing.wait(), _LIVE_S)
            except TimeoutError:
                continue

    # ---- files ------------------------------------------------------------------------------------------------------

    async def _asset(self, request: Request) -> Response:
        name = request.path_params.get("name", "index.html")
        content = asset(name)
        if content is None:
            return _refusal(404, f"there is no {name}")
        kind = _KINDS["." + name.rpartition(".")[2]]
        return Response(content, headers=HEADERS, media_type=kind)


def asset(name: str) -> bytes | None:
    """A file of the page; None for what is none."""
    if name not in asset_names():
        return None
    return files("headrace.viewer").joinpath("assets", *name.split("/")).read_bytes()


def asset_names() -> tuple[str, ...]:
    """The files of the page: those in its folder whose kind is known."""
    root = files("headrace.viewer").joinpath("assets")
    found = [(entry.name, entry) for entry in root.iterdir()]
    inner = [(f"{name}/{one.name}", one) for name, entry in found if entry.is_dir() for one in entry.iterdir()]
    return tuple(
        name for name, entry in (*found, *inner) if entry.is_file() and "." + name.rpartition(".")[2] in _KINDS
    )


def _packed(page: Any) -> bytes:
    """JSON that any browser reads: half a surrogate pair is escaped, NaN is null."""
    return json.dumps(page, separators=(",", ":"), allow_nan=False).encode()


def _refusal(status: int, why: str) -> JSONResponse:
    return JSONResponse({"error": why}, status, headers=HEADERS)


async def _no_such_route(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    return _refusal(status, f"the viewer has no {request.method} {request.url.path}")


def _number(request: Request, name: str, default: int | None) -> Any:
    value = request.query_params.get(name, "")
    if value == "":
        return default
    try:
        found = int(value)
    except ValueError:
        raise ConfigError(f'"{name}" must be a whole number, got "{value[:80]}"') from None
    if abs(found) > _MOST:
        raise ConfigError(f'"{name}" must be at most {_MOST}, got "{value[:80]}"')
    return found


def _seconds(request: Request, name: str) -> float | None:
    value = request.query_params.get(name, "")
    try:
        found = float(value) if value else None
    except ValueError:
        found = math.nan
    if found is not None and not math.isfinite(found):
        raise ConfigError(f'"{name}" must be a time in seconds, got "{value[:80]}"')
    return found


def _metrics(view: RunView, request: Request) -> Any:
    keys = [key for key in request.query_params.get("keys", "").split(",") if key]
    return metrics_page(view, keys, _number(request, "after", -1), _number(request, "points", 1000))


def _episode(view: RunView, request: Request) -> Any:
    place = request.path_params
    return episode_page(view, place["group"], place["rollout"], _number(request, "attempt", None))


def _episodes(view: RunView, request: Request) -> Any:
    query: Mapping[str, str] = request.query_params
    return search_page(view, Filters.from_query(query), _number(request, "before", None), _number(request, "limit", 50))
