"""One rank in this process, on the thread that calls it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace.backends.ranks.base import Program
from headrace.registry import load_object


class ThreadRank:
    """A group of one."""

    size = 1

    def __init__(self, program: Program) -> None:
        self._given = program
        self._program: Any = None

    def start(self) -> None:
        self._program = load_object(self._given.target)(*self._given.arguments, 0, 1)

    def call(self, method: str, *per_rank: Sequence[Any]) -> list[Any]:
        return [self.call_on(0, method, *(values[0] for values in per_rank))]

    def call_on(self, rank: int, method: str, *arguments: Any) -> Any:
        return getattr(self._program, method)(*arguments)

    def host(self) -> str:
        return "127.0.0.1"

    def local(self) -> tuple[int, ...]:
        return tuple(range(self.size))

    def kill(self) -> None:
        self._program = None
