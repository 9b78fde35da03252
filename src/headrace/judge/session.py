"""A conversation with a program in the sandbox: one request, one answer, over two pipes.

A request names a function of the program and its arguments; the answer is a plain value, "an object of the program's
own", or what was raised. Every value in the program has a number, by which later requests can mean it. Expected values
are never part of a request. Answers are untrusted: whatever is wrong with one ends the conversation.
"""

from __future__ import annotations

import json
import os
import select
import time
from typing import Any

from headrace.judge.plain import NotPlainError, decode, read_json

_POLL_S = 0.25  # how soon a session that was closed from outside notices
_MOST_ANSWERS = 8  # all answers together, in the largest size of one


class SessionEndedError(Exception):
    """The program ended, was late, or said what no honest one says: there are no more answers."""


class RaisedError(Exception):
    """The program raised; the names of the exception's classes."""

    def __init__(self, names: list[str]) -> None:
        super().__init__(names[0] if names else "?")
        self.names = names


class Handle:
    """A value in the program. Its plain form is known as of the answer number `asked`."""

    __slots__ = ("asked", "number", "plain", "value")

    def __init__(self, number: int, plain: bool, value: Any) -> None:
        self.number = number
        self.asked = number
        self.plain = plain
        self.value = value


class Session:
    """Requests to one program; used by one thread. Only time spent waiting for the program counts as its time."""

    def __init__(self, requests: int, answers: int, time_s: float, answer_bytes: int) -> None:
        self._requests, self._answers = requests, answers
        os.set_blocking(requests, False)
        os.set_blocking(answers, False)
        self._left_s = time_s
        self._answer_bytes = answer_bytes
        self._left_bytes = answer_bytes * _MOST_ANSWERS
        self._count = 0
        self._closed = False

    def close(self) -> None:
        """From another thread: the next wait fails."""
        self._closed = True

    def ask(self, *request: Any) -> Handle:
        """Send a request and wait for its answer."""
        body = json.dumps(request).encode()
        self._write(len(body).to_bytes(4, "big") + body)
        length = int.from_bytes(self._read(4), "big")
        if length > self._answer_bytes:
            raise self._ended("an answer is too long")
        number, self._count = self._count, self._count + 1
        try:
            said = read_json(self._read(length))
        except NotPlainError as error:
            raise self._ended(str(error)) from None
        if type(said) is not list or not said or said[0] not in ("v", "o", "x"):
            raise self._ended("an answer of no known form")
        if said[0] == "x":
            raise RaisedError([name for name in said[1] if type(name) is str] if _is_list(said) else [])
        try:
            return Handle(number, True, decode(said[1])) if said[0] == "v" and len(said) == 2 else _opaque(number)
        except NotPlainError:
            return _opaque(number)

    def plain(self, handle: Handle) -> Any:
        """The plain value of a handle now: the program may have changed it since."""
        if handle.asked != self._count - 1:
            fresh = self.ask("get", {"h": handle.number})
            handle.asked, handle.plain, handle.value = self._count - 1, fresh.plain, fresh.value
        if not handle.plain:
            raise NotPlainError("an object of the program's own")
        return handle.value

    def _ended(self, why: str) -> SessionEndedError:
        self._left_s = 0.0
        return SessionEndedError(why)

    def _wait(self, pipe: int, event: int) -> None:
        poll = select.poll()
        poll.register(pipe, event)
        while True:
            start = time.monotonic()
            if self._left_s <= 0 or self._closed:
                raise self._ended("the program was late")
            ready = poll.poll(min(self._left_s, _POLL_S) * 1000 + 1)
            self._left_s -= time.monotonic() - start
            if ready:
                return

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            self._wait(self._requests, select.POLLOUT)
            try:
                view = view[os.write(self._requests, view[:65536]) :]
            except BlockingIOError:
                continue
            except OSError:
                raise self._ended("the program has ended") from None

    def _read(self, count: int) -> bytes:
        self._left_bytes -= count
        if self._left_bytes < 0:
            raise self._ended("all answers together are too long")
        found = bytearray()
        while len(found) < count:
            self._wait(self._answers, select.POLLIN)
            try:
                more = os.read(self._answers, min(count - len(found), 65536))
            except BlockingIOError:
                continue
            if not more:
                raise self._ended("the program has ended")
            found += more
        return bytes(found)


def _is_list(said: list[Any]) -> bool:
    return len(said) == 2 and type(said[1]) is list


def _opaque(number: int) -> Handle:
    return Handle(number, False, None)
