"""Messages between the controller and a rank's process: pickles, each after its length.

Both ends are our own code and no one else can write to the sockets, so pickle is safe here.
"""

from __future__ import annotations

import pickle
import socket
import struct
from dataclasses import dataclass
from typing import Any

_LENGTH = struct.Struct(">Q")


@dataclass(frozen=True, slots=True)
class Build:
    """The first message: what to run, as which of how many."""

    target: str
    arguments: tuple[Any, ...]
    rank: int
    size: int


@dataclass(frozen=True, slots=True)
class Call:
    """Call a method of the program."""

    method: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """What a call returned or raised. An error that is not ours comes as its text, with `foreign`."""

    value: Any = None
    error: Exception | None = None
    foreign: str = ""


@dataclass(frozen=True, slots=True)
class Progress:
    """A part of a long call is done."""


def send(connection: socket.socket, message: Any) -> None:
    """Send one message."""
    content = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    connection.sendall(_LENGTH.pack(len(content)))
    connection.sendall(content)


def receive(connection: socket.socket) -> Any:
    """The next message; EOFError when the other side has gone."""
    (length,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size))
    return pickle.loads(_exactly(connection, length))


def _exactly(connection: socket.socket, size: int) -> bytearray:
    content = bytearray(size)
    view = memoryview(content)
    while view:
        try:
            read = connection.recv_into(view)
        except ConnectionError as gone:
            raise EOFError from gone
        if not read:
            raise EOFError
        view = view[read:]
    return content
