"""Starting the viewer, and ending it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import webbrowser
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote

from headrace.utils.http_server import HttpServer, listen
from headrace.utils.interrupts import on_interrupt
from headrace.utils.server_thread import Started, server_in_thread
from headrace.viewer.app import Viewer
from headrace.viewer.options import ViewOptions
from headrace.viewer.store import RunShelf

_NICE = 10  # the run that is watched goes first


def serve_view(options: ViewOptions, report: Callable[[str], None], open_browser: bool = False) -> None:
    """Serve until interrupted; `report` gets the lines that people are to see."""
    listening = _listen(options)
    url = url_of(options, listening)
    _step_back()

    async def serve() -> None:
        async with _serving(options, listening) as (server, viewer, serving):

            def stop() -> None:
                viewer.closing.set()
                server.stop()

            with on_interrupt(stop):
                report(f"runs of {options.root.resolve()} at {url} (Ctrl-C ends)")
                if open_browser:
                    _open(url)
                await serving

    asyncio.run(serve())
    report("stopped")


def _step_back() -> None:
    """Leave the cores to the run that is watched. Its ledger is written at low priority, too: ours is the lowest."""
    with contextlib.suppress(OSError, AttributeError):
        os.nice(_NICE)
    with contextlib.suppress(OSError, AttributeError):  # Linux only; threads that are started later inherit it
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


@contextlib.asynccontextmanager
async def _serving(
    options: ViewOptions, listening: socket.socket
) -> AsyncIterator[tuple[HttpServer, Viewer, asyncio.Task[None]]]:
    shelf = RunShelf(options.root)
    viewer = Viewer(shelf, options)
    server = HttpServer(viewer.app(), viewer.rules())
    serving = await server.begin(listening)
    try:
        yield server, viewer, serving
    finally:
        shelf.close()


async def serve_for(options: ViewOptions, life: Coroutine[Any, Any, None], report: Callable[[str], None]) -> None:
    """Serve as long as `life` lasts; `report` gets the URL."""
    listening = _listen(options)
    _step_back()
    async with _serving(options, listening) as (server, viewer, serving):
        report(url_of(options, listening))
        await life
        viewer.closing.set()
        server.stop()
        await serving


@contextmanager
def running(options: ViewOptions) -> Iterator[str]:
    """A viewer in a thread of this process, and its URL."""
    listening = _listen(options)

    async def serve(started: Started) -> None:
        async with _serving(options, listening) as (server, viewer, serving):

            def stop() -> None:
                viewer.closing.set()
                server.stop()

            started(stop)
            await serving

    with server_in_thread("headrace-view", serve):
        yield url_of(options, listening)


def url_of(options: ViewOptions, listening: socket.socket) -> str:
    """Where browsers find the viewer. The token comes after #, which no browser sends or logs."""
    host = {"0.0.0.0": socket.gethostname(), "::": socket.gethostname()}.get(options.host, options.host)
    token = f"#token={quote(options.token, safe='')}" if options.token else ""
    return f"http://{f'[{host}]' if ':' in host else host}:{listening.getsockname()[1]}/{token}"


def _open(url: str) -> None:
    """In the browser, where there is one: on a machine without a display none is tried."""
    if not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY") or os.uname().sysname == "Darwin"):
        return
    with contextlib.suppress(Exception):
        webbrowser.open(url)


def _listen(options: ViewOptions) -> socket.socket:
    return listen(options.host, options.port, "the viewer", "change --host or --port")
