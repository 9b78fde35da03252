"""What our HTTP servers have in common: the socket they listen at, and bodies that are not too large."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterable

from headrace.errors import ConfigError

_THROWN_AWAY = 8  # times the limit, read on so that a client that is still sending hears the answer


def listen(host: str, port: int, who: str, remedy: str) -> socket.socket:
    """A socket that listens; port 0 takes a free one. `who` and `remedy` are for the error."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host, port), family=family, backlog=4096)
    except OSError as error:
        raise ConfigError(
            f"{who} cannot listen at {host}, port {port}: {error}; {remedy} (0 takes a free one)"
        ) from error
    # head and body are two packets, and the second would wait 40 ms for the first to be acknowledged
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening


async def read_body(stream: AsyncIterable[bytes], most: int) -> bytes | None:
    """The body of a request; None if it has more bytes than `most`."""
    size, body = 0, bytearray()
    async for piece in stream:
        size += len(piece)
        if size <= most:
            body += piece
        elif size > _THROWN_AWAY * most:
            break
    return bytes(body) if size <= most else None
