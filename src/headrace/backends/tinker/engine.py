"""TinkerEngine: samples through the service, from the weights that were last sent there.

A weight sync brings a new sampling client; requests use it when they next ask for tokens. The service samples complete
replies, so with `segment_tokens` a reply is asked for piece by piece: its tokens may then be of several versions.
Everything here runs on the event loop; the SDK has a thread of its own.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import InvalidStateError
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import tinker
from tinker import types

from headrace.backends.tinker.rows import model_input, without_first
from headrace.backends.tinker.sender import Served, TinkerPath
from headrace.backends.tinker.service import calling
from headrace.data.episode import FinishReason
from headrace.data.seeds import derive_seed
from headrace.engines.base import DEFAULT_SAMPLING, EngineHealth, Generation, SamplingParams
from headrace.engines.request import Detokenize, Request, checked_ids, settle
from headrace.errors import DataError, EngineError


@dataclass(slots=True, eq=False)
class _Lane:
    """Requests that are sampled with one set of weights."""

    served: Served | None = None
    version: int = 0
    running: dict[Request, asyncio.Task[None]] = field(default_factory=dict)
    waiting: deque[Request] = field(default_factory=deque)
    urgent: deque[Request] = field(default_factory=deque)  # goes before `waiting`

    @property
    def requests(self) -> list[Request]:
        return [*self.running, *self.urgent, *self.waiting]


class TinkerEngine:
    """Requests to one service, for weights that `sender` brings there."""

    def __init__(
        self,
        sender: TinkerPath,
        *,
        vocabulary: int,
        max_model_length: int,
        eos_ids: Sequence[int] = (),
        detokenize: Detokenize,
        token_text: Callable[[int], str] = lambda token: "",
        max_batch: int = 128,
        defaults: SamplingParams = DEFAULT_SAMPLING,
        segment_tokens: int | None = None,
    ) -> None:
        self.max_model_length = max_model_length
        self._sender = sender
        self._vocabulary = vocabulary
        self._eos_ids = frozenset(eos_ids)
        self._detokenize = detokenize
        self._token_text = token_text
        self._max_batch = max_batch
        self._defaults = defaults.filled(DEFAULT_SAMPLING)
        self._segment = segment_tokens
        self._live, self._pinned = _Lane(), None
        self._pinned: _Lane | None
        self._unpinning = False
        self._going = asyncio.Event()
        self._going.set()
        self._quiet = asyncio.Event()  # set while no request for tokens is out
        self._quiet.set()
        self._asked = 0
        self._asked_since = 0.0
        self._busy_s = 0.0
        self._generated = 0
        self._restarts = 0
        self._closed = False
        self._error: Exception | None = None

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, seed: int, pinned: bool = False
    ) -> Generation:
        request = self._new_request(checked_ids(prompt_ids, self._vocabulary), params.filled(self._defaults), seed)
        self._check_usable()
        if pinned and self._pinned is not None and not self._unpinning:
            lane = self._pinned
            lane.waiting.append(request)
        else:
            lane = self._live
            (lane.urgent if pinned else lane.waiting).append(request)
        self._admit(lane)
        try:
            return await asyncio.wrap_future(request.result)
        except asyncio.CancelledError:
            request.result.cancel()
            self._leave(lane, request)
            raise

    async def compute_logprobs(self, rows: Sequence[Sequence[int]]) -> list[list[float]]:
        checked = [checked_ids(row, self._vocabulary) for row in rows]
        longest = max(map(len, checked), default=0)
        if longest > self.max_model_length:
            raise DataError(
                f"a row has {longest} tokens, which is more than max_model_length {self.max_model_length}; "
                f"shorten it or raise engine.max_model_length"
            )
        self._check_usable()
        served = await self._served(self._live)
        return await asyncio.gather(*(score_row(served.client, row) for row in checked))

    async def pause(self) -> None:
        """Ask for no more tokens, and wait for those that were asked for: the service does not stop between two."""
        self._check_usable()
        self._going.clear()
        await self._quiet.wait()

    async def resume(self) -> None:
        self._check_usable()
        self._going.set()

    async def begin_update(self, version: int) -> None:
        self._check_usable()

    async def end_update(self, version: int) -> str:
        self._check_usable()
        served = self._sender.take_sent()
        self._live.served, self._live.version = served, version
        return served.digest

    async def pin(self) -> int:
        self._check_usable()
        if self._pinned is not None:
            raise EngineError(f"version {self._pinned.version} is pinned already; call unpin before pinning another")
        self._pinned = _Lane(await self._served(self._live), self._live.version)
        return self._pinned.version

    async def unpin(self) -> None:
        lane = self._pinned
        if lane is None or self._unpinning:
            raise EngineError("nothing is pinned; call pin before unpin")
        self._unpinning = True  # from now on, pinned requests take the live weights
        try:
            while lane.requests:
                await asyncio.wait([asyncio.wrap_future(request.result) for request in lane.requests])
                await asyncio.sleep(0)
        finally:
            self._pinned, self._unpinning = None, False

    async def release_cache(self) -> None:
        running = sum(len(lane.running) for lane in self._lanes())
        if running and self._going.is_set():
            raise EngineError(f"{running} sequences are being decoded; pause the engine before releasing its cache")

    async def restart(self) -> None:
        self._check_usable()
        for lane in self._lanes():
            for request, task in list(lane.running.items()):
                task.cancel()
                request.start_over()
                lane.running[request] = asyncio.ensure_future(self._work(lane, request))
        self._restarts += 1

    def health(self) -> EngineHealth:
        lanes = self._lanes()
        now = time.perf_counter()
        return EngineHealth(
            alive=not self._closed,
            paused=not self._going.is_set(),
            version=self._live.version,
            running=sum(len(lane.running) for lane in lanes),
            waiting=sum(len(lane.waiting) + len(lane.urgent) for lane in lanes),
            generated_tokens=self._generated,
            busy_s=self._busy_s + (now - self._asked_since if self._asked else 0.0),
            error=str(self._error) if self._error else None,
            restarts=self._restarts,
        )

    async def close(self) -> None:
        self._closed = True
        self._fail_everything("the engine was closed while the request was under way")

    # ---- one request ----------------------------------------------------------------------------------------------

    def _new_request(self, prompt: tuple[int, ...], params: SamplingParams, seed: int) -> Request:
        return Request.new(prompt, params, seed, self.max_model_length, self._eos_ids, self._detokenize)

    async def _work(self, lane: _Lane, request: Request) -> None:
        """Ask for tokens until the reply has ended."""
        try:
            reason = None
            while reason is None:
                await self._going.wait()
                served = await self._served(lane)
                version = lane.version
                with self._asking():
                    count = request.limit - len(request.ids)
                    count = min(count, self._segment or count)
                    tokens = await self._sample(served.client, request, count)
                    reason = self._take(request, tokens, count, version)
            self._leave(lane, request)
            settle(request.result, lambda: request.generation(reason))
        except Exception as error:  # every waiting caller must hear of it
            self._error = self._error or error
            self._fail_everything(f"the engine has stopped: {error}")

    async def _sample(
        self, client: tinker.SamplingClient, request: Request, count: int
    ) -> list[tuple[int, float, float]]:
        """The next tokens: id, log-probability where it was sampled, and at temperature 1."""
        params, row = request.params, [*request.prompt, *request.ids]
        assert params.temperature is not None and params.top_p is not None and params.top_k is not None
        asked = types.SamplingParams(
            max_tokens=count,
            seed=derive_seed(request.seed, len(request.ids)) & 0x7FFFFFFF,
            stop=self._stop(request),
            temperature=params.temperature,
            top_k=params.top_k or -1,
            top_p=params.top_p,
        )
        where = f"sampler {client._sampling_session_id}"
        with calling("asample", where, EngineError):
            response = await client.sample_async(model_input(row), 1, asked)
            (sequence,) = response.sequences
            ids, logprobs = list(sequence.tokens), list(sequence.logprobs or ())
        if not ids or len(ids) != len(logprobs):
            raise EngineError(f"Tinker: {where} answered with {len(ids)} tokens and {len(logprobs)} log-probabilities")
        plain = params.temperature == 1.0 and params.top_p == 1.0 and params.top_k == 0
        model = logprobs if plain else (await score_row(client, (*row, *ids)))[-len(ids) :]
        return list(zip(ids, logprobs if params.temperature else [0.0] * len(ids), model, strict=True))

    def _stop(self, request: Request) -> list[str] | list[int]:
        """What ends the reply there; what it is cut at is decided here, token by token."""
        ids = sorted(request.stop_ids)
        if not request.params.stop:
            return ids
        # the API takes strings or ids, not both
        return [*request.params.stop, *filter(None, map(self._token_text, ids))]

    def _take(
        self, request: Request, tokens: Sequence[tuple[int, float, float]], count: int, version: int
    ) -> str | None:
        """Append what was sampled, as far as the reply goes; why it has ended, if it has."""
        for token, logprob, model_logprob in tokens:
            request.take([token], [logprob], [model_logprob], version)
            self._generated += 1
            self._vocabulary = max(self._vocabulary, token + 1)  # models may have more ids than tokenizers name
            reason = request.finish_reason()
            if reason is not None:
                return reason
        return FinishReason.STOP if len(tokens) < count else None

    # ---- lanes ----------------------------------------------------------------------------------------------------

    def _lanes(self) -> list[_Lane]:
        return [self._live] if self._pinned is None else [self._pinned, self._live]

    def _admit(self, lane: _Lane) -> None:
        while (queue := lane.urgent or lane.waiting) and len(lane.running) < self._max_batch:
            request = queue.popleft()
            lane.running[request] = asyncio.ensure_future(self._work(lane, request))

    def _leave(self, lane: _Lane, request: Request) -> None:
        """Free the request's slot, wherever it is."""
        task = lane.running.pop(request, None)
        if task is not None and task is not asyncio.current_task():
            task.cancel()
        for queue in (lane.waiting, lane.urgent):
            with suppress(ValueError):
                queue.remove(request)
        if not self._closed and self._error is None:
            self._admit(lane)

    async def _served(self, lane: _Lane) -> Served:
        """The lane's weights; before the first weight sync, the learner's as they are."""
        if lane.served is None:
            served = await self._sender.serve()
            lane.served = lane.served or served  # a sync that was quicker has newer weights
        return lane.served

    @contextmanager
    def _asking(self) -> Iterator[None]:
        if not self._asked:
            self._asked_since = time.perf_counter()
            self._quiet.clear()
        self._asked += 1
        try:
            yield
        finally:
            self._asked -= 1
            if not self._asked:
                self._busy_s += time.perf_counter() - self._asked_since
                self._quiet.set()

    def _check_usable(self) -> None:
        if self._error is not None:
            raise EngineError(f"the engine has stopped: {self._error}") from self._error
        if self._closed:
            raise EngineError("the engine is closed")

    def _fail_everything(self, message: str) -> None:
        for lane in self._lanes():
            for request in lane.requests:
                with suppress(InvalidStateError):
                    failure = EngineError(message)
                    failure.__cause__ = self._error
                    request.result.set_exception(failure)
            for task in lane.running.values():
                if task is not asyncio.current_task():
                    task.cancel()
            lane.running, lane.urgent, lane.waiting = {}, deque(), deque()


async def score_row(client: tinker.SamplingClient, row: Sequence[int]) -> list[float]:
    """The log-probability at temperature 1 of every token of a row but the first."""
    if len(row) < 2:
        return []
    with calling("asample with prompt_logprobs", f"sampler {client._sampling_session_id}", EngineError):
        return without_first(await client.compute_logprobs_async(model_input(row)), len(row))
