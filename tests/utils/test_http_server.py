"""What stands before every HTTP server of ours: names, origins, types of bodies, keys, deadlines and caps."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from headrace.errors import ConfigError
from headrace.utils.http_server import HttpServer, Rules, listen

CALLS: list[bytes] = []
JSON = "Content-Type: application/json"


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Answers with the length of the body; at /slow only when the client has gone, at /large with much."""
    body = (await receive()).get("body", b"")
    CALLS.append(body)
    said = b"x" * 20_000_000 if scope["path"] == "/large" else str(len(body)).encode()
    head = [(b"content-length", str(len(said)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": head})
    await send({"type": "http.response.body", "body": said})


def rules(**given: Any) -> Rules:
    usual: dict[str, Any] = {
        "host": "127.0.0.1", "max_body_mb": 0.01, "body_remedy": "raise it",
        "refuse": lambda path, status, said: ({"path": path, "status": status, "said": said}, {}),
    }  # fmt: skip
    return Rules(**{**usual, **given})


@asynccontextmanager
async def serving(**given: Any) -> AsyncIterator[int]:
    CALLS.clear()
    listening = listen("127.0.0.1", 0, "a test", "")
    server = HttpServer(echo, rules(**given))
    task = await server.begin(listening)
    try:
        yield listening.getsockname()[1]
    finally:
        task.cancel()
        await asyncio.wait({task})


async def say(port: int, *lines: str, body: bytes = b"", then: float = 5.0) -> tuple[int, bytes]:
    """Status and body of what a server answers to a request that is written by hand."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = "\r\n".join([*lines, "Connection: close", *([f"Content-Length: {len(body)}"] if body else [])])
    writer.write(head.encode("latin-1") + b"\r\n\r\n" + body)
    answer = await asyncio.wait_for(reader.read(), then)
    writer.close()
    status, _, rest = answer.partition(b"\r\n")
    return int(status.split()[1]), rest.partition(b"\r\n\r\n")[2]


# ---- names and origins -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:{}", 200), ("localhost:{}", 200), ("LOCALHOST.", 200), ("[::1]:{}", 200), ("127.8.8.8", 200),
        ("trainer.example.org", 200), ("evil.example:{}", 403), ("127.0.0.1.evil.example", 403), ("0.0.0.0:{}", 403),
        ("localhost.evil.example", 403), ("[::2]:{}", 403), ("", 403), ("192.168.0.7", 403), ("x@127.0.0.1", 403),
        ("127.0.0.1:80@evil", 403), ("127.0.0.1:80:80", 403), ("[::1]evil", 403),
    ],
)  # fmt: skip
async def test_on_loopback_a_request_must_be_addressed_to_it(host: str, status: int) -> None:
    async with serving(public_host="trainer.example.org") as port:
        found, said = await say(port, "GET / HTTP/1.1", f"Host: {host.format(port)}")
        assert found == status, said
        if status == 403:
            assert "this server is not" in json.loads(said)["said"] and not CALLS


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("http://localhost:8", 200), ("https://LOCALHOST:8", 200), ("http://localhost:9", 403), ("", 403),
        ("http://evil.example", 403), ("http://evil.example/localhost:8", 403), ("http://localhost:8@evil", 403),
        ("http://[", 403), ("file://", 403), ("null", 403),
    ],
)  # fmt: skip
async def test_a_page_of_another_origin_is_refused(origin: str, status: int) -> None:
    async with serving() as port:
        for line in ("GET / HTTP/1.1", "POST / HTTP/1.1"):
            found, said = await say(port, line, "Host: localhost:8", f"Origin: {origin}")
            assert found == status, said


async def test_headers_that_come_twice_are_refused() -> None:
    async with serving() as port:
        for line in ("Origin: http://localhost", JSON):
            found, said = await say(port, "POST / HTTP/1.1", "Host: localhost", line, line, body=b"{}")
            assert found == 400 and b"came twice" in said


# ---- bodies ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "status"),
    [
        (JSON, 200), ("content-type: Application/JSON; charset=utf-8", 200), ("X: y", 415), ("Content-Type:", 415),
        ("Content-Type: text/plain", 415), ("Content-Type: application/x-www-form-urlencoded", 415),
        ("Content-Type: application/jsonp", 415), (f"{JSON}\r\nContent-Encoding: gzip", 415),
        (f"{JSON}\r\nContent-Encoding: identity", 200),
    ],
)  # fmt: skip
async def test_a_body_must_say_what_it_is(line: str, status: int) -> None:
    async with serving() as port:
        found, said = await say(port, "POST / HTTP/1.1", "Host: localhost", line, body=b"{}")
        assert found == status and (status == 415 or said == b"2"), said
        assert (await say(port, "POST / HTTP/1.1", "Host: localhost"))[0] == 200  # nothing needs no type


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_that_is_too_large_is_refused_and_the_client_hears_it(chunked: bool) -> None:
    body = b"x" * 60_000
    async with serving() as port:
        if chunked:
            lines = (JSON, "Transfer-Encoding: chunked")
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            head = "\r\n".join(("POST / HTTP/1.1", "Host: localhost", *lines))
            writer.write(f"{head}\r\n\r\n{len(body):x}\r\n".encode() + body + b"\r\n0\r\n\r\n")
            answer = await asyncio.wait_for(reader.read(), 5)
            writer.close()
            assert answer.startswith(b"HTTP/1.1 413") and b"raise it" in answer
        else:
            found, said = await say(port, "POST / HTTP/1.1", "Host: localhost", JSON, body=body)
            assert found == 413 and b"raise it" in said
        assert not CALLS


# ---- keys ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "status"),
    [
        ("X-API-Key: secret", 200), ("Authorization: Bearer secret", 200), ("authorization: bearer  secret", 200),
        ("X-API-Key: secret:session", 200), ("X-API-Key: other\r\nAuthorization: Bearer secret", 200), ("X: y", 401),
        ("X-API-Key: secre", 401), ("X-API-Key: secrets", 401), ("X-API-Key:", 401), ("X-API-Key: sécret", 401),
        ("Authorization: Basic secret", 401),
    ],
)  # fmt: skip
async def test_with_a_token_nothing_is_read_without_it(line: str, status: int) -> None:
    async with serving(token="secret", token_remedy="send the token") as port:
        found, said = await say(port, "POST / HTTP/1.1", "Host: localhost", JSON, line, body=b"{}")
        assert found == status and (status == 200 or b"send the token" in said)
        assert len(CALLS) == (status == 200)


def test_no_server_is_made_for_others_without_a_token() -> None:
    for host in ("0.0.0.0", "::", "192.168.0.7", "example.org", ""):
        with pytest.raises(ConfigError, match="there is no token"):
            rules(host=host)
        rules(host=host, token="secret")


async def test_beyond_loopback_the_token_decides_and_names_do_not() -> None:
    async with serving(host="0.0.0.0", token="secret") as port:
        lines = ("GET / HTTP/1.1", "Host: trainer.example.org", "X-API-Key: secret")
        assert (await say(port, *lines))[0] == 200
        assert (await say(port, *lines, "Origin: http://evil.example"))[0] == 403


# ---- deadlines and caps ----------------------------------------------------------------------------------------------


async def closed_after(reader: asyncio.StreamReader, limit_s: float = 5.0) -> tuple[float, bytes]:
    began = time.monotonic()
    answer = await asyncio.wait_for(reader.read(), limit_s)
    return time.monotonic() - began, answer


@pytest.mark.parametrize("sent", [b"", b"POST / HTTP/1.1\r\nHost: loc"])
async def test_a_head_that_does_not_come_ends_the_connection(sent: bytes) -> None:
    async with serving(head_s=0.3) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        took, answer = await closed_after(reader)
        assert 0.2 < took < 4 and answer.startswith(b"HTTP/1.1 408")
        writer.close()


async def test_a_head_that_comes_byte_by_byte_ends_the_connection_also_after_a_first_request() -> None:
    async with serving(head_s=0.3) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        await reader.readexactly(1)
        await asyncio.sleep(0.5)  # between requests it may be quiet for longer
        ending = asyncio.create_task(closed_after(reader))
        for letter in b"GET / HTTP/1.1\r\nX-Slow: aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa":
            writer.write(bytes([letter]))
            await asyncio.sleep(0.05)
            if ending.done():
                break
        took, answer = await ending
        assert took < 2 and answer.startswith(b"HTTP/1.1 408")
        writer.close()


async def test_a_body_that_comes_byte_by_byte_is_refused() -> None:
    async with serving(body_s=0.3) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"POST / HTTP/1.1\r\nHost: localhost\r\n{JSON}\r\nContent-Length: 5000\r\n\r\n".encode())
        ending = asyncio.create_task(closed_after(reader))
        while not ending.done():
            writer.write(b"x")
            await asyncio.sleep(0.05)
        took, answer = await ending
        assert took < 3 and answer.startswith(b"HTTP/1.1 408") and not CALLS
        writer.close()


async def test_a_large_body_may_take_its_time() -> None:
    half = b"x" * 4_000_000
    async with serving(body_s=0.3, max_body_mb=16) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = f"POST / HTTP/1.1\r\nHost: localhost\r\n{JSON}\r\nContent-Length: {2 * len(half)}\r\n\r\n"
        writer.write(head.encode() + half)
        await writer.drain()
        await asyncio.sleep(0.8)  # longer than body_s
        writer.write(half)
        assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 200") and len(CALLS[0]) == 2 * len(half)
        writer.close()


async def test_a_client_that_does_not_read_its_answer_is_dropped() -> None:
    async with serving(write_s=0.3) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1)
        writer.write(b"GET /large HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await asyncio.sleep(1.0)
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await asyncio.wait_for(reader.readexactly(20_000_000), 5)
        writer.close()


async def test_there_is_a_cap_on_connections_and_those_that_end_make_room() -> None:
    async with serving(max_connections=3) as port:
        held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        await asyncio.sleep(0.1)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        assert (await closed_after(reader))[1].startswith(b"HTTP/1.1 503")
        writer.close()
        held[0][1].close()
        await asyncio.sleep(0.1)
        assert (await say(port, "GET / HTTP/1.1", "Host: localhost"))[0] == 200
        for _, open_ in held:
            open_.close()
