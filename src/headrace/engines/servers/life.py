"""ServerLife: a server is opened, watched, lost, and started again."""

from __future__ import annotations

import asyncio
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from headrace.engines.base import DEFAULT_SAMPLING, SamplingParams
from headrace.engines.request import Detokenize
from headrace.engines.servers.client import ServerClient, ServerRefusedError
from headrace.engines.servers.server import Server
from headrace.errors import EngineError, ServerLostError

_POLL_LIMIT_S = 30.0
LONGEST_REPLY_S = 86_400.0
"""Sampling has no limit of its own: whether it makes progress is watched."""


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """What one engine of servers is set to."""

    vocabulary: int
    max_model_length: int
    eos_ids: tuple[int, ...] = ()
    detokenize: Detokenize | None = None
    defaults: SamplingParams = DEFAULT_SAMPLING
    max_batch: int = 128
    recompute: bool = False
    """Clear the cache of sequences in flight at a weight sync."""
    sleeps: bool = False
    """Give the server's memory back while the learner works."""
    transport: str = "file"
    health_every_s: float = 2.0
    hang_s: float = 300.0
    """How long it may decode without a token before it is taken for lost."""
    server_stops: bool = True
    """Whether the server has a tokenizer, with which it can search for stop strings."""
    routed_experts: bool = False
    """Ask for the experts that tokens are routed to."""
    waits: bool = True
    """Whether requests wait for a lost server to be back; otherwise their callers get ServerLostError."""


class ServerLife(ABC):
    """From its first call on it belongs to the event loop of that call."""

    tokens_pattern: ClassVar[re.Pattern[str]]
    """Finds, in the server's /metrics, how many tokens it has sampled."""

    def __init__(self, server: Server, client: Callable[[], ServerClient], options: ServerOptions) -> None:
        self.server = server
        self._new_client = client
        self._client = client()
        self._options = options
        self._poll_s = min(_POLL_LIMIT_S, options.hang_s)
        self._version = 0
        self._synced = False  # whether weights were ever sent
        self._restore: Callable[[Self], Awaitable[bool]] | None = None
        self._opening: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._recovering: asyncio.Task[None] | None = None
        self._alive, self._up, self._going = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._going.set()
        self._epoch = 0
        self._restarts = 0
        self._reissued = 0
        self._tokens_before = self._tokens = self._tokens_of_others = self._answered = 0
        self._progress = (0, time.monotonic())  # tokens and answers, and when their number last changed
        self._error: EngineError | None = None
        self._closed = asyncio.Event()  # by its owner, or by an error
        self._ended = False

    # ---- what each kind of server has its own way of --------------------------------------------------------------

    @abstractmethod
    async def _revive(self) -> None:
        """Have a server decode that may have been left paused, or in the middle of a weight update."""

    @abstractmethod
    async def _inspect(self) -> None:
        """Learn what the server is and can do; an error says what is missing."""

    @abstractmethod
    async def _name_version(self, version: int) -> None:
        """Have the server call its weights that."""

    @abstractmethod
    async def _hold(self) -> None:
        """Have the server stop between two tokens."""

    @abstractmethod
    async def _abort_all(self) -> None: ...

    @abstractmethod
    def _decodes(self) -> bool:
        """Whether it has something to do that makes tokens."""

    @abstractmethod
    def _forget_life(self) -> None:
        """Of what was known of the server only what outlives it stays."""

    # ---- one life after the other ---------------------------------------------------------------------------------

    def when_restarted(self, restore: Callable[[Self], Awaitable[bool]]) -> None:
        """Who brings the current weights to a server that was started again; False leaves it to the next sync."""
        self._restore = restore

    async def restart(self) -> None:
        """Have the server give up all requests; they are asked again."""
        self._check_usable()
        await self._opened()
        await self._until_closed(self._alive.wait())
        self._epoch += 1
        self._restarts += 1
        await self._abort_all()

    def _life(self) -> tuple[int, int]:
        return self.server.incarnation, self._epoch

    async def _opened(self) -> None:
        """Return when the server has answered for the first time."""
        if self._opening is None:
            self._opening = asyncio.create_task(self._open(), name="headrace-server-open")
        await asyncio.shield(self._opening)

    async def _open(self) -> None:
        await self.server.start()
        self._client = self._new_client()  # a server may know its address only now
        try:
            await self._greet()
        except ServerLostError:  # it said that it was well, and answers nothing else
            while not await self._replaced():
                pass
        self._alive.set()
        self._up.set()
        self._watching = asyncio.create_task(self._watch(), name="headrace-server-watch")

    async def _greet(self) -> None:
        """A server that was just started, or found."""
        if self.server.found:
            await self._revive()
        await self._inspect()
        await self._name_version(self._version)
        self._tokens_of_others = self._answered = 0
        self._tokens_of_others = await self._count_tokens()

    async def _watch(self) -> None:
        """Looks on an interval whether the server lives, and how many tokens it has sampled."""
        while True:
            await asyncio.sleep(self._options.health_every_s)
            await self._alive.wait()
            life = self._life()
            with suppress(ServerLostError):  # who waits for no server learns it from its own requests
                try:
                    if self.server.gone() is not None:
                        raise ServerLostError("the process ended")
                    self._tokens = await self._count_tokens()
                    self._require_progress()
                except (ServerLostError, ServerRefusedError) as error:
                    await self._lost(life, error)

    def _require_progress(self) -> None:
        """Raise ServerLostError if the server answers, and samples nothing though it is asked to."""
        now, made = time.monotonic(), self._tokens + self._reissued
        if made != self._progress[0] or not self._decodes():
            self._progress = (made, now)
        elif now - self._progress[1] > self._options.hang_s:
            self._progress = (made, now)
            raise ServerLostError(f"it has sampled no token for {self._options.hang_s:g} s, and it has requests")

    async def _lost(self, life: tuple[int, int], why: Exception) -> None:
        """Take note that a request or a check failed in a life of the server; returns when there is another."""
        if life != self._life():
            self._reissued += 1
            await asyncio.sleep(0.01)
            return
        if self._recovering is None:
            self._begin_recovery()
        if not self._options.waits:
            raise ServerLostError(f"{self.server.url} is lost: {why}", self.server.url) from why
        await self.recovered()

    def replace_server(self) -> None:
        """Start the server again, whatever it says of itself: it does not decode with what was sent."""
        if self._recovering is None:
            self._begin_recovery()

    def _begin_recovery(self) -> None:
        self._alive.clear()
        self._up.clear()
        self._recovering = asyncio.create_task(self._recover(), name="headrace-server-recover")

    async def _healthy(self) -> bool:
        try:
            await self._client.get("/health", self._poll_s)
            return self.server.gone() is None
        except (ServerLostError, ServerRefusedError):
            return False

    async def recovered(self) -> None:
        """Return when the server can be talked to again."""
        await self._until_closed(self._alive.wait())

    async def _recover(self) -> None:
        try:
            self._tokens_before += self._tokens
            self._tokens, self._restarts = 0, self._restarts + 1
            self._forget_life()
            while not await self._replaced():
                pass
            self._recovering = None
            self._alive.set()
            if not self._synced or (self._restore is not None and await self._restore(self)):
                self._up.set()
            # else the next sync brings the weights
        except ServerLostError:
            pass  # lost once more: that is another recovery
        except Exception as error:  # every caller must hear of it
            self._fail(error)

    async def _replaced(self) -> bool:
        """Another server in place of the lost one; False if that is lost as well before it is ready."""
        await self._client.close()
        await self.server.replace()
        self._client = self._new_client()
        try:
            await self._greet()
            if not self._going.is_set():
                await self._hold()
        except ServerLostError:
            return False
        return True

    async def _post(self, path: str, body: Any = None) -> Any:
        """A call that the server must answer; one that fails is taken for a lost server by whoever made it."""
        life = self._life()
        try:
            return await self._client.post(path, body)
        except (ServerLostError, ServerRefusedError) as error:
            if isinstance(error, ServerRefusedError) and (error.status < 500 or await self._healthy()):
                raise  # it says no; one whose engine died under it is not well
            if life == self._life() and self._recovering is None:
                self._begin_recovery()
            raise ServerLostError(str(error), self.server.url) from None

    def _count_answer(self, tokens: int) -> None:
        self._answered += tokens
        self._tokens = max(self._tokens, self._answered)  # the server is asked only now and then

    async def _count_tokens(self) -> int:
        """Tokens that this life of the server has sampled for us."""
        total = sum(map(float, self.tokens_pattern.findall(await self._client.get("/metrics", self._poll_s))))
        return max(int(total) - self._tokens_of_others, self._answered)

    # ---- the end --------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        if self._ended:
            return
        self._ended = True
        self._closed.set()
        tasks = [task for task in (self._opening, self._watching, self._recovering) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._client.close()
        await self.server.close()

    async def _until_closed(self, work: Awaitable[Any]) -> Any:
        """The result, unless the engine is closed or fails before."""
        task = asyncio.ensure_future(work)
        closed = asyncio.ensure_future(self._closed.wait())
        try:
            await asyncio.wait((task, closed), return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            if self._error is not None:
                raise EngineError(f"the engine has stopped: {self._error}") from self._error
            raise EngineError("the engine was closed while the request was under way")
        finally:
            closed.cancel()
            if not task.done():
                task.cancel()
                with suppress(asyncio.CancelledError, Exception):
                    await task

    def _check_usable(self) -> None:
        if self._error is not None:
            raise EngineError(f"the engine has stopped: {self._error}") from self._error
        if self._closed.is_set():
            raise EngineError("the engine is closed")

    def _fail(self, error: Exception) -> None:
        self._error = error if isinstance(error, EngineError) else EngineError(f"{type(error).__name__}: {error}")
        self._closed.set()
