"""The built-in engine: continuous batching over a slot cache, on the very weights that the learner trains.

One thread owns the model. Between two decoding steps it takes in what has arrived (requests, cancellations, new
weights, pauses); within a step every running sequence gets one token. The running sequences always occupy slots
0..n-1, so the cache is read without gathering. The last prompt token is not prefilled but fed to the first decoding
step: prefill needs no logits, and sequences with the same prompt share one prefill.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from headrace.data.episode import FinishReason
from headrace.engine.base import DEFAULT_SAMPLING, EngineHealth, Generation, SamplingParams
from headrace.engine.sampling import sample_tokens
from headrace.errors import ConfigError, DataError, EngineError, PromptTooLongError
from headrace.models.causal import CausalModel, PackedRows
from headrace.models.logprobs import target_logprobs


@dataclass(slots=True, eq=False)
class _Request:
    prompt: tuple[int, ...]
    params: SamplingParams
    stop_ids: frozenset[int]
    seed: int
    result: Future[Generation]
    limit: int
    limit_reason: str
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    model_logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    prefill_version: int = -1

    @property
    def cached(self) -> int:
        """Tokens in the cache: all but the last one, which the next decoding step feeds."""
        return len(self.prompt) + len(self.ids) - 1

    @property
    def last_token(self) -> int:
        return self.ids[-1] if self.ids else self.prompt[-1]


class TorchEngine:
    """Continuous batching on one device. All public methods are called from the event loop."""

    def __init__(
        self,
        model: CausalModel,
        *,
        eos_ids: Sequence[int] = (),
        detokenize: Callable[[Sequence[int]], str] | None = None,
        max_batch: int = 128,
        max_model_length: int | None = None,
        prefill_tokens: int = 8192,
        defaults: SamplingParams = DEFAULT_SAMPLING,
    ) -> None:
        self._model = model
        self._eos_ids = frozenset(eos_ids)
        self._detokenize = detokenize
        self._max_batch = max_batch
        self._prefill_tokens = prefill_tokens
        self._defaults = defaults.filled(DEFAULT_SAMPLING)
        if max_model_length is not None and max_model_length > model.max_length:
            raise ConfigError(
                f"engine.max_model_length is {max_model_length}, but the model reads no more than {model.max_length} "
                f"tokens; lower it, or leave it out to take the model's limit"
            )
        self.max_model_length = max_model_length or model.max_length
        self.version = 0
        self._cache = model.new_cache()
        self._running: list[_Request] = []
        self._waiting: deque[_Request] = deque()
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._wake = threading.Condition()
        self._paused = False
        self._closing = False
        self._error: BaseException | None = None
        self._generated = 0
        self._busy_s = 0.0
        self._thread = threading.Thread(target=self._run, name="headrace-engine", daemon=True)
        self._thread.start()

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, seed: int) -> Generation:
        request = self._new_request(self._checked_ids(prompt_ids), params.filled(self._defaults), seed)
        with self._wake:
            self._check_usable()
            self._waiting.append(request)
            self._wake.notify()
        return await asyncio.wrap_future(request.result)  # cancelling the caller cancels the request's future

    async def compute_logprobs(self, rows: Sequence[Sequence[int]]) -> list[list[float]]:
        checked = [self._checked_ids(row) for row in rows]
        longest = max(map(len, checked), default=0)
        if longest > self.max_model_length:
            raise DataError(
                f"a row has {longest} tokens, which is more than max_model_length {self.max_model_length}; "
                f"shorten it or raise engine.max_model_length"
            )
        return await self._call(lambda: self._score(checked))

    async def pause(self) -> None:
        await self._call(lambda: setattr(self, "_paused", True))

    async def resume(self) -> None:
        await self._call(lambda: setattr(self, "_paused", False))

    async def load_weights(self, version: int, weights: Any = None) -> None:
        def load() -> None:
            if weights is not None:
                raise EngineError("this engine shares the learner's weights; publish without handing any over")
            self.version = version

        await self._call(load)

    async def release_cache(self) -> None:
        def release() -> None:
            if not self._running:
                self._cache.release()

        await self._call(release)

    def health(self) -> EngineHealth:
        return EngineHealth(
            alive=self._thread.is_alive(),
            paused=self._paused,
            version=self.version,
            running=len(self._running),
            waiting=len(self._waiting),
            generated_tokens=self._generated,
            busy_s=self._busy_s,
            error=_describe(self._error) if self._error else None,
        )

    async def close(self) -> None:
        with self._wake:
            self._closing = True
            self._wake.notify()
        await asyncio.to_thread(self._thread.join)

    # ---- called from the event loop -------------------------------------------------------------------------------

    def _new_request(self, prompt: tuple[int, ...], params: SamplingParams, seed: int) -> _Request:
        if not prompt:
            raise DataError("a prompt must have at least one token; start it with the tokenizer's first token")
        room = self.max_model_length - len(prompt)
        if room < 1:
            raise PromptTooLongError(
                f"the prompt has {len(prompt)} tokens, which leaves no room within max_model_length "
                f"{self.max_model_length}; shorten it or raise engine.max_model_length"
            )
        if params.stop and self._detokenize is None:
            raise EngineError(f"stop strings {params.stop} need a tokenizer, and this engine has none")
        assert params.max_tokens is not None
        short = room < params.max_tokens
        return _Request(
            prompt=prompt,
            params=params,
            stop_ids=frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos_ids),
            seed=seed % 2**64,
            result=Future(),
            limit=min(room, params.max_tokens),
            limit_reason=FinishReason.MODEL_LENGTH if short else FinishReason.LENGTH,
        )

    def _checked_ids(self, ids: Sequence[int]) -> tuple[int, ...]:
        """The ids as plain integers; a bad one must fail its caller here, not everyone on the engine's thread."""
        for token in ids:
            if not isinstance(token, (int, np.integer)) or not 0 <= token < self._model.vocabulary:
                raise DataError(
                    f"{token!r} is not a token id of this model, which has 0 to {self._model.vocabulary - 1}; "
                    f"was the prompt made with another tokenizer?"
                )
        return tuple(int(token) for token in ids)

    async def _call(self, function: Callable[[], Any]) -> Any:
        """Run on the engine's thread, between two decoding steps."""
        future: Future[Any] = Future()
        with self._wake:
            self._check_usable()
            self._calls.append((function, future))
            self._wake.notify()
        return await asyncio.wrap_future(future)

    def _check_usable(self) -> None:
        if self._error is not None:
            raise EngineError(f"the engine has stopped: {_describe(self._error)}") from self._error
        if self._closing:
            raise EngineError("the engine is closed")

    # ---- the engine's thread --------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                started = time.perf_counter()
                self._drop_cancelled()
                self._admit()
                if self._running:
                    self._decode_step()
                self._busy_s += time.perf_counter() - started
        except BaseException as error:  # whatever it is, every waiting caller must hear of it
            self._error = error
        self._fail_everything()

    def _wait_for_work(self) -> bool:
        """Do queued calls; wait until there is something to decode. False when closing."""
        while True:
            with self._wake:
                while not (self._calls or self._closing or (not self._paused and (self._running or self._waiting))):
                    self._wake.wait()
                if self._closing:
                    return False
                calls, self._calls = self._calls, deque()
            for function, future in calls:
                _settle(future, function)
            if not self._paused and (self._running or self._waiting):
                return True

    def _drop_cancelled(self) -> None:
        for request in [r for r in self._running if r.result.cancelled()]:
            self._leave(request)

    def _admit(self) -> None:
        """Move waiting requests into slots, as many as fit, and prefill the prompts that no one has yet."""
        joined: list[_Request] = []
        budget = self._prefill_tokens
        with self._wake:
            while self._waiting and len(self._running) + len(joined) < self._max_batch:
                if joined and budget < len(self._waiting[0].prompt):
                    break
                request = self._waiting.popleft()
                if request.result.cancelled():
                    continue
                budget -= len(request.prompt)
                joined.append(request)
        if joined:
            first = len(self._running)
            self._running += joined
            self._cache.ensure(len(self._running), max(len(r.prompt) for r in joined))
            self._prefill(joined, first)

    def _prefill(self, joined: Sequence[_Request], first_slot: int) -> None:
        owners = {r.prompt: i for i, r in enumerate(self._running[:first_slot]) if r.prefill_version == self.version}
        fresh: list[tuple[int, _Request]] = []
        copies: list[tuple[int, int, int]] = []
        for slot, request in enumerate(joined, first_slot):
            request.prefill_version = self.version
            if len(request.prompt) == 1:
                continue
            owner = owners.setdefault(request.prompt, slot)
            if owner == slot:
                fresh.append((slot, request))
            else:
                copies.append((owner, slot, len(request.prompt) - 1))
        if fresh:
            rows = PackedRows.from_rows([request.prompt[:-1] for _, request in fresh])
            self._model.prefill(self._cache, rows, [slot for slot, _ in fresh])
        for owner, slot, length in copies:
            self._cache.copy(owner, slot, length)

    @torch.no_grad()
    def _decode_step(self) -> None:
        running = list(self._running)
        ids_B = torch.tensor([r.last_token for r in running])
        lengths = [r.cached for r in running]
        self._cache.ensure(len(running), max(lengths) + 1)
        hidden = self._model.decode(self._cache, ids_B, lengths)
        tokens, logprobs, model_logprobs = sample_tokens(
            self._model.decode_logits(hidden),
            [r.params for r in running],
            [r.seed for r in running],
            [len(r.ids) for r in running],
        )
        self._generated += len(running)
        for request, token, logprob, model_logprob in zip(running, tokens, logprobs, model_logprobs, strict=True):
            request.ids.append(token)
            request.logprobs.append(logprob)
            request.model_logprobs.append(model_logprob)
            request.versions.append(self.version)
        for request in running:  # only now that all have their token: leaving moves a sequence to another slot
            reason = self._finish_reason(request)
            if reason is not None:
                self._leave(request)
                _settle(request.result, lambda r=request, why=reason: _generation(r, why))

    def _finish_reason(self, request: _Request) -> str | None:
        if request.ids[-1] in request.stop_ids or (request.params.stop and self._hit_stop_string(request)):
            return FinishReason.STOP
        return request.limit_reason if len(request.ids) >= request.limit else None

    def _hit_stop_string(self, request: _Request) -> bool:
        assert self._detokenize is not None and request.params.stop is not None
        # every token is at least one byte, so a stop string that ends here began within its length in bytes
        window = max(len(text.encode()) for text in request.params.stop) + 4
        tail = self._detokenize(request.ids[-window:])
        return any(text in tail for text in request.params.stop)

    def _leave(self, request: _Request) -> None:
        """Free the request's slot; the last sequence moves into it so that slots stay contiguous."""
        slot, last = self._running.index(request), len(self._running) - 1
        if slot != last:
            mover = self._running[last]
            self._cache.copy(last, slot, mover.cached)
            self._running[slot] = mover
        self._running.pop()

    @torch.no_grad()
    def _score(self, rows: Sequence[Sequence[int]]) -> list[list[float]]:
        scored = []
        for row in rows:
            if len(row) < 2:
                scored.append([])
                continue
            hidden = self._model.hidden(PackedRows.from_rows([row[:-1]]))
            targets = torch.tensor(list(row[1:]))
            scored.append(target_logprobs(self._model, hidden, targets, torch.ones(len(targets)), 1024)[0].tolist())
        return scored

    def _fail_everything(self) -> None:
        what = f"stopped: {_describe(self._error)}" if self._error else "closed while the request was under way"
        with self._wake:
            futures: list[Future[Any]] = [r.result for r in (*self._running, *self._waiting)]
            futures += [future for _, future in self._calls]
            self._running, self._waiting, self._calls = [], deque(), deque()
        for future in futures:
            with suppress(InvalidStateError):
                failure = EngineError(f"the engine was {what}")  # its own for each: raising writes to it
                failure.__cause__ = self._error
                future.set_exception(failure)


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _generation(request: _Request, reason: str) -> Generation:
    assert request.params.temperature is not None
    return Generation(
        prompt_ids=request.prompt,
        completion_ids=tuple(request.ids),
        logprobs=tuple(request.logprobs),
        model_logprobs=tuple(request.model_logprobs),
        versions=tuple(request.versions),
        finish_reason=str(reason),
        temperature=request.params.temperature,
    )


def _settle(future: Future[Any], function: Callable[[], Any]) -> None:
    """Give the caller the result or the exception, unless the caller has gone."""
    try:
        result, error = function(), None
    except Exception as raised:  # handed to the caller, who is waiting for it
        result, error = None, raised
    with suppress(InvalidStateError):
        future.set_exception(error) if error is not None else future.set_result(result)
