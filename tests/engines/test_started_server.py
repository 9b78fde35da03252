"""Servers that Headrace starts, or that are given: what happens if they die, do not answer, or are not there."""

from __future__ import annotations

import sys
from pathlib import Path
from urllib.request import urlopen

import pytest

from headrace.config.loading import build_config
from headrace.engines.servers import build
from headrace.engines.servers.checks import require_package
from headrace.engines.servers.server import GivenServer, StartedServer
from headrace.errors import ConfigError, EngineError, ServerLostError

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


async def test_a_server_that_is_given_up_is_ended(tmp_path: Path) -> None:
    server = new_server(tmp_path, "0")
    try:
        await server.start()
        for _ in range(3):  # it lives, and says that it is well; its engine is dead
            await server.replace()
        assert server.gone() is None
        with pytest.raises(EngineError, match="died 4 times in a row"):
            await server.replace()
        assert server.gone() is not None
        with pytest.raises(OSError):
            urlopen(f"{server.url}/health", timeout=5)  # noqa: ASYNC210
    finally:
        await server.close()


async def test_a_server_that_cannot_be_started_at_first_is_an_error_at_once(tmp_path: Path) -> None:
    server = new_server(tmp_path, "1")
    with pytest.raises(EngineError, match="ended \\(exit code 1\\)"):
        await server.start()
    assert (tmp_path / "count").read_text() == "x"


async def test_a_given_server_that_does_not_answer_is_named_while_it_is_waited_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def ask() -> None:
        raise ServerLostError("connection refused")

    with pytest.raises(EngineError, match=r"no server answers at http://10\.0\.0\.5:8000 after 0\.3 s: conn"):
        await GivenServer("http://10.0.0.5:8000", ask, 0.3).start()
    (warning,) = caplog.messages
    assert "http://10.0.0.5:8000 does not answer; waiting for 0.3 s (engine.start_timeout_s)" in warning


def test_an_environment_without_the_servers_package_is_refused_with_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"set engine\.python to an interpreter that has it"):
        require_package(None, "no_such_server", "vLLM")
    require_package(sys.executable, "pytest", "pytest")


def test_each_server_sees_its_own_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(build, "require_package", lambda *_: None)
    engine = {"name": "vllm", "replicas": 2, "gpus": ["2,3", "4,5"]}
    config = build_config({"engine": engine, "trainer": {"placement": "separate"}, "run": {"dir": str(tmp_path)}})

    class Bare:
        def command(self, port: int) -> list[str]:
            return []

        def environment(self) -> dict[str, str]:
            return {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5", "OWN": "1"}

    kind = build.ServerKind("vllm", "vLLM", None, lambda *_: Bare(), None)  # type: ignore[arg-type]
    servers = [build._server(config, None, kind, number, lambda: None, None) for number in range(2)]  # type: ignore[arg-type]
    seen = [server._environment for server in servers]  # type: ignore[attr-defined]
    assert [one["CUDA_VISIBLE_DEVICES"] for one in seen] == ["2,3", "4,5"] and seen[0]["OWN"] == "1"
