"""The built-in engine: continuous batching, on the weights that the learner trains.

One thread owns the model. Between two decoding steps, or a few, it takes in what has arrived (requests, cancellations,
new weights, pauses); within a step every running sequence gets one token. Sequences are decoded in lanes: the live one,
whose weights are replaced by weight syncs, and, while weights are pinned, one on those, which goes first.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Literal

import numpy as np
import torch

from headrace.engines.base import DEFAULT_SAMPLING, EngineHealth, Generation, SamplingParams
from headrace.engines.request import Detokenize, OnTokens, Request, checked_ids, checked_rows, deliver, fail, settle
from headrace.engines.torch.delivery import Deliveries
from headrace.engines.torch.lane import Lane
from headrace.errors import ConfigError, EngineError
from headrace.models.causal import CausalModel
from headrace.models.logprobs import target_logprobs
from headrace.models.packed import PackedRows
from headrace.models.tensor_threads import TensorThread, run_apart
from headrace.utils.openmp import follow_load
from headrace.weights.digest import weight_digest


def usable_length(longest: int, wanted: int | None) -> int:
    """The longest sequence that the engine takes: what is wanted, or the longest that the model can read."""
    if wanted is not None and wanted > longest:
        raise ConfigError(
            f"engine.max_model_length is {wanted}, but the model reads no more than {longest} tokens; lower it, or "
            f"leave it out to take the model's limit"
        )
    return wanted or longest


_LINGER_S = 0.01


class TorchEngine:
    """Continuous batching on one device. All public methods are called from the event loop.

    `copy_model` gives the weights that are pinned: a private copy, unless no one changes them.
    """

    def __init__(
        self,
        model: CausalModel,
        *,
        eos_ids: Sequence[int] = (),
        detokenize: Detokenize | None = None,
        max_batch: int = 128,
        max_model_length: int | None = None,
        prefill_tokens: int = 8192,
        kept_tokens: int = 0,
        defaults: SamplingParams = DEFAULT_SAMPLING,
        cache_on_publish: Literal["keep", "recompute"] = "keep",
        copy_model: Callable[[CausalModel], CausalModel] = lambda model: model.copy(),
        shared_thread: TensorThread | None = None,
        scoring: threading.Lock | None = None,
    ) -> None:
        self._eos_ids = frozenset(eos_ids)
        self._detokenize = detokenize
        self._limits = (max_batch, prefill_tokens, kept_tokens)
        self._defaults = defaults.filled(DEFAULT_SAMPLING)
        self._recompute = cache_on_publish == "recompute"
        self._copy_model = copy_model
        self._shared_thread = shared_thread
        self.max_model_length = usable_length(model.max_length, max_model_length)
        self._vocabulary = model.vocabulary
        self._live = Lane(model, 0, *self._limits)
        self._pinned: Lane | None = None
        self._unpinned: Future[None] | None = None  # set while the pinned lane finishes
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._wake = threading.Condition()
        self._deliveries = Deliveries()
        self._paused = False
        self._dropping = False  # whether cancelled requests are about to be dropped
        self._closing = False
        self._error: BaseException | None = None
        self._generated = 0
        self._busy_s = 0.0
        self._restarts = 0
        self._scoring = scoring or threading.Lock()  # held while rows are scored
        self._thread = threading.Thread(target=self._run, name="headrace-engine", daemon=True)
        self._thread.start()

    @property
    def version(self) -> int:
        return self._live.version

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, seed: int, pinned: bool = False
    ) -> Generation:
        return await self._decoded(self._new_request(prompt_ids, params, seed), pinned)

    async def stream(
        self, prompt_ids: Sequence[int], params: SamplingParams, seed: int, on_tokens: OnTokens
    ) -> Generation:
        """As `generate`; `on_tokens` is called on the event loop with what is sampled, as soon as it is."""
        loop, request = asyncio.get_running_loop(), self._new_request(prompt_ids, params, seed)
        request.on_tokens = lambda ids, logprobs: _call_soon(loop, on_tokens, ids, logprobs)
        return await self._decoded(request)

    async def _decoded(self, request: Request, pinned: bool = False) -> Generation:
        with self._wake:
            self._check_usable()
            if pinned and self._pinned is not None and self._unpinned is None:
                self._pinned.waiting.append(request)
            else:
                (self._live.urgent if pinned else self._live.waiting).append(request)
            self._wake.notify()
        try:
            return await self._deliveries.wait(request.result)
        except asyncio.CancelledError:
            self._cancel(request)
            raise

    async def compute_logprobs(self, rows: Sequence[Sequence[int]]) -> list[list[float]]:
        checked = checked_rows(rows, self._vocabulary, self.max_model_length)
        return await self._call(lambda: self._score(checked))

    async def pause(self) -> None:
        await self._call(lambda: setattr(self, "_paused", True))

    async def resume(self) -> None:
        await self._call(lambda: setattr(self, "_paused", False))

    async def begin_update(self, version: int) -> None:
        self._check_usable()
        if not self._paused:
            raise EngineError(
                f"version {version} changes the weights under sequences being decoded; pause the engine first"
            )

    async def end_update(self, version: int) -> str:
        def load() -> str:
            self._live.load(version, None, self._recompute)
            return weight_digest(self._live.model.weights())

        return await self._call(load)

    async def switch_model(self, version: int, model: CausalModel) -> None:
        """Continue with another model of the same shape: new weights for an engine that has its own."""
        await self._call(lambda: self._live.load(version, model, self._recompute))

    async def pin(self) -> int:
        return await self._call(self._pin)

    async def unpin(self) -> None:
        finished: Future[None] = await self._call(self._unpin)
        await asyncio.wrap_future(finished)

    async def release_cache(self) -> None:
        await self._call(self._release)

    async def restart(self) -> None:
        await self._call(self._start_over)

    def health(self) -> EngineHealth:
        lanes, pinned = self._lanes(), self._pinned  # read once: the engine's thread may take it away
        return EngineHealth(
            alive=self._thread.is_alive(),
            paused=self._paused,
            version=self.version,
            running=sum(len(lane.running) for lane in lanes),
            waiting=sum(len(lane.waiting) + len(lane.urgent) for lane in lanes),
            generated_tokens=self._generated,
            busy_s=self._busy_s,
            error=_describe(self._error) if self._error else None,
            restarts=self._restarts,
            pinned=None if pinned is None else pinned.version,
        )

    async def close(self) -> None:
        with self._wake:
            self._closing = True
            self._wake.notify()
        await asyncio.to_thread(self._thread.join)

    # ---- called from the event loop -------------------------------------------------------------------------------

    def _new_request(self, prompt_ids: Sequence[int], params: SamplingParams, seed: int) -> Request:
        prompt, params = checked_ids(prompt_ids, self._vocabulary), params.filled(self._defaults)
        return Request.new(prompt, params, seed % 2**64, self.max_model_length, self._eos_ids, self._detokenize)

    async def _call(self, function: Callable[[], Any]) -> Any:
        """Run on the engine's thread, between two decoding steps."""
        future: Future[Any] = Future()
        with self._wake:
            self._check_usable()
            self._calls.append((function, future))
            self._wake.notify()
        return await asyncio.wrap_future(future)

    def _cancel(self, request: Request) -> None:
        """Free the request's slot, even while the engine is paused: someone may wait for that."""
        request.result.cancel()
        with self._wake:
            if not self._dropping:
                self._dropping = True
                self._calls.append((self._drop_cancelled, Future()))
                self._wake.notify()

    def _check_usable(self) -> None:
        if self._error is not None:
            raise EngineError(f"the engine has stopped: {_describe(self._error)}") from self._error
        if self._closing:
            raise EngineError("the engine is closed")

    def _lanes(self) -> list[Lane]:
        """In the order in which they are served."""
        pinned = self._pinned  # read once: the engine's thread may take it away
        return [self._live] if pinned is None else [pinned, self._live]

    # ---- the engine's threads -------------------------------------------------------------------------------------

    def _run(self) -> None:
        """Wait for work, and have it done on the shared thread, or on one that ends when there is none for a while."""
        while self._error is None:
            with self._wake:
                while not (self._calls or self._closing or self._decodable()):
                    self._wake.wait()
                if self._closing:
                    break
            if self._shared_thread is None:
                run_apart(self._work)
            else:
                self._shared_thread.submit(self._work).result()
        self._fail_everything()

    def _work(self) -> None:
        try:
            while self._next_work():
                follow_load()  # decoding may take minutes
                started = time.perf_counter()
                for lane in self._lanes():
                    self._advance(lane)
                self._finish_unpinning()
                self._busy_s += time.perf_counter() - started
                if self._shared_thread is not None and self._shared_thread.wanted:
                    return
        except BaseException as error:  # whatever it is, every waiting caller must hear of it
            self._error = error

    def _next_work(self) -> bool:
        """Do queued calls; whether there is something to decode then. A short while is waited for it, if none waits."""
        while True:
            with self._wake:
                idle = not (self._calls or self._closing or self._paused or self._decodable())
                if idle and self._shared_thread is None:
                    self._wake.wait(_LINGER_S)
                if self._closing or not (self._calls or self._decodable()):
                    return False
                calls, self._calls = self._calls, deque()
            for function, future in calls:
                settle(future, function)
            if self._decodable():
                return True

    def _decodable(self) -> bool:
        return not self._paused and any(lane.busy for lane in self._lanes())

    def _drop_cancelled(self) -> None:
        with self._wake:
            self._dropping = False
            for lane in self._lanes():
                lane.drop_cancelled_waiting()
        for lane in self._lanes():
            lane.drop_cancelled_running()
        self._finish_unpinning()

    def _advance(self, lane: Lane) -> None:
        with self._wake:
            joined = lane.take_waiting()
        before = lane.sampled
        ended = lane.advance(joined)
        self._generated += lane.sampled - before
        if ended:
            with self._deliveries.held():
                deliver(ended)

    def _pin(self) -> int:
        if self._pinned is not None:
            raise EngineError(f"version {self._pinned.version} is pinned already; call unpin before pinning another")
        lane = Lane(self._copy_model(self._live.model), self.version, *self._limits)
        with self._wake:
            self._pinned = lane
        return self.version

    def _unpin(self) -> Future[None]:
        if self._pinned is None or self._unpinned is not None:
            raise EngineError("nothing is pinned; call pin before unpin")
        with self._wake:
            self._unpinned = finished = Future()  # from now on, pinned requests take the live weights
        self._finish_unpinning()
        return finished

    def _finish_unpinning(self) -> None:
        if self._unpinned is None or self._pinned is None or self._pinned.busy:
            return
        with self._wake:
            finished, self._unpinned, self._pinned = self._unpinned, None, None
        settle(finished, lambda: None)

    def _release(self) -> None:
        running = sum(len(lane.running) for lane in self._lanes())
        if running and not self._paused:
            raise EngineError(f"{running} sequences are being decoded; pause the engine before releasing its cache")
        for lane in self._lanes():
            lane.release()

    def _start_over(self) -> None:
        with self._wake:
            for lane in self._lanes():
                lane.start_over()
        self._restarts += 1

    @torch.no_grad()
    def _score(self, rows: Sequence[Sequence[int]]) -> list[list[float]]:
        model, scored = self._live.model, []
        with self._scoring:
            for row in rows:
                if len(row) < 2:
                    scored.append([])
                    continue
                wanted = np.array(row[1:], dtype=np.int64)
                warmth = np.ones(len(wanted), dtype=np.float32)
                packed, (targets, ones) = PackedRows.from_rows([row[:-1]]).to(model.device, wanted, warmth)
                scored.append(target_logprobs(model, model.hidden(packed), targets, ones, 1024)[0].tolist())
        return scored

    def _fail_everything(self) -> None:
        what = f"stopped: {_describe(self._error)}" if self._error else "closed while the request was under way"
        with self._wake:
            futures: list[Future[Any]] = [future for _, future in self._calls]
            futures += [self._unpinned] if self._unpinned else []
            self._calls = deque()
            futures += [request.result for lane in self._lanes() for request in lane.take_all()]

        def failure() -> EngineError:
            error = EngineError(f"the engine was {what}")
            error.__cause__ = self._error
            return error

        fail(futures, failure)


def _call_soon(loop: asyncio.AbstractEventLoop, function: OnTokens, *given: Any) -> None:
    with suppress(RuntimeError):  # a closed loop has no one listening
        loop.call_soon_threadsafe(function, *given)


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
