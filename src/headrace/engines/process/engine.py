"""An engine in a process of its own: it generates while the learner learns.

The learner writes weights into shared memory, and the process decodes with them from the next token on. Requests and
answers go over a pair of sockets. If the process dies, another one starts with the weights that are still in the shared
memory, and gets the requests that were under way: with the same seeds, from their beginning. Callers only wait longer.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from headrace.engines.base import EngineHealth, Generation, SamplingParams
from headrace.engines.process.child import Launch, launch_engine
from headrace.engines.process.wire import (
    Answer,
    Call,
    Cancel,
    EngineOptions,
    Failed,
    Open,
    Opened,
    Served,
    encode,
    receive,
)
from headrace.errors import EngineError, ServerLostError
from headrace.utils.worker_process import describe_exit
from headrace.weights.shared_memory import SharedBuffers

_log = logging.getLogger("headrace")
_MOST_DEATHS = 3
_GRACE_S = 2.0
_PROGRESS = ("generate", "compute_logprobs")


@dataclass(frozen=True, slots=True)
class _Pending:
    """A call that has not been answered; `effect` is what an answer changes here."""

    method: str
    frame: bytes
    future: asyncio.Future[Any]
    effect: Callable[[Any], None]


class ProcessEngine:
    """The learner's side. Made on any thread; from its first call on it belongs to the event loop of that call."""

    def __init__(
        self, weights: SharedBuffers, options: EngineOptions, launch: Launch = launch_engine, waits: bool = True
    ) -> None:
        self._options = options
        self._waits = waits  # otherwise callers of a process that died hear of it: others may serve them at once
        self._launch = launch
        self._weights = weights
        self._weights.write(0)  # what the process starts with
        self._live = Served(version=0, buffer=0)
        self._digest: str | None = None
        self._pinned: Served | None = None
        self._next: int | None = None  # the buffer that is being loaded
        self._paused = False
        self._pending: dict[int, _Pending] = {}
        self._numbers = itertools.count()
        self._loading = asyncio.Lock()
        self._writer: asyncio.StreamWriter | None = None  # while a process is ready
        self._connection: asyncio.Task[None] | None = None
        self._restarting: list[asyncio.Future[None]] = []
        self._restarts = self._deaths_in_a_row = 0
        self._health = EngineHealth(True, False, 0, 0, 0, 0, 0.0)
        self._before = (0, 0.0)  # tokens and busy seconds of processes that have gone
        self._error: EngineError | None = None
        self._closed = False
        self._weights.join(self._used)
        self._child = launch(options, self._weights.files)

    @property
    def pid(self) -> int:
        """The process that decodes now."""
        return self._child.pid

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, seed: int, pinned: bool = False
    ) -> Generation:
        return await self._call("generate", tuple(prompt_ids), params, seed, pinned)

    async def compute_logprobs(self, rows: Sequence[Sequence[int]]) -> list[list[float]]:
        return await self._call("compute_logprobs", [tuple(row) for row in rows])

    async def pause(self) -> None:
        await self._call("pause", effect=lambda _: setattr(self, "_paused", True))

    async def resume(self) -> None:
        await self._call("resume", effect=lambda _: setattr(self, "_paused", False))

    async def begin_update(self, version: int) -> None:
        self._check_usable()
        self._weights.reserve(self._used())

    async def end_update(self, version: int) -> str:
        self._check_usable()
        async with self._loading:
            buffer = self._weights.take_reserved()

            def loaded(digest: str) -> None:
                self._live, self._digest = Served(version, buffer), digest

            self._next = buffer
            await asyncio.to_thread(self._child.fill, buffer)
            return await self._call("load", version, buffer, effect=loaded)

    async def pin(self) -> int:
        self._check_usable()
        async with self._loading:
            return await self._call("pin", effect=lambda _: setattr(self, "_pinned", self._live))

    async def unpin(self) -> None:
        def unpinned(_: Any) -> None:
            if self._pinned is not None and self._pinned.buffer != self._live.buffer:
                self._weights.release(self._pinned.buffer)  # first: once it is not pinned, it may be written to
            self._pinned = None

        await self._call("unpin", effect=unpinned)

    async def release_cache(self) -> None:
        await self._call("release_cache")

    async def restart(self) -> None:
        self._check_usable()
        self._connect_in_this_loop()
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._restarting.append(ready)
        self._child.kill()
        await ready

    def health(self) -> EngineHealth:
        ready = self._writer is not None
        return replace(
            self._health,
            alive=self._health.alive and not (self._closed or self._error),
            paused=self._paused,
            version=self._live.version,
            running=self._health.running if ready else 0,
            waiting=self._health.waiting if ready else sum(p.method == "generate" for p in self._pending.values()),
            generated_tokens=self._before[0] + self._health.generated_tokens,
            busy_s=self._before[1] + self._health.busy_s,
            error=str(self._error) if self._error else self._health.error,
            restarts=self._restarts,
            state="serving" if ready or self._connection is None else "starting",
            pinned=self._pinned.version if self._pinned else None,
        )

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._fail_callers("the engine was closed while the request was under way")
        if self._connection is not None:
            self._connection.cancel()
            await asyncio.gather(self._connection, return_exceptions=True)
        await asyncio.to_thread(self._child.end)
        self._weights.close()

    # ---- calls ----------------------------------------------------------------------------------------------------

    async def _call(self, method: str, *arguments: Any, effect: Callable[[Any], None] = lambda _: None) -> Any:
        self._check_usable()
        self._connect_in_this_loop()
        number = next(self._numbers)
        frame = encode(Call(number, method, arguments))
        pending = _Pending(method, frame, asyncio.get_running_loop().create_future(), effect)
        self._pending[number] = pending
        if self._writer is not None:
            self._writer.write(frame)
        try:
            return await pending.future
        finally:
            if self._pending.pop(number, None) and self._writer is not None:  # the caller was cancelled
                self._writer.write(encode(Cancel(number)))

    def _check_usable(self) -> None:
        if self._error is not None:
            raise EngineError(f"the engine has stopped: {self._error}") from self._error
        if self._closed:
            raise EngineError("the engine is closed")

    def _used(self) -> tuple[int | None, int | None]:
        return self._live.buffer, self._pinned.buffer if self._pinned else None

    def _connect_in_this_loop(self) -> None:
        if self._connection is None:
            self._connection = asyncio.create_task(self._run_processes(), name="headrace-engine")

    # ---- the connection -------------------------------------------------------------------------------------------

    async def _run_processes(self) -> None:
        """One process after the other. Waits for messages; ends when the engine is closed, or cannot be restarted."""
        try:
            while True:
                was_ready = await self._talk_to_process()
                code = await asyncio.to_thread(self._child.end, _GRACE_S)
                await self._handle_exit(code, was_ready)
                self._child = await asyncio.to_thread(self._launch, self._options, self._weights.files)
        except Exception as error:  # whatever it is, every caller must hear of it
            self._error = error if isinstance(error, EngineError) else EngineError(f"{type(error).__name__}: {error}")
            await asyncio.to_thread(self._child.end)
            self._fail_callers(f"the engine has stopped: {self._error}")

    async def _talk_to_process(self) -> bool:
        """Exchange messages with the current process until it has ended; whether it was ever ready."""
        ready = False
        try:
            connection = await asyncio.to_thread(self._child.connect)
            reader, writer = await asyncio.open_connection(sock=connection)
        except OSError:
            return ready
        try:
            for buffer in {*self._used(), self._next}:
                if buffer is not None:
                    await asyncio.to_thread(self._child.fill, buffer)
            writer.write(
                encode(Open(self._options, self._weights.layout, self._live, self._pinned, paused=self._paused))
            )
            self._handle_opened(await receive(reader), writer)
            ready = True
            while True:
                self._handle(await receive(reader))
        except EOFError:
            return ready
        finally:
            self._writer = None
            writer.close()

    def _handle_opened(self, message: Any, writer: asyncio.StreamWriter) -> None:
        if isinstance(message, Failed):
            raise EngineError(f"the engine process could not start: {message.reason}")
        assert isinstance(message, Opened)
        if message.digest != (self._digest or message.digest):
            raise EngineError(
                f"the restarted engine process found other weights for version {self._live.version}: digest "
                f"{message.digest}, not {self._digest}; resume from the last checkpoint"
            )
        self._health, self._writer = message.health, writer
        for pending in self._pending.values():
            writer.write(pending.frame)
        for future in self._restarting:
            if not future.done():
                future.set_result(None)
        self._restarting = []

    def _handle(self, message: Any) -> None:
        if isinstance(message, EngineHealth):
            self._health = message
            return
        assert isinstance(message, Answer)
        self._health = message.health
        pending = self._pending.pop(message.number, None)
        if pending is None or pending.future.done():
            return
        if pending.method in _PROGRESS:
            self._deaths_in_a_row = 0
        if message.error is not None:
            pending.future.set_exception(message.error)
        else:
            pending.effect(message.value)
            pending.future.set_result(message.value)

    async def _handle_exit(self, code: int, was_ready: bool) -> None:
        """Take note of a process that has gone; raises if another would fare no better."""
        self._before = (self._before[0] + self._health.generated_tokens, self._before[1] + self._health.busy_s)
        self._health = replace(self._health, alive=True, generated_tokens=0, busy_s=0.0, error=None)
        if self._restarting:
            _log.warning("the engine process is restarted; %d calls start again", len(self._pending))
            self._restarts += 1
            return
        self._deaths_in_a_row += 1
        how = describe_exit(code)
        if code >= 0 and not was_ready:
            raise EngineError(f"the engine process could not start ({how}):\n{await self._last_output()}")
        if self._deaths_in_a_row >= _MOST_DEATHS:
            raise EngineError(
                f"the engine process died {_MOST_DEATHS} times in a row without answering a request, the last time "
                f"{how}; is there enough memory? Its last lines:\n{await self._last_output()}"
            )
        self._restarts += 1
        if not self._waits:
            self._give_back(f"the engine process {self._child.pid} died ({how})")
        _log.warning(
            "the engine process %d died (%s); another is started, and %d calls start again",
            self._child.pid,
            how,
            len(self._pending),
        )

    def _give_back(self, what: str) -> None:
        """Requests go back to their callers, who may ask another engine; the rest concerns this one alone."""
        for number, pending in list(self._pending.items()):
            if pending.method in _PROGRESS and not pending.future.done():
                del self._pending[number]
                pending.future.set_exception(ServerLostError(what))

    async def _last_output(self) -> str:
        return await asyncio.to_thread(self._child.last_output) or "(none)"

    def _fail_callers(self, what: str) -> None:
        futures = [*(pending.future for pending in self._pending.values()), *self._restarting]
        self._pending, self._restarting = {}, []
        for future in futures:
            with suppress(asyncio.InvalidStateError):
                future.set_exception(EngineError(what))
