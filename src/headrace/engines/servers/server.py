"""One server as an engine sees it: where it is, whether it lives, and which life it is in."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from headrace.errors import EngineError, ServerLostError
from headrace.utils.child_process import ChildProcess

_log = logging.getLogger("headrace")
_POLL_S = 0.1
MOST_DEATHS = 3


class Server(Protocol):
    """A server that runs already, or that is started here."""

    @property
    def url(self) -> str: ...

    incarnation: int
    """Counts restarts: answers of an old one are refused."""
    found: bool
    """It ran before: a run that was killed may have left it in the middle of something."""

    async def start(self) -> None:
        """Return when it answers; EngineError if it does not."""
        ...

    async def replace(self) -> None:
        """After it was lost: end what is left of it, and start it again, or wait until somebody has."""
        ...

    def gone(self) -> str | None:
        """How it ended, if it has; None while it lives, as far as can be seen from here."""
        ...

    def answered(self) -> None:
        """It has served a request: it is not dying over and over."""
        ...

    async def close(self) -> None: ...


async def until_healthy(
    url: str,
    limit_s: float,
    gone: Callable[[], str | None],
    ask: Callable[[], object],
    waiting: Callable[[EngineError], None] = lambda error: None,
) -> None:
    """Ask until there is an answer. `waiting` is called once, if there is none to the first question."""
    end = time.monotonic() + limit_s
    asked = False
    while True:
        try:
            await ask()  # type: ignore[misc]
            return
        except (ServerLostError, EngineError) as error:
            if (how := gone()) is not None:
                raise EngineError(how) from None
            if time.monotonic() > end:
                raise EngineError(f"no server answers at {url} after {limit_s:g} s: {error}") from None
            if not asked:
                waiting(error)
            asked = True
        await asyncio.sleep(_POLL_S)


class GivenServer:
    """A server that somebody else runs. Lost means: wait until it is back."""

    found = True

    def __init__(self, url: str, ask: Callable[[], object], limit_s: float) -> None:
        self.url, self.incarnation = url, 0
        self._ask, self._limit_s = ask, limit_s
        self._deaths = 0

    async def start(self) -> None:
        await until_healthy(self.url, self._limit_s, self.gone, self._ask, self._say_that_it_waits)

    def _say_that_it_waits(self, error: EngineError) -> None:
        _log.warning(
            "the server at %s does not answer; waiting for %g s (engine.start_timeout_s). Start it, or correct "
            "engine.urls (%s)", self.url, self._limit_s, error,
        )  # fmt: skip

    async def replace(self) -> None:
        self.incarnation += 1
        self._deaths += 1
        if self._deaths > MOST_DEATHS:  # it may say that it is well, and answer nothing else
            raise EngineError(
                f"the server at {self.url} was lost {self._deaths} times in a row without serving a request"
            )
        _log.warning("the server at %s is lost; waiting until it is back", self.url)
        await self.start()

    def gone(self) -> str | None:
        return None

    def answered(self) -> None:
        self._deaths = 0

    async def close(self) -> None: ...


class StartedServer:
    """A server that Headrace runs on this machine's loopback."""

    found = False

    def __init__(
        self,
        name: str,
        command: Callable[[int], Sequence[str]],
        environment: Mapping[str, str],
        log: Path,
        ask: Callable[[], object],
        limit_s: float,
    ) -> None:
        self.incarnation = 0
        self._name, self._command, self._environment = name, command, environment
        self._log_path, self._ask, self._limit_s = log, ask, limit_s
        self._port = free_port()
        self._child: ChildProcess | None = None
        self._deaths = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def child(self) -> ChildProcess | None:
        return self._child

    async def start(self) -> None:
        self._child = await asyncio.to_thread(
            ChildProcess, self._command(self._port), self._environment, self._log_path
        )
        await until_healthy(self.url, self._limit_s, self.gone, self._ask)

    async def replace(self) -> None:
        while True:
            self._deaths += 1
            how = self.gone() or f"{self._name} does not answer"
            if self._deaths > MOST_DEATHS:
                await self._end()  # or who waits for an answer of a half-dead server, as a weight sync may, waits on
                raise EngineError(f"{self._name} died {self._deaths} times in a row without serving a request; {how}")
            _log.warning("%s is lost and is started again: %s", self._name, how.splitlines()[0])
            await self._end()
            self.incarnation += 1
            try:
                return await self.start()
            except EngineError:
                if self.gone() is None:  # it runs and does not answer in all the time that it has
                    raise
            # it died before it served: once more, since what killed it may be over (a machine short of memory)

    def gone(self) -> str | None:
        code = self._child.exit_code() if self._child else None
        if code is None or self._child is None:
            return None
        how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        return f"{self._name} ended ({how}); {self._log_path} says:\n{self._child.last_errors()}"

    def answered(self) -> None:
        self._deaths = 0

    async def close(self) -> None:
        await self._end()

    async def _end(self) -> None:
        if self._child is not None:
            await asyncio.to_thread(self._child.end)


def free_port() -> int:
    """A port on loopback that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
