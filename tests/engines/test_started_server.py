"""A server that Headrace starts: what happens if it dies while it is started again."""

from __future__ import annotations

import sys
from pathlib import Path
from urllib.request import urlopen

import pytest

from headrace.engines.servers.server import StartedServer
from headrace.errors import EngineError, ServerLostError

SERVE = """
import pathlib, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
count = pathlib.Path(sys.argv[2])
count.write_text(count.read_text() + "x" if count.exists() else "x")
if len(count.read_text()) in map(int, sys.argv[3].split(",")):
    sys.exit("no memory left")
class Healthy(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
HTTPServer(("127.0.0.1", int(sys.argv[1])), Healthy).serve_forever()
"""


def new_server(folder: Path, dies: str) -> StartedServer:
    """One whose starts of these numbers, counted from 1, fail."""

    def command(port: int) -> list[str]:
        return [sys.executable, "-c", SERVE, str(port), str(folder / "count"), dies]

    async def ask() -> None:
        try:
            urlopen(f"{server.url}/health", timeout=5).close()  # noqa: ASYNC210
        except OSError as error:
            raise ServerLostError(str(error)) from None

    server = StartedServer("the server", command, {}, folder / "log", ask, 30.0)
    return server


async def test_a_server_that_dies_while_it_is_started_again_is_started_once_more(tmp_path: Path) -> None:
    server = new_server(tmp_path, "2,3")
    try:
        await server.start()
        await server.replace()
        assert server.gone() is None and server.incarnation == 3
    finally:
        await server.close()


async def test_a_server_that_dies_at_every_start_is_given_up(tmp_path: Path) -> None:
    server = new_server(tmp_path, "2,3,4,5")
    try:
        await server.start()
        with pytest.raises(EngineError, match=r"died 4 times in a row[^;]*; .*(\n.*)*no memory left"):
            await server.replace()
    finally:
        await server.close()


async def test_a_server_that_cannot_be_started_at_first_is_an_error_at_once(tmp_path: Path) -> None:
    server = new_server(tmp_path, "1")
    with pytest.raises(EngineError, match="ended \\(exit code 1\\)"):
        await server.start()
    assert (tmp_path / "count").read_text() == "x"
