"""Starting a server, and ending it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from headrace.tinker_server.app import Routes
from headrace.tinker_server.options import ServeOptions
from headrace.tinker_server.service import Service
from headrace.tracking.terminal import working
from headrace.utils.http_server import HttpServer, listen
from headrace.utils.interrupts import on_interrupt
from headrace.utils.server_thread import Started, server_in_thread

log = logging.getLogger("headrace")

Ready = Callable[[Service, HttpServer], AbstractContextManager[None]]


def serve_tinker(options: ServeOptions, report: Callable[[str], None]) -> None:
    """Serve until interrupted; `report` gets the lines that people are to see."""
    logging.basicConfig(format="%(levelname)s: %(message)s")
    listening = _listen(options)

    @contextmanager
    def ready(service: Service, server: HttpServer) -> Iterator[None]:
        with on_interrupt(server.stop):  # a second one does not wait for what is under way
            for line in start_lines(options, url_of(options, listening), service):
                report(line)
            yield

    asyncio.run(_serve(options, listening, ready))
    report("stopped")


@contextmanager
def running(options: ServeOptions) -> Iterator[str]:
    """A server in a thread of this process, and its URL."""
    listening = _listen(options)

    async def serve(started: Started) -> None:
        @contextmanager
        def ready(_: Service, server: HttpServer) -> Iterator[None]:
            started(server.stop)
            yield

        await _serve(options, listening, ready)

    with server_in_thread("headrace-serve", serve):
        yield url_of(options, listening)


async def _serve(options: ServeOptions, listening: socket.socket, ready: Ready) -> None:
    with working(f"loading the model {options.model}"):  # on standard error: the first line of output is the URL
        service = Service(options)
    routes = Routes(service)
    server = HttpServer(routes.app(), routes.rules())
    serving = await server.begin(listening)
    reaping = asyncio.create_task(_end_silent_sessions(service))
    try:
        with ready(service, server):
            await serving
    finally:
        reaping.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await reaping
        await service.close()


async def _end_silent_sessions(service: Service) -> None:
    pause_s = min(2.0, service.options.session_timeout_s / 4)
    while True:
        due = time.monotonic() + pause_s
        await asyncio.sleep(pause_s)
        for session in service.end_silent_sessions(max(0.0, time.monotonic() - due)):
            log.warning("session %s gave no sign of life and was ended", session)


def url_of(options: ServeOptions, listening: socket.socket) -> str:
    """Where clients find the server."""
    host = {"0.0.0.0": socket.gethostname(), "::": socket.gethostname()}.get(options.host, options.host)
    return f"http://{f'[{host}]' if ':' in host else host}:{listening.getsockname()[1]}"


def start_lines(options: ServeOptions, url: str, service: Service) -> list[str]:
    """What people need to know to use the server."""
    key = "..." if options.api_key else "tml-local"  # a key does not belong on the screen
    return [
        f'serving "{service.base.name}" at {url}; checkpoints in {options.folder.resolve()}; Ctrl-C ends',
        f"clients need TINKER_BASE_URL={url} TINKER_API_KEY={key} TINKER_TELEMETRY=0",
    ]


def _listen(options: ServeOptions) -> socket.socket:
    return listen(options.host, options.port, "the server", "change --host or --port")
