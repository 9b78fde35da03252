"""Servers on a cluster: who may talk to them, and how they are started on a node."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.backends.fsdp.backend import FsdpBackend
from headrace.config.loading import build_config
from headrace.engines.servers.server import Server
from headrace.engines.vllm.command import Launch
from headrace.engines.vllm.factory import transports
from headrace.errors import ConfigError
from headrace.weights.vllm_plugin.headrace_vllm.token import RequireToken

RANKS: dict[str, Any] = {"backend": {"name": "fsdp", "ranks": 2}, "trainer": {"placement": "separate"}}
ON_RAY: dict[str, Any] = {**RANKS, "cluster": {"address": "auto", "engine": {"CPU": 1}}}


async def asked(headers: list[tuple[bytes, bytes]], kind: str = "http") -> list[Any]:
    """What is answered, and whether the server behind was reached."""
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        sent.append("reached")

    async def send(message: Any) -> None:
        sent.append(message.get("status") or message.get("code") or message["body"])

    async def receive() -> Any: ...

    await RequireToken(app)({"type": kind, "path": "/collective_rpc", "headers": headers}, receive, send)
    return sent


async def test_a_server_answers_only_who_has_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_TOKEN", "right")
    assert await asked([(b"authorization", b"Bearer right")]) == ["reached"]
    for headers in ([], [(b"authorization", b"Bearer wrong")], [(b"authorization", b"right")]):
        assert await asked(headers) == [401, b"the token is missing or wrong"]
    assert await asked([], "websocket") == [1008]
    assert await asked([], "lifespan") == ["reached"]


def test_a_server_on_a_node_listens_on_its_address_with_a_token_out_of_sight() -> None:
    here = Launch(None, "bundled", "float32", "gloo", 64, 8, 64, False, 1)
    there = here.listening("10.0.0.2", "secret")
    assert "127.0.0.1" in here.command(8000) and "--middleware" not in here.command(8000)
    assert "10.0.0.2" in there.command(8000) and "headrace_vllm.token.RequireToken" in there.command(8000)
    assert "secret" not in " ".join(there.command(8000))  # which every user of the node sees
    assert there.environment()["HEADRACE_TOKEN"] == "secret" and "HEADRACE_TOKEN" not in here.environment()


def test_a_server_on_a_node_has_all_that_an_engine_asks_a_server_for(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    from headrace.engines.servers.on_ray import RayServer

    launch = Launch(None, "bundled", "float32", "gloo", 64, 8, 64, False, 1)
    server: Server = RayServer("a server", launch, dict, tmp_path / "log", object, 1.0, 1.0)
    assert not server.found and server.incarnation == 0 and server.gone() is None


def test_weights_travel_over_the_network_to_servers_on_nodes() -> None:
    assert transports(build_config({**RANKS, "engine": {"name": "vllm"}}))[0] == "file"
    assert transports(build_config({**ON_RAY, "engine": {"name": "vllm"}})) == ("gloo",)


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"engine": {"name": "sglang"}}, r'"sglang" is not started on a cluster; .* engine\.urls'),
        (
            {"engine": {"name": "vllm"}, "model": {"lora": {"rank": 4}}},
            r"lora\.rank = 4 .* do not see; set",
        ),
        ({"engine": {"name": "vllm", "urls": ["http://10.0.0.5:1"]}}, r"cluster\.engine = .* has no effect: .*urls"),
        (
            {"trainer": {"placement": "colocate"}, "engine": {"name": "vllm"}},
            r'engine = .*placement = "colocate"',
        ),
        ({"cluster": {"address": "auto", "engine": {"CPU": 0}}}, r"must take something"),
        ({"cluster": {"engine": {"CPU": 1}}}, r"cluster\.engine .* there is no cluster"),
    ],
)
def test_what_cannot_be_placed_is_refused(sections: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        build_config({**ON_RAY, **sections})


def test_rows_that_ranks_cannot_split_are_refused() -> None:
    config = build_config({**RANKS, "backend": {"name": "fsdp", "ranks": 2, "context_parallel": 2}})
    with pytest.raises(ConfigError, match=r"backend\.context_parallel = 2 splits .* set it to 1, .*gradient_checkp"):
        FsdpBackend.check(config)
