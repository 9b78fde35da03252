"""Ranks as Ray actors, on any machine of a cluster."""

from __future__ import annotations

import faulthandler
import logging
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from headrace.backends.ranks import progress
from headrace.backends.ranks.answers import GRACE_S, START_S, silence, values
from headrace.backends.ranks.base import Program, RanksLostError
from headrace.backends.ranks.wire import Answer
from headrace.backends.ranks.worker import answer
from headrace.registry import load_object
from headrace.utils.machine import machine

_log = logging.getLogger("headrace")
_LOOK_S = 1.0
_STACKS_S = 5.0
Options = Mapping[str, Any]


class RankActor:
    """What runs in an actor. The methods of the group "watch" answer while another computes."""

    def __init__(self) -> None:
        self._program: Any = None
        self._progress = 0
        progress.listener = self._made_progress

    def build(self, program: Program, rank: int, size: int) -> Answer:
        def build() -> None:
            self._program = load_object(program.target)(*program.arguments, rank, size)

        return answer(build)

    def call(self, method: str, arguments: tuple[Any, ...]) -> Answer:
        return answer(lambda: getattr(self._program, method)(*arguments))

    def progress(self) -> int:
        return self._progress

    def stacks(self) -> str:
        with tempfile.TemporaryFile("w+") as file:
            faulthandler.dump_traceback(file, all_threads=True)
            file.seek(0)
            return file.read()

    def where(self) -> tuple[str, str]:
        return machine(), ray.util.get_node_ip_address()

    def _made_progress(self) -> None:
        self._progress += 1


class RayRanks:
    """Actors, one per entry of `options`: what each takes, and where. A call goes to all of them."""

    def __init__(
        self, program: Program, options: Sequence[Options], timeout_s: float, release: Callable[[], None] | None = None
    ) -> None:
        self.size = len(options)
        self._program, self._options, self._timeout_s = program, options, timeout_s
        self._release = release
        self._actors: list[Any] = []
        self._nodes: list[tuple[str, str]] = []

    def start(self) -> None:
        # threads of their own: one computes, one answers whoever watches
        remote: Any = ray.remote  # whose types do not know all that it takes
        kind = remote(concurrency_groups={"watch": 1}, max_restarts=0)(RankActor)
        for given in self._options:
            self._actors.append(kind.options(**given).remote())
        self._nodes = self._get([a.where.options(concurrency_group="watch").remote() for a in self._actors], "start")
        asked = [a.build.remote(self._program, rank, self.size) for rank, a in enumerate(self._actors)]
        self._collect("start", dict(enumerate(asked)), max(self._timeout_s, START_S))

    def call(self, method: str, *per_rank: Sequence[Any]) -> list[Any]:
        self._require_started(method)
        asked = {
            rank: actor.call.remote(method, tuple(given[rank] for given in per_rank))
            for rank, actor in enumerate(self._actors)
        }
        found = self._collect(method, asked, self._timeout_s)
        return [found[rank] for rank in range(self.size)]

    def call_on(self, rank: int, method: str, *arguments: Any) -> Any:
        self._require_started(method)
        return self._collect(method, {rank: self._actors[rank].call.remote(method, arguments)}, self._timeout_s)[rank]

    def host(self) -> str:
        return self._nodes[0][1]

    def local(self) -> tuple[int, ...]:
        return tuple(rank for rank, (where, _) in enumerate(self._nodes) if where == machine())

    def kill(self) -> None:
        actors, self._actors = self._actors, []
        for actor in actors:
            with suppress(RayError, ValueError):
                ray.kill(actor)
        if self._release is not None:
            self._release()
            self._release = None

    # ---- one call --------------------------------------------------------------------------------------------------

    def _require_started(self, method: str) -> None:
        if not self._actors:
            raise RanksLostError(f"{method} was called on ranks that have ended; start them again")

    def _get(self, asked: Sequence[Any], method: str) -> list[Any]:
        try:
            return ray.get(list(asked), timeout=START_S)
        except RayError as error:
            self.kill()
            raise RanksLostError(f"the ranks could not {method}: {_cause(error)}") from error

    def _collect(self, method: str, asked: Mapping[int, Any], timeout_s: float) -> dict[int, Any]:
        """Wait for all answers. Silence for too long, or the death of an actor, ends the group."""
        waiting = {reference: rank for rank, reference in asked.items()}
        answers: dict[int, Answer] = {}
        allowed_s, last, seen = timeout_s, time.monotonic(), -1
        while waiting:
            ready, _ = ray.wait(list(waiting), timeout=_LOOK_S)
            for reference in ready:
                rank = waiting.pop(reference)
                found = answers[rank] = self._answer(method, rank, reference)
                if found.error or found.foreign:
                    allowed_s, last = min(timeout_s, GRACE_S), time.monotonic()
            if not ready and (made := self._made()) > seen:  # an actor that does not say has not made any
                seen, last = made, time.monotonic()
            if waiting and time.monotonic() - last > allowed_s:
                self._log_stacks(method)
                self.kill()
                raise silence(method, self.size, answers, timeout_s)
        try:
            return values(method, self.size, answers)
        except RanksLostError:
            self.kill()
            raise

    def _answer(self, method: str, rank: int, reference: Any) -> Answer:
        try:
            return ray.get(reference)
        except RayActorError as error:
            self.kill()
            raise RanksLostError(f"rank {rank} of {self.size} died in {method}: {_first_line(error)}") from None
        except RayError as error:
            return Answer(foreign=f"{type(error).__name__}: {error}")

    def _made(self) -> int:
        """How far all ranks have come; -1 if one does not say."""
        with suppress(RayError, GetTimeoutError):
            watched = [actor.progress.options(concurrency_group="watch").remote() for actor in self._actors]
            return sum(ray.get(watched, timeout=_LOOK_S))
        return -1

    def _log_stacks(self, method: str) -> None:
        for rank, actor in enumerate(self._actors):
            stacks = "(it does not say)"
            with suppress(RayError, GetTimeoutError):
                stacks = ray.get(actor.stacks.options(concurrency_group="watch").remote(), timeout=_STACKS_S)
            _log.error("rank %d hangs in %s:\n%s", rank, method, stacks)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def _cause(error: Exception) -> str:
    """Of an actor that failed while it was made, what it raised: the last line of a long text."""
    lines = str(error).strip().splitlines()
    return lines[-1].strip() if lines else type(error).__name__
