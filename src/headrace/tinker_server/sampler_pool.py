"""Sampling from many sets of weights at once: one thread, one lane per set of weights, all lanes in turn.

Requests of one set of weights are decoded together. A turn gives every running sequence of a lane one token, so that no
lane waits for another to finish.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from headrace.engines.base import DEFAULT_SAMPLING, Generation, SamplingParams
from headrace.engines.request import Request, deliver, fail, settle
from headrace.engines.torch.lane import Lane
from headrace.errors import DataError, EngineError, PromptTooLongError
from headrace.models.causal import CausalModel
from headrace.models.logprobs import top_logprobs
from headrace.models.packed import PackedRows
from headrace.tinker_server.base import Base
from headrace.tinker_server.options import Refusal, ServeOptions

_CHUNK = 1024
_PREFILL_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class Scores:
    """Of one row: log-probabilities of tokens 1 to the last, and the k likeliest there, [N - 1, k]."""

    logprobs: np.ndarray
    top: tuple[np.ndarray, np.ndarray] | None


@dataclass(frozen=True, slots=True, eq=False)
class _ScoreRequest:
    row: tuple[int, ...]
    k: int
    result: Future[Scores]


class SamplerLane:
    """A set of weights, what is decoded with it and what it is to score."""

    def __init__(self, model: CausalModel, max_batch: int) -> None:
        self.lane = Lane(model, 0, max_batch, _PREFILL_TOKENS)
        self.scores: deque[_ScoreRequest] = deque()

    @property
    def busy(self) -> bool:
        return self.lane.busy or bool(self.scores)


class SamplerPool:
    """Owns the sampling thread. `generate` and `score` are called from the event loop."""

    def __init__(self, base: Base, options: ServeOptions) -> None:
        self._base, self._options = base, options
        self._lanes: list[SamplerLane] = []
        self._wake = threading.Condition()
        self._closing = False
        self._dropping = False
        self._thread = threading.Thread(target=self._run, name="headrace-sampler", daemon=True)
        self._thread.start()

    def new_lane(self, model: CausalModel) -> SamplerLane:
        """A lane that decodes with a model's weights. It lasts as long as someone holds it or waits for it."""
        return SamplerLane(model, self._options.max_batch)

    @property
    def waiting(self) -> int:
        """Sequences that wait for a slot."""
        return sum(len(one.lane.waiting) + len(one.scores) for one in self._lanes)

    async def generate(
        self, lane: SamplerLane, prompt: tuple[int, ...], params: SamplingParams, seed: int
    ) -> Generation:
        """One completion; cancelled, it frees its slot."""
        request = self._new_request(prompt, params.filled(DEFAULT_SAMPLING), seed)
        self._add(lane, lambda: lane.lane.waiting.append(request))
        return await self._result(request.result)

    async def score(self, lane: SamplerLane, row: tuple[int, ...], k: int = 0) -> Scores:
        """Log-probabilities of a row's tokens at temperature 1."""
        request = _ScoreRequest(row, k, Future())
        self._add(lane, lambda: lane.scores.append(request))
        return await self._result(request.result)

    async def close(self) -> None:
        """Stop; what is under way fails."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        await asyncio.to_thread(self._thread.join)

    async def _result(self, future: Future[Any]) -> Any:
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            future.cancel()
            with self._wake:
                self._dropping = True
                self._wake.notify()
            raise

    def _add(self, lane: SamplerLane, append: Callable[[], None]) -> None:
        with self._wake:
            if self._closing or not self._thread.is_alive():
                raise EngineError("the sampler has stopped; start the server again")
            append()
            if lane not in self._lanes:
                self._lanes.append(lane)
            self._wake.notify()

    def _new_request(self, prompt: tuple[int, ...], params: SamplingParams, seed: int) -> Request:
        base = self._base
        try:
            return Request.new(prompt, params, seed % 2**64, base.max_length, frozenset(base.eos_ids), base.detokenize)
        except (DataError, PromptTooLongError) as error:
            raise Refusal(str(error)) from None

    # ---- the sampling thread --------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (lanes := self._wait_for_work()) is not None:
            for one in lanes:
                try:
                    self._advance(one)
                except Exception as error:  # of one set of weights; the others are not affected
                    self._fail(one, f"sampling failed: {type(error).__name__}: {error}")
        for one in self._lanes:
            self._fail(one, "the server was stopped while the request was under way")

    def _wait_for_work(self) -> list[SamplerLane] | None:
        with self._wake:
            if self._dropping:
                self._drop_cancelled()
            idle = [one for one in self._lanes if not one.busy]
            self._lanes = [one for one in self._lanes if one.busy]
            for one in idle:
                one.lane.release()  # caches of weights that rest would add up
            while not (self._lanes or self._closing):
                self._wake.wait()
            return None if self._closing else list(self._lanes)

    def _drop_cancelled(self) -> None:
        self._dropping = False
        for one in self._lanes:
            one.lane.drop_cancelled_waiting()
            one.lane.drop_cancelled_running()
            one.scores = deque(request for request in one.scores if not request.result.cancelled())

    def _advance(self, one: SamplerLane) -> None:
        with self._wake:
            joined = one.lane.take_waiting()
            asked: list[_ScoreRequest] = []
            size = 0
            while one.scores and (not asked or size + len(one.scores[0].row) <= _PREFILL_TOKENS):
                asked.append(one.scores.popleft())
                size += len(asked[-1].row)
        try:
            if asked:
                self._score(one.lane.model, asked)
        except Exception as error:
            sentence = f"scoring failed: {type(error).__name__}: {error}"
            fail([request.result for request in asked], lambda: EngineError(sentence))
        try:
            ended = one.lane.advance(joined)
        except Exception:
            one.lane.waiting.extend(request for request in joined if request not in one.lane.running)
            raise
        deliver(ended)

    @torch.no_grad()
    def _score(self, model: CausalModel, asked: Sequence[_ScoreRequest]) -> None:
        long = [request for request in asked if len(request.row) > 1]
        for request in asked:
            if len(request.row) == 1:
                settle(request.result, lambda k=request.k: Scores(np.empty(0), _no_top(k)))
        if not long:
            return
        k = max(request.k for request in long)
        targets_M = torch.tensor([token for request in long for token in request.row[1:]])
        hidden_MD = model.hidden(PackedRows.from_rows([request.row[:-1] for request in long]))
        found = top_logprobs(model, hidden_MD, targets_M, k, _CHUNK)
        counts = [len(request.row) - 1 for request in long]
        rows, ids, best = (one.split(counts) for one in found)
        for request, row, some, values in zip(long, rows, ids, best, strict=True):
            top = (some[:, : request.k].numpy(), values[:, : request.k].float().numpy()) if request.k else None
            settle(request.result, lambda row=row, top=top: Scores(row.float().numpy(), top))

    def _fail(self, one: SamplerLane, sentence: str) -> None:
        with self._wake:
            lane = one.lane
            futures: list[Future[Any]] = [request.result for request in (*lane.take_all(), *one.scores)]
            one.scores.clear()
            one.lane = Lane(lane.model, 0, self._options.max_batch, _PREFILL_TOKENS)
        fail(futures, lambda: EngineError(sentence))


def _no_top(k: int) -> tuple[np.ndarray, np.ndarray] | None:
    return (np.empty((0, k)), np.empty((0, k))) if k else None
