"""Ranks as processes of this machine, each at the end of a pair of sockets."""

from __future__ import annotations

import logging
import selectors
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from headrace.backends.ranks.answers import GRACE_S, START_S, silence, values
from headrace.backends.ranks.base import Program, RanksLostError
from headrace.backends.ranks.wire import Answer, Build, Call, Progress, receive, send
from headrace.utils.worker_process import WorkerProcess, describe_exit

_log = logging.getLogger("headrace")
_STACKS_S = 1.0
_KEPT_LINES = 400
Launch = Callable[[Mapping[str, str]], WorkerProcess]


def launch_rank(environment: Mapping[str, str]) -> WorkerProcess:
    """A process of its own."""
    return WorkerProcess("headrace.backends.ranks.worker", (), environment, _KEPT_LINES)


class PipeRanks:
    """Processes that end with this one. A call goes to all; the first that dies or hangs ends the group."""

    def __init__(
        self, program: Program, size: int, timeout_s: float, environments: Sequence[Mapping[str, str]] | None = None,
        launch: Launch | None = None,
    ) -> None:  # fmt: skip
        self.size = size
        self._program = program
        self._timeout_s = timeout_s
        self._environments = environments or [{}] * size
        self._launch = launch or launch_rank
        self._workers: list[WorkerProcess] = []

    @property
    def pids(self) -> list[int]:
        """Of the processes that run now."""
        return [worker.pid for worker in self._workers]

    def start(self) -> None:
        program = self._program
        self._workers = [self._launch({**program.environment, **one}) for one in self._environments]
        builds = [Build(program.target, program.arguments, rank, self.size) for rank in range(self.size)]
        self._exchange("start", dict(enumerate(builds)), max(self._timeout_s, START_S))

    def call(self, method: str, *per_rank: Sequence[Any]) -> list[Any]:
        calls = {rank: Call(method, tuple(given[rank] for given in per_rank)) for rank in range(self.size)}
        found = self._exchange(method, calls, self._timeout_s)
        return [found[rank] for rank in range(self.size)]

    def call_on(self, rank: int, method: str, *arguments: Any) -> Any:
        return self._exchange(method, {rank: Call(method, arguments)}, self._timeout_s)[rank]

    def host(self) -> str:
        return "127.0.0.1"

    def local(self) -> tuple[int, ...]:
        return tuple(range(self.size))

    def kill(self) -> None:
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.kill()
        for worker in workers:
            worker.end()

    # ---- one call --------------------------------------------------------------------------------------------------

    def _exchange(self, method: str, messages: Mapping[int, Any], timeout_s: float) -> dict[int, Any]:
        if not self._workers:
            raise RanksLostError(f"{method} was called on ranks that have ended; start them again")
        answers: dict[int, Answer] = {}
        with selectors.DefaultSelector() as selector:
            for rank, message in messages.items():
                self._send(method, rank, message, timeout_s)
                selector.register(self._workers[rank].connection, selectors.EVENT_READ, rank)
            self._collect(method, selector, answers, timeout_s)
        try:
            return values(method, self.size, answers)
        except RanksLostError:
            self.kill()
            raise

    def _send(self, method: str, rank: int, message: Any, timeout_s: float) -> None:
        connection = self._workers[rank].connection
        connection.settimeout(timeout_s)  # a process that stands still reads nothing, nor does it finish an answer
        try:
            send(connection, message)
        except TimeoutError:
            self._give_up(method)
            raise silence(method, self.size, {}, timeout_s, (rank,)) from None
        except OSError:  # it has gone, which is found out when its answer is read
            return

    def _collect(
        self, method: str, selector: selectors.BaseSelector, answers: dict[int, Answer], timeout_s: float
    ) -> None:
        """Wait for all answers. Silence for too long, or the end of a process, ends the group."""
        allowed_s, last = timeout_s, time.monotonic()
        while selector.get_map():
            ready = selector.select(max(0.0, last + allowed_s - time.monotonic()))
            if not ready:
                self._give_up(method)
                raise silence(method, self.size, answers, timeout_s)
            for key, _ in ready:
                try:
                    message = receive(key.fileobj)  # type: ignore[arg-type]
                except TimeoutError:
                    self._give_up(method)
                    raise silence(method, self.size, answers, timeout_s, (key.data,)) from None
                except EOFError:
                    raise self._died(method, key.data) from None
                if isinstance(message, Progress):
                    last = time.monotonic()
                    continue
                answers[key.data] = message
                selector.unregister(key.fileobj)
                if message.error or message.foreign:
                    allowed_s, last = min(timeout_s, GRACE_S), time.monotonic()

    def _died(self, method: str, rank: int) -> RanksLostError:
        worker = self._workers[rank]
        pid, code = worker.pid, worker.end(2.0)
        printed = worker.last_output()
        self.kill()
        lines = "\n".join(printed.splitlines()[-20:])
        _log.warning("rank %d (process %d) died in %s; its last lines:\n%s", rank, pid, method, lines or "(none)")
        return RanksLostError(f"rank {rank} of {self.size} died in {method} ({describe_exit(code)})")

    def _give_up(self, method: str) -> None:
        self._log_stacks(method)
        self.kill()

    def _log_stacks(self, method: str) -> None:
        for worker in self._workers:
            worker.signal(signal.SIGUSR1)
        time.sleep(_STACKS_S)
        for rank, worker in enumerate(self._workers):
            printed = worker.output.so_far()
            stacks = printed[max(0, printed.find("Thread 0x")) :]
            _log.error("rank %d hangs in %s:\n%s", rank, method, stacks)
