"""A conversation with a program in the sandbox: one request, one answer, over two pipes.

A request names a function of the program and its arguments. The answer is a value or what was raised. A value is plain
data. An object of any other type stays in the program and crosses as a Handle, by which later requests refer to it.
Expected values are never part of a request. Answers are untrusted: a malformed one ends the conversation.
"""

from __future__ import annotations

import json
import os
import select
import time
from typing import Any

from headrace.judge.plain import Handle, NotPlainError, decode, read_json

_POLL_S = 0.25  # how soon a session that was closed from outside notices
_MOST_ANSWERS = 8  # all answers together, in the largest size of one


class SessionEndedError(Exception):
    """The program ended, was late, or sent a malformed answer: there are no more answers."""


class RaisedError(Exception):
    """The program raised; the names of the exception's classes."""

    def __init__(self, names: list[str]) -> None:
        super().__init__(names[0] if names else "?")
        self.names = names


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

    def ask(self, *request: Any) -> Any:
        """Send a request and wait for its answer: plain data, in which objects of the program's own are handles."""
        body = json.dumps(request).encode()
        self._write(len(body).to_bytes(4, "big") + body)
        length = int.from_bytes(self._read(4), "big")
        if length > self._answer_bytes:
            raise self._ended("an answer is too long")
        self._count += 1
        try:
            answer = read_json(self._read(length))
        except NotPlainError as error:
            raise self._ended(str(error)) from None
        if type(answer) is not list or len(answer) != 2 or answer[0] not in ("v", "x"):
            raise self._ended("an answer of no known form")
        if answer[0] == "x":
            names = answer[1] if type(answer[1]) is list else []
            raise RaisedError([name for name in names if type(name) is str])
        try:
            return decode(answer[1], self._count)
        except NotPlainError:  # a test that does not use the value may still be passed
            return Handle(None, self._count)

    def plain(self, handle: Handle) -> Any:
        """The plain form of an object now: the program may have changed it since it answered."""
        if handle.asked != self._count and handle.number is not None:
            fresh = self.ask("get", {"h": handle.number})
            if isinstance(fresh, Handle):
                handle.has_plain, handle.value = fresh.has_plain, fresh.value
            else:
                handle.has_plain, handle.value = True, fresh
            handle.asked = self._count
        if not handle.has_plain:
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
