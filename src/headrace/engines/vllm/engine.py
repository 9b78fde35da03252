"""VllmEngine: one vLLM server behind the engine protocol.

Requests go to the server at once; it batches them. A weight sync pauses it between two tokens, so sequences in
flight continue with the new weights, and every token's version comes back with it. While the engine is paused, no
answer is delivered: not before the proof that the weights arrived. If the server is lost it is started again, gets the
current weights, and what was under way is asked again with the same seeds.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from headrace.engines.base import DEFAULT_SAMPLING, EngineHealth, Generation, SamplingParams
from headrace.engines.request import Detokenize, Request, checked_ids
from headrace.engines.servers.client import ServerClient, ServerRefusedError
from headrace.engines.servers.server import Server
from headrace.engines.vllm.checks import ServerFacts, inspect_server
from headrace.engines.vllm.messages import (
    AbortedError,
    generate_body,
    row_logprobs,
    score_body,
    score_token_body,
    take_answer,
    token_logprob,
)
from headrace.errors import DataError, EngineError, ServerLostError
from headrace.weights.base import Endpoint
from headrace.weights.names import adapter_name

_TOKENS = re.compile(r"^vllm:generation_tokens_total(?:\{[^}]*\})? ([0-9.e+]+)", re.MULTILINE)
_POLL_LIMIT_S = 30.0
Restore = Callable[["VllmEngine"], Awaitable[bool]]


@dataclass(frozen=True, slots=True)
class VllmOptions:
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
    server_stops: bool = True
    """Whether the server has a tokenizer, with which it can search for stop strings."""
    waits: bool = True
    """Whether requests wait for a lost server to be back; otherwise their callers get ServerLostError."""


class VllmEngine:
    """Made on any thread; from its first call on it belongs to the event loop of that call."""

    def __init__(self, server: Server, client: Callable[[], ServerClient], options: VllmOptions) -> None:
        self.server = server
        self._new_client = client
        self._client = client()
        self._options = options
        self._defaults = options.defaults.filled(DEFAULT_SAMPLING)
        self.max_model_length = options.max_model_length
        self._facts: ServerFacts | None = None
        self._version = 0
        self._synced = False  # whether weights were ever sent
        self._adapters = options.transport == "adapter"
        self._loaded: set[int] = set()  # versions whose adapters the server has
        self._restore: Restore | None = None
        self._opening: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._recovering: asyncio.Task[None] | None = None
        self._alive, self._up, self._going = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._going.set()
        self._updating = False
        self._asleep = False
        self._pinned: int | None = None
        self._in_flight: dict[Request, int] = {}  # and the version that each was asked of
        self._unloading: set[asyncio.Task[None]] = set()
        self._scoring = asyncio.Lock()
        self._epoch = 0
        self._restarts = 0
        self._reissued = 0
        self._tokens_before = self._tokens = self._tokens_of_others = self._answered = 0
        self._busy_s = self._busy_since = 0.0
        self._error: EngineError | None = None
        self._closed = asyncio.Event()  # by its owner, or by an error
        self._ended = False

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

    async def _generation(self, request: Request, pinned: bool) -> Generation:
        """Ask until a server that still counts has answered."""
        while True:
            await self._opened()
            await self._up.wait()
            life, version = self._life(), self._version_for(pinned)
            self._in_flight[request] = version
            try:
                answer = await self._client.post("/inference/v1/generate", self._body(request, version, pinned))
                reason = take_answer(request, answer, version if self._adapters else None, self.server.url)
            except (ServerLostError, AbortedError) as error:
                await self._lost(life, error)
                request.start_over()
                continue
            except ServerRefusedError as error:
                if error.status < 500:
                    raise DataError(str(error)) from None
                if life == self._life() and await self._healthy():
                    raise EngineError(str(error)) from None
                await self._lost(life, error)
                request.start_over()
                continue
            self.server.answered()
            self._answered += len(request.ids)
            self._tokens = max(self._tokens, self._answered)  # the server is asked only now and then
            await self._going.wait()  # nothing is delivered between a sync and its proof
            if life != self._life():  # an answer of a server that was lost since, with weights nobody vouches for
                request.start_over()
                self._reissued += 1
                continue
            return request.generation(reason)

    def _body(self, request: Request, version: int, pinned: bool) -> dict[str, Any]:
        assert self._facts is not None
        priority = -1 if pinned and self._facts.priorities else 0
        return generate_body(request, self._model(version), f"v{version}", self._options.server_stops, priority)

    def _version_for(self, pinned: bool) -> int:
        return self._pinned if pinned and self._adapters and self._pinned is not None else self._version

    def _model(self, version: int) -> str:
        """What the server calls the weights of a version."""
        assert self._facts is not None
        if not self._adapters or not self._synced:
            return self._facts.model
        if version not in self._loaded:
            raise EngineError(f"the adapters of version {version} were lost with the server that had them")
        return adapter_name(version)

    async def compute_logprobs(self, rows: Sequence[Sequence[int]]) -> list[list[float]]:
        checked = [checked_ids(row, self._options.vocabulary) for row in rows]
        longest = max(map(len, checked), default=0)
        if longest > self.max_model_length:
            raise DataError(
                f"a row has {longest} tokens, which is more than max_model_length {self.max_model_length}; "
                f"shorten it or raise engine.max_model_length"
            )
        self._check_usable()
        await self._opened()
        async with self._scoring:  # a paused server schedules nothing: it is resumed for as long as this takes
            await self._until_closed(self._alive.wait())
            paused = not self._going.is_set()
            if paused:
                await self._let_go()
            try:
                return await self._until_closed(asyncio.gather(*map(self._score, checked)))
            finally:
                if paused:
                    await self._hold()

    async def _score(self, row: Sequence[int]) -> list[float]:
        if len(row) < 2:
            return []
        model, path, url = self._model(self._version), "/inference/v1/generate", self.server.url
        if not self._adapters:
            return row_logprobs(row, await self._post(path, score_body(row, model)), url)
        places = range(1, len(row))
        answers = await asyncio.gather(*(self._post(path, score_token_body(row, at, model)) for at in places))
        return [token_logprob(row[at], answer, url) for at, answer in zip(places, answers, strict=True)]

    async def _hold(self) -> None:
        """Have the server stop between two tokens, with all it has."""
        await self._post("/pause?mode=keep&clear_cache=false")

    async def _let_go(self) -> None:
        await self._post("/resume")

    async def _count_tokens(self) -> int:
        """Tokens that this life of the server has sampled for us."""
        total = sum(map(float, _TOKENS.findall(await self._client.get("/metrics", _POLL_LIMIT_S))))
        return max(int(total) - self._tokens_of_others, self._answered)

    # ---- weights --------------------------------------------------------------------------------------------------

    def endpoints(self) -> list[Endpoint]:
        assert self._facts is not None, "begin_update comes before a sender asks where to send"
        headers = tuple(self._client.headers.items())
        return [Endpoint(self.server.url, "vllm", self._facts.world_size, self.server.incarnation, headers)]

    def when_restarted(self, restore: Restore) -> None:
        """Who brings the current weights to a server that was started again; False leaves it to the next sync."""
        self._restore = restore

    async def pause(self) -> None:
        self._check_usable()
        await self._opened()
        self._going.clear()
        await self._alive.wait()
        with suppress(ServerLostError):  # the one that comes in its place is paused before it serves
            await self._hold()
            self._tokens = await self._count_tokens()  # what was still on its way when it stopped

    async def resume(self) -> None:
        self._check_usable()
        await self._opened()
        await self._alive.wait()
        with suppress(ServerLostError):  # the one that comes in its place starts without a pause
            await self._wake()
            await self._let_go()
        self._going.set()

    async def begin_update(self, version: int) -> None:
        self._check_usable()
        await self._opened()
        await self._alive.wait()
        if self._pinned is not None and not self._adapters:
            raise EngineError(
                f"version {self._pinned} is pinned, and one server has one version at a time; unpin first"
            )
        if self._going.is_set():
            raise EngineError(f"version {version} changes the weights of a server that decodes; pause the engine first")
        await self._wake()
        if self._options.recompute:
            await self._post("/pause?mode=keep&clear_cache=true")
        if not self._transfers:
            return
        if self._updating:  # of an attempt that was given up
            with suppress(ServerRefusedError):
                await self._post("/finish_weight_update")
        await self._post("/start_weight_update")
        self._updating = True

    async def end_update(self, version: int) -> None:
        self._check_usable()
        if self._transfers:
            await self._post("/finish_weight_update")
        self._updating = False
        if self._adapters:
            self._loaded.add(version)
        await self._post("/update_weight_version", {"new_version": str(version)})
        said = (await self._client.get("/weight_info"))["weight_version"]
        self._version = int(said)
        self._synced = True
        self._up.set()
        self._unload_unused()

    @property
    def _transfers(self) -> bool:
        """Whether weights come through vLLM's interface for weight transfer."""
        return self._options.transport not in ("disk", "adapter")

    def _unload_unused(self) -> None:
        """Adapters that no request uses any more make room."""
        unused = self._loaded - {self._version, self._pinned, *self._in_flight.values()}
        self._loaded -= unused
        for version in unused:
            task = asyncio.create_task(self._unload(version))
            self._unloading.add(task)
            task.add_done_callback(self._unloading.discard)

    async def _unload(self, version: int) -> None:
        with suppress(ServerLostError, ServerRefusedError):  # a server that was started again does not have it
            await self._client.post("/v1/unload_lora_adapter", {"lora_name": adapter_name(version)})

    async def pin(self) -> int:
        self._check_usable()
        if self._pinned is not None:
            raise EngineError(f"version {self._pinned} is pinned already; call unpin before pinning another")
        self._pinned = self._version
        return self._version

    async def unpin(self) -> None:
        if self._pinned is None:
            raise EngineError("nothing is pinned; call pin before unpin")
        while self._adapters and self._pinned in self._in_flight.values():  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        self._pinned = None
        self._unload_unused()

    async def release_cache(self) -> None:
        """Memory goes back while the learner works: weights to the host, the cache nowhere."""
        self._check_usable()
        await self._opened()
        if self._in_flight and self._going.is_set():
            raise EngineError(
                f"{len(self._in_flight)} sequences are being decoded; pause the engine before releasing its cache"
            )
        if self._going.is_set():
            await self._post("/reset_prefix_cache")
        elif self._options.sleeps:
            await self._post("/sleep?level=1&mode=keep")
            self._asleep = True
        else:
            await self._post("/pause?mode=keep&clear_cache=true")

    async def _wake(self) -> None:
        if not self._asleep:
            return
        await self._post("/wake_up")
        self._asleep = False
        # waking up resumes, and the caller has not
        await self._hold()

    # ---- one life after the other ---------------------------------------------------------------------------------

    async def restart(self) -> None:
        """Have the server give up all requests; they are asked again."""
        self._check_usable()
        await self._opened()
        await self._alive.wait()
        self._epoch += 1
        self._restarts += 1
        await self._post("/abort_requests", {})

    def _life(self) -> tuple[int, int]:
        return self.server.incarnation, self._epoch

    async def _opened(self) -> None:
        """Return when the server has answered for the first time."""
        if self._opening is None:
            self._opening = asyncio.create_task(self._open(), name="headrace-vllm-open")
        await asyncio.shield(self._opening)

    async def _open(self) -> None:
        await self.server.start()
        self._client = self._new_client()  # a server may know its address only now
        await self._greet()
        self._alive.set()
        self._up.set()
        self._watching = asyncio.create_task(self._watch(), name="headrace-vllm-watch")

    async def _greet(self) -> None:
        """A server that was just started, or found."""
        self._facts = await inspect_server(self._client, self._options.transport, self._options.sleeps)
        await self._client.post("/update_weight_version", {"new_version": str(self._version)})
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
                except (ServerLostError, ServerRefusedError) as error:
                    await self._lost(life, error)

    async def _lost(self, life: tuple[int, int], why: Exception) -> None:
        """Take note that a request or a check failed in a life of the server; returns when there is another."""
        if life != self._life() or isinstance(why, AbortedError):
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
        self._recovering = asyncio.create_task(self._recover(), name="headrace-vllm-recover")

    async def _healthy(self) -> bool:
        try:
            await self._client.get("/health", _POLL_LIMIT_S)
            return self.server.gone() is None
        except (ServerLostError, ServerRefusedError):
            return False

    async def recovered(self) -> None:
        """Return when the server can be talked to again."""
        await self._until_closed(self._alive.wait())

    async def _recover(self) -> None:
        try:
            self._tokens_before += self._tokens
            self._tokens, self._restarts, self._updating, self._asleep = 0, self._restarts + 1, False, False
            self._loaded.clear()
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
        except ServerLostError as error:
            if life == self._life() and self._recovering is None:
                self._begin_recovery()
            raise ServerLostError(str(error), self.server.url) from None

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
        )

    def _state(self) -> str:
        if self._opening is None or self._up.is_set():
            return "serving"
        return "unsynced" if self._alive.is_set() else "starting"

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

    def _enter(self, request: Request) -> None:
        if not self._in_flight:
            self._busy_since = time.perf_counter()
        self._in_flight[request] = self._version

    def _leave(self, request: Request) -> None:
        self._in_flight.pop(request, None)
        if len(self._loaded) > 1 and not self._closed.is_set():
            self._unload_unused()
        if not self._in_flight:
            self._busy_s += time.perf_counter() - self._busy_since

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
                with suppress(BaseException):
                    await task

    def _check_usable(self) -> None:
        if self._error is not None:
            raise EngineError(f"the engine has stopped: {self._error}") from self._error
        if self._closed.is_set():
            raise EngineError("the engine is closed")

    def _fail(self, error: Exception) -> None:
        self._error = error if isinstance(error, EngineError) else EngineError(f"{type(error).__name__}: {error}")
        self._closed.set()
