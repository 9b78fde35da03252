"""A program for ranks that needs nothing but time: a call in which one of them does not answer, or fails."""

from __future__ import annotations

import time

from headrace.errors import BackendError


class Sleepy:
    """Ranks that wait as in a collective."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank

    def wait(self, seconds: float) -> int:
        time.sleep(seconds)
        return self.rank

    def echo(self, given: bytes) -> int:
        return len(given)

    def fail(self, where: int) -> None:
        if self.rank == where:
            raise ZeroDivisionError("a bug")

    def refuse(self) -> None:
        raise BackendError("all refuse")
