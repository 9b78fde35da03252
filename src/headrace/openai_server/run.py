"""Starting the server, and ending it."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from headrace.openai_server.app import Routes
from headrace.openai_server.options import OpenAIOptions
from headrace.openai_server.served import Served, open_served, serving_config
from headrace.tracking.terminal import working
from headrace.utils.http_server import HttpServer, listen
from headrace.utils.interrupts import interruptible, on_interrupt
from headrace.utils.server_thread import Started, server_in_thread

Ready = Callable[[Served, HttpServer], AbstractContextManager[None]]


def serve_openai(options: OpenAIOptions, report: Callable[[str], None]) -> None:
    """Serve until interrupted; `report` gets the lines that people are to see."""
    logging.basicConfig(format="%(levelname)s: %(message)s")
    serving_config(options)  # what is wrong with it is found before anything is loaded
    listening = _listen(options)

    @contextmanager
    def ready(served: Served, server: HttpServer) -> Iterator[None]:
        with on_interrupt(server.stop):  # a second one does not wait for what is under way
            for line in start_lines(options, url_of(options, listening), served):
                report(line)
            yield

    asyncio.run(interruptible(_serve(options, listening, ready)))
    report("stopped")


@contextmanager
def running(options: OpenAIOptions) -> Iterator[str]:
    """A server in a thread of this process, and its URL."""
    listening = _listen(options)

    async def serve(started: Started) -> None:
        @contextmanager
        def ready(_: Served, server: HttpServer) -> Iterator[None]:
            started(server.stop)
            yield

        await _serve(options, listening, ready)

    with server_in_thread("headrace-serve", serve):
        yield url_of(options, listening)


async def _serve(options: OpenAIOptions, listening: socket.socket, ready: Ready) -> None:
    notes: list[str] = []
    with working(f"loading {options.target}"):  # on standard error: the first line of output is the URL
        opening = open_served(options, notes.append)
        served = await opening.__aenter__()
    try:
        for note in notes:
            print(note, file=sys.stderr)
        routes = Routes(served, options)
        server = HttpServer(routes.app(), routes.rules())
        serving = await server.begin(listening)
        with ready(served, server):
            await serving
    finally:
        await opening.__aexit__(*sys.exc_info())


def url_of(options: OpenAIOptions, listening: socket.socket) -> str:
    """Where clients find the server."""
    host = {"0.0.0.0": socket.gethostname(), "::": socket.gethostname()}.get(options.host, options.host)
    return f"http://{f'[{host}]' if ':' in host else host}:{listening.getsockname()[1]}"


def start_lines(options: OpenAIOptions, url: str, served: Served) -> list[str]:
    """What people need to know to use the server."""
    key = "..." if options.api_key else "any"  # a key does not belong on the screen
    length = f", {served.max_length} tokens at most" if served.max_length else ""
    return [
        f'serving "{served.name}" (version {served.version}{length}) at {url}; Ctrl-C ends',
        f"clients need OPENAI_BASE_URL={url}/v1 OPENAI_API_KEY={key}",
        *(
            []
            if served.template
            else ["it has no chat template: only /v1/completions and /inference/v1/generate answer"]
        ),
    ]


def _listen(options: OpenAIOptions) -> socket.socket:
    return listen(options.host, options.port, "the server", "change --host or --port")
