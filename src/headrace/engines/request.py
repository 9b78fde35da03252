"""One request on its way through the built-in engine, and how callers hear of its end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from headrace.data.episode import FinishReason
from headrace.data.routing import RoutedExperts
from headrace.engines.base import Generation, SamplingParams
from headrace.errors import DataError, EngineError, PromptTooLongError

Detokenize = Callable[[Sequence[int]], str]
OnTokens = Callable[[Sequence[int], Sequence[float]], None]
"""Hears of tokens and their log-probabilities as they are sampled."""


def checked_ids(ids: Sequence[Any], vocabulary: int) -> tuple[int, ...]:
    """The ids as plain integers; a bad one must fail its caller here, not everyone whom the engine serves."""
    if set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < vocabulary:
        return tuple(ids)
    for token in ids:
        if not isinstance(token, (int, np.integer)) or not 0 <= token < vocabulary:
            raise DataError(
                f"{token!r} is not a token id of this model, which has 0 to {vocabulary - 1}; "
                f"was the prompt made with another tokenizer?"
            )
    return tuple(int(token) for token in ids)


def checked_rows(rows: Sequence[Sequence[Any]], vocabulary: int, max_length: int) -> list[tuple[int, ...]]:
    """Rows to score, as plain integers; DataError for a bad id, or a row that is longer than the engine takes."""
    checked = [checked_ids(row, vocabulary) for row in rows]
    longest = max(map(len, checked), default=0)
    if longest > max_length:
        raise DataError(
            f"a row has {longest} tokens, which is more than max_model_length {max_length}; shorten it or raise "
            f"engine.max_model_length"
        )
    return checked


@dataclass(slots=True, eq=False)
class Request:
    """What was asked, and what has been sampled so far."""

    prompt: tuple[int, ...]
    params: SamplingParams
    stop_ids: frozenset[int]
    seed: int
    result: Future[Generation]
    limit: int
    limit_reason: str
    detokenize: Detokenize | None = None
    on_tokens: OnTokens | None = None
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    model_logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    routed: RoutedExperts | None = None
    """Experts of the tokens that were read so far, from servers that return them."""
    prefill_version: int = -1
    """Version under which the prompt's part of the cache was computed from the prompt alone; -1 for none."""

    @classmethod
    def new(
        cls, prompt: tuple[int, ...], params: SamplingParams, seed: int, max_model_length: int,
        eos_ids: frozenset[int], detokenize: Detokenize | None,
    ) -> Self:  # fmt: skip
        """What an engine with these limits is to do; a prompt that leaves no room is refused."""
        if not prompt:
            raise DataError("a prompt must have at least one token; start it with the tokenizer's first token")
        room = max_model_length - len(prompt)
        if room < 1:
            raise PromptTooLongError(
                f"the prompt has {len(prompt)} tokens, which leaves no room within max_model_length "
                f"{max_model_length}; shorten it or raise engine.max_model_length"
            )
        if params.stop and detokenize is None:
            raise EngineError(f"stop strings {params.stop} need a tokenizer, and this engine has none")
        assert params.max_tokens is not None
        short = room < params.max_tokens
        return cls(
            prompt=prompt,
            params=params,
            stop_ids=frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else eos_ids),
            seed=seed,
            result=Future(),
            limit=min(room, params.max_tokens),
            limit_reason=FinishReason.MODEL_LENGTH if short else FinishReason.LENGTH,
            detokenize=detokenize,
        )

    @property
    def cached(self) -> int:
        """Tokens in the cache: all but the last one, which the next decoding step feeds."""
        return len(self.prompt) + len(self.ids) - 1

    @property
    def last_token(self) -> int:
        return self.ids[-1] if self.ids else self.prompt[-1]

    def take(
        self, tokens: Sequence[int], logprobs: Sequence[float], model_logprobs: Sequence[float], version: int
    ) -> None:
        """Append what was sampled; only the last token may be one that ends the reply."""
        self.ids += tokens
        self.logprobs += logprobs
        self.model_logprobs += model_logprobs
        self.versions += [version] * len(tokens)
        if self.on_tokens is not None:
            self.on_tokens(tokens, logprobs)

    def start_over(self) -> None:
        """Forget what has been sampled."""
        self.ids, self.logprobs, self.model_logprobs, self.versions = [], [], [], []
        self.routed = None
        self.prefill_version = -1

    def take_routing(self, found: np.ndarray, url: str) -> None:
        """Take over the experts [tokens, slots] of what was read, once its tokens are taken.

        Those that are known already stay as they are: they are the ones that were sampled with.
        """
        read = len(self.prompt) + len(self.ids) - 1
        if len(found) < read:
            raise EngineError(f"{url} returned the experts of {len(found)} tokens, and {read} were read")
        routed = RoutedExperts.of(found[:read])
        self.routed = routed if self.routed is None else self.routed.then(routed)

    def finish_reason(self) -> str | None:
        """Why the last token ends the reply; None if it continues."""
        if self.ids[-1] in self.stop_ids or (self.params.stop and self._hit_stop_string(self.params.stop)):
            return FinishReason.STOP
        return self.limit_reason if len(self.ids) >= self.limit else None

    def _hit_stop_string(self, stop: Sequence[str]) -> bool:
        assert self.detokenize is not None
        # every token is at least one byte, so a stop string that ends here began within its length in bytes
        window = max(len(text.encode()) for text in stop) + 4
        tail = self.detokenize(self.ids[-window:])
        return any(text in tail for text in stop)

    def generation(self, reason: str) -> Generation:
        """What the caller gets."""
        assert self.params.temperature is not None
        return Generation(
            prompt_ids=self.prompt,
            completion_ids=tuple(self.ids),
            logprobs=tuple(self.logprobs),
            model_logprobs=tuple(self.model_logprobs),
            versions=tuple(self.versions),
            finish_reason=str(reason),
            temperature=self.params.temperature,
            routed_experts=self.routed,
        )


def deliver(ended: Sequence[tuple[Request, str]]) -> None:
    """Give the callers of requests that have ended their generations."""
    for request, reason in ended:
        settle(request.result, lambda r=request, why=reason: r.generation(why))


def fail(futures: Iterable[Future[Any]], new_error: Callable[[], Exception]) -> None:
    """Give callers that still wait an exception, each one of its own: raising writes to it."""
    for future in futures:
        with suppress(InvalidStateError):
            future.set_exception(new_error())


def settle(future: Future[Any], function: Callable[[], Any]) -> None:
    """Give the caller the result or the exception, unless the caller has gone."""
    try:
        result, error = function(), None
    except Exception as raised:  # handed to the caller, who is waiting for it
        result, error = None, raised
    with suppress(InvalidStateError):
        future.set_exception(error) if error is not None else future.set_result(result)
