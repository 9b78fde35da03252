"""ServerEngine: one inference server behind the engine protocol, whichever server that is.

Requests go to the server at once; it batches them. While the engine is paused, no answer is delivered: not before the
proof that the weights arrived. If the server is lost it is started again, gets the current weights, and what was under
way is asked again with the same seeds.
"""

from __future__ import annotations

import asyncio
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import ClassVar

from headrace.engines.base import DEFAULT_SAMPLING, EngineHealth, Generation, SamplingParams
from headrace.engines.request import Request, checked_ids, checked_rows
from headrace.engines.servers.client import ServerClient, ServerRefusedError
from headrace.engines.servers.life import ServerLife, ServerOptions
from headrace.engines.servers.server import Server
from headrace.errors import DataError, EngineError, ServerLostError
from headrace.weights.base import Endpoint


class ServerEngine(ServerLife):
    """Made on any thread; from its first call on it belongs to the event loop of that call."""

    kind: ClassVar[str]

    def __init__(self, server: Server, client: Callable[[], ServerClient], options: ServerOptions) -> None:
        super().__init__(server, client, options)
        self._defaults = options.defaults.filled(DEFAULT_SAMPLING)
        self.max_model_length = options.max_model_length
        self._asleep = False
        self._pinned: int | None = None
        self._pinned_here = False  # by the server as it is: the next life of it has other weights
        self._in_flight: dict[Request, int] = {}  # and the version that each was asked of
        self._scoring = asyncio.Lock()
        self._busy_s = self._busy_since = 0.0

    # ---- what each kind of server has its own way of --------------------------------------------------------------

    @abstractmethod
    async def _generation(self, request: Request, pinned: bool) -> Generation:
        """Ask until a server that still counts has answered."""

    @abstractmethod
    async def _score(self, row: Sequence[int]) -> list[float]:
        """Log-probabilities of a row's tokens, from the second on."""

    @abstractmethod
    async def begin_update(self, version: int) -> None: ...

    @abstractmethod
    async def end_update(self, version: int) -> None: ...

    @abstractmethod
    async def _let_go(self) -> None: ...

    @abstractmethod
    async def _release(self) -> None:
        """Give memory back while the learner works; `_wake` takes it again."""

    @abstractmethod
    async def _wake(self) -> None: ...

    @property
    @abstractmethod
    def _world_size(self) -> int: ...

    def _forget_life(self) -> None:
        """Of what was known of the server only what outlives it stays."""
        self._asleep = self._pinned_here = False

    # ---- sampling -------------------------------------------------------------------------------------------------

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, seed: int, pinned: bool = False
    ) -> Generation:
        options = self._options
        ids = checked_ids(prompt_ids, options.vocabulary)
        filled = params.filled(self._defaults)
        request = Request.new(
            ids, filled, seed % 2**64, self.max_model_length, frozenset(options.eos_ids), options.detokenize
        )
        self._check_usable()
        self._enter(request)
        try:
            return await self._until_closed(self._generation(request, pinned))
        finally:
            self._leave(request)

    async def _asked_in_vain(self, life: tuple[int, int], error: ServerLostError | ServerRefusedError) -> None:
        """Return when it is worth asking again."""
        if isinstance(error, ServerRefusedError):
            if error.status < 500:
                raise DataError(str(error)) from None
            if life == self._life() and await self._healthy():
                raise EngineError(str(error)) from None
        await self._lost(life, error)

    async def compute_logprobs(self, rows: Sequence[Sequence[int]]) -> list[list[float]]:
        checked = checked_rows(rows, self._options.vocabulary, self.max_model_length)
        self._check_usable()
        await self._opened()
        async with self._scoring:  # a paused server schedules nothing: it is resumed for as long as this takes
            await self._until_closed(self._alive.wait())
            paused = not self._going.is_set()
            if paused and not self._up.is_set():  # it would be proved by weights that nobody has sent
                raise ServerLostError(f"{self.server.url} was started again and has no weights yet", self.server.url)
            if paused:
                await self._let_go()
            try:
                return await self._until_closed(asyncio.gather(*map(self._score, checked)))
            finally:
                if paused:
                    await self._hold()

    # ---- weights --------------------------------------------------------------------------------------------------

    def endpoints(self) -> list[Endpoint]:
        headers = tuple(self._client.headers.items())
        return [Endpoint(self.server.url, self.kind, self._world_size, self.server.incarnation, headers)]

    async def pause(self) -> None:
        self._check_usable()
        await self._opened()
        self._going.clear()
        await self._until_closed(self._alive.wait())
        with suppress(ServerLostError):  # the one that comes in its place is paused before it serves
            await self._hold()
            self._tokens = await self._count_tokens()  # what was still on its way when it stopped

    async def resume(self) -> None:
        self._check_usable()
        await self._opened()
        await self._until_closed(self._alive.wait())
        with suppress(ServerLostError):  # the one that comes in its place starts without a pause
            await self._wake()
            await self._let_go()
        self._going.set()

    async def _ready_for_update(self, version: int) -> None:
        """The server lives and is paused."""
        self._check_usable()
        await self._opened()
        await self._until_closed(self._alive.wait())
        if self._going.is_set():
            raise EngineError(f"version {version} changes the weights of a server that decodes; pause the engine first")
        await self._wake()

    @property
    def _kept(self) -> int | None:
        """The pinned version, while the server has it."""
        return self._pinned if self._pinned_here else None

    def _check_unpinned(self) -> None:
        if self._kept is not None:
            raise EngineError(
                f"version {self._pinned} is pinned, and one server has one version at a time; unpin first"
            )

    def _has_version(self, said: str) -> None:
        """The server serves these weights, by its own words."""
        self._version = int(said)
        self._synced = True
        self._up.set()

    async def pin(self) -> int:
        self._check_usable()
        if self._kept is not None:
            raise EngineError(f"version {self._pinned} is pinned already; call unpin before pinning another")
        self._pinned, self._pinned_here = self._version, True
        return self._version

    async def unpin(self) -> None:
        if self._pinned is None:
            raise EngineError("nothing is pinned; call pin before unpin")
        self._pinned = None

    async def release_cache(self) -> None:
        """Memory goes back while the learner works: weights come back with `resume`, or with the next sync."""
        self._check_usable()
        await self._opened()
        if self._in_flight and self._going.is_set():
            raise EngineError(
                f"{len(self._in_flight)} sequences are being decoded; pause the engine before releasing its cache"
            )
        with suppress(ServerLostError):  # the one that comes in its place is only paused
            await self._release()

    # ---- bookkeeping ----------------------------------------------------------------------------------------------

    def health(self) -> EngineHealth:
        count = len(self._in_flight)
        running = min(count, self._options.max_batch)
        now = time.perf_counter()
        return EngineHealth(
            alive=not self._closed.is_set() and self._error is None,
            paused=not self._going.is_set(),
            version=self._version,
            running=running,
            waiting=count - running,
            generated_tokens=self._tokens_before + self._tokens,
            busy_s=self._busy_s + (now - self._busy_since if count else 0.0),
            error=str(self._error) if self._error else None,
            restarts=self._restarts,
            state=self._state(),
            reissued=self._reissued,
            pinned=self._kept,
        )

    def _decodes(self) -> bool:
        return bool(self._in_flight) and self._going.is_set() and self._up.is_set()

    def _state(self) -> str:
        if self._opening is None or self._up.is_set():
            return "serving"
        return "unsynced" if self._alive.is_set() else "starting"

    def _enter(self, request: Request) -> None:
        if not self._in_flight:
            self._busy_since = time.perf_counter()
        self._in_flight[request] = self._version

    def _leave(self, request: Request) -> None:
        self._in_flight.pop(request, None)
        if not self._in_flight:
            self._busy_s += time.perf_counter() - self._busy_since
