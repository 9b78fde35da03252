"""Servers on a cluster: an actor starts each on its node, and ends it. They listen on the node's address, to whoever
has the token of this run."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from headrace.cluster.placement import SHARE, Placed, open_placements, place
from headrace.config import RunConfig
from headrace.config.derived import shares_bundles
from headrace.engines.servers.server import MOST_DEATHS, until_healthy
from headrace.errors import EngineError
from headrace.utils.child_process import ChildProcess

_log = logging.getLogger("headrace")
_POLL_S = 0.2
_NOWHERE = "http://not-started.invalid"


class PortableLaunch(Protocol):
    """How a server is started on a node that is not this one: plain data, which reads the node's environment there."""

    def listening(self, host: str, token: str) -> PortableLaunch: ...
    def command(self, port: int) -> Sequence[str]: ...
    def environment(self) -> dict[str, str]: ...


class ServerActor:
    """Runs one server on its node. It ends with the actor."""

    def start(self, launch: PortableLaunch, token: str, log: Path) -> str:
        """The server's address. The log is in the run's folder if this node has it."""
        host = ray.util.get_node_ip_address()
        with socket.socket() as probe:
            probe.bind((host, 0))
            port = probe.getsockname()[1]
        made = launch.listening(host, token)
        path = log if log.parent.parent.is_dir() else Path(tempfile.mkdtemp(prefix="headrace-engines-")) / log.name
        self._child = ChildProcess(made.command(port), made.environment(), path)
        return f"http://{host}:{port}"

    def pid(self) -> int:
        """Of this actor's process, with which the server ends."""
        return os.getpid()

    def ended(self) -> str:
        """Returns when the server has ended: how, and the end of its log."""
        while (code := self._child.exit_code()) is None:
            time.sleep(_POLL_S)
        how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        return f"ended ({how}); {self._child.log} says:\n{self._child.last_errors()}"


class RayServer:
    """A server in a bundle, as its engine sees it. After a loss it is started again where Ray has the bundle then."""

    found = False

    def __init__(
        self, name: str, launch: PortableLaunch, options: Callable[[], Mapping[str, Any]], log: Path,
        ask: Callable[[], object], limit_s: float, patience_s: float,
    ) -> None:  # fmt: skip
        self.url: str = _NOWHERE
        self.incarnation = 0
        self.token = secrets.token_hex(32)
        self._name, self._launch, self._options = name, launch, options
        self._log, self._ask, self._limit_s, self._patience_s = log, ask, limit_s, patience_s
        self._actor: Any = None
        self._ended: Any = None
        self._deaths = 0
        self._lost = False  # with its actor or node

    async def start(self) -> None:
        while True:
            await asyncio.to_thread(self._place)
            try:
                return await until_healthy(self.url, self._limit_s, self.gone, self._ask)
            except EngineError as error:
                self._deaths += 1
                if not self._lost or self._deaths > MOST_DEATHS:  # by itself, it would end again
                    raise
                _log.warning("%s; it is started again", error)

    async def replace(self) -> None:
        self._deaths += 1
        how = await asyncio.to_thread(self.gone) or f"{self._name} does not answer"
        if self._deaths > MOST_DEATHS:
            raise EngineError(f"{self._name} died {self._deaths} times in a row without serving a request; {how}")
        _log.warning("%s is lost and is started again: %s", self._name, how.splitlines()[0])
        self.incarnation += 1
        await self.start()

    def gone(self) -> str | None:
        if self._ended is None or not ray.wait([self._ended], timeout=0)[0]:
            return None
        try:
            return f"{self._name} {ray.get(self._ended)}"
        except RayError as error:
            self._lost = True
            return f"the actor or the node of {self._name} is lost: {str(error).strip().splitlines()[0]}"

    def answered(self) -> None:
        self._deaths = 0

    async def close(self) -> None:
        await asyncio.to_thread(self._kill)

    def _place(self) -> None:
        """Start the actor, and it the server; again if the node is lost meanwhile."""
        end = time.monotonic() + self._patience_s
        while True:
            self._kill()
            remote: Any = ray.remote  # whose types do not know all that it takes
            kind = remote(concurrency_groups={"watch": 2}, max_restarts=0)(ServerActor)
            try:
                self._actor = kind.options(**self._options()).remote()
                asked = self._actor.start.remote(self._launch, self.token, self._log)
                self.url = str(ray.get(asked, timeout=max(1.0, end - time.monotonic())))
                self._ended = self._actor.ended.options(concurrency_group="watch").remote()
                return
            except GetTimeoutError:
                self._kill()
                raise EngineError(
                    f"no node took {self._name} within cluster.patience_s = {self._patience_s:g}; add nodes, or raise "
                    f"it"
                ) from None
            except RayActorError as error:
                if time.monotonic() > end:
                    raise EngineError(f"{self._name} could not be placed: {error}") from None
                time.sleep(_POLL_S)

    def _kill(self) -> None:
        actor, self._actor, self._ended, self._lost = self._actor, None, None, False
        if actor is not None and ray.is_initialized():
            with suppress(RayError, ValueError):
                ray.kill(actor)


class RayBundles:
    """A bundle for each server: of its own, or that of one of the learner's ranks."""

    def __init__(self, config: RunConfig) -> None:
        self._section, self._cluster = config.engine, config.cluster
        self._placed: Placed | None = None
        if not shares_bundles(config):
            self._placed = place("engine", config.engine.servers, config.cluster.engine, config.cluster)

    def server(self, number: int, name: str, launch: PortableLaunch, log: Path, ask: Callable[[], object]) -> RayServer:
        limits = self._section.start_timeout_s, self._cluster.patience_s
        return RayServer(name, launch, lambda: self._options(number), log, ask, *limits)

    def release(self) -> None:
        if self._placed is not None:
            self._placed.close()

    def _options(self, number: int) -> Mapping[str, Any]:
        if self._placed is not None:
            return self._placed.options(number)
        return _shared(number, self._cluster.patience_s)


def _shared(number: int, patience_s: float) -> Mapping[str, Any]:
    """A part of the bundle of a learner's rank. While ranks are started again, there is none: it waits."""
    end = time.monotonic() + patience_s
    while True:
        for placed in open_placements():
            if placed.what == "learner":
                return placed.options(number, SHARE)
        if time.monotonic() > end:
            raise EngineError(f"the learner has no placement to share after cluster.patience_s = {patience_s:g}")
        time.sleep(_POLL_S)
