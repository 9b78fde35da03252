"""POST /inference/v1/generate: token ids in; ids, log-probabilities and versions out. The format is vLLM's."""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headrace.data.episode import FinishReason
from headrace.engines.base import DEFAULT_SAMPLING, Generation, SamplingParams
from headrace.openai_server.sampling import Asked, check_model, read_count, sample, seeds_of
from headrace.openai_server.served import Served
from headrace.rollout.gateway.responding import frame
from headrace.rollout.gateway.wire import Call, Fields, parse_json, read_stop

_HARMLESS = ("cache_salt", "kv_transfer_params", "ec_transfer_params")
_HARMLESS_SAMPLING = ("detokenize", "skip_special_tokens", "spaces_between_special_tokens", "output_kind",
                      "include_stop_str_in_output")  # fmt: skip
_AS_IT_IS = {"presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1, "min_p": 0, "min_tokens": 0}


@dataclass(frozen=True, slots=True)
class TokenRequest:
    """What is asked, and what is to be reported of it."""

    id: str
    asked: Asked
    stream: bool
    logprobs: bool
    prompt_logprobs: bool
    usage_in_stream: bool


def read_token_request(raw: bytes, served: Served, max_tokens: int) -> TokenRequest:
    """The request, or a Refusal."""
    fields = Fields(parse_json(raw))
    ids = fields.take("token_ids", list)
    if not ids or not all(type(token) is int and token >= 0 for token in ids):
        fields.refuse("token_ids", "must be a list of token ids, at least one")
    model = fields.take("model", str, served.name)
    check_model(model, served)
    sampling = Fields(fields.take("sampling_params", dict, {}), "sampling_params")
    request_id, stream = fields.take("request_id", str, secrets.token_hex(16)), fields.take("stream", bool, False)
    options = fields.take("stream_options", dict, {})
    fields.only("priority", 0)
    fields.only("output_mode", "tokens", remedy='use /v1/completions for text, or "tokens"')
    fields.ignore(*_HARMLESS)
    fields.end()
    seed, count = sampling.take("seed", int, None), read_count(sampling)
    logprobs = _zero_or_one(sampling, "logprobs")
    prompt_logprobs = _zero_or_one(sampling, "prompt_logprobs")
    params = _params(sampling, max_tokens)
    call = Call(model, prompt=tuple(ids), stream=stream)
    asked = Asked(tuple(ids), params, seeds_of(seed, count), call)
    return TokenRequest(request_id, asked, stream, logprobs, prompt_logprobs, options.get("include_usage") is True)


def _zero_or_one(fields: Fields, name: str) -> bool:
    value = fields.take(name, int, None)
    if value not in (None, 0, 1):
        fields.refuse(name, f"must be 0 or 1, got {value}: only the token's own is known")
    return value is not None


def _params(fields: Fields, max_tokens: int) -> SamplingParams:
    top_k = fields.take("top_k", int, 0)
    stop_ids = fields.take("stop_token_ids", list, [])
    if not all(type(token) is int and token >= 0 for token in stop_ids):
        fields.refuse("stop_token_ids", "must be a list of token ids")
    params = SamplingParams(
        temperature=fields.take("temperature", (int, float), None),
        top_p=fields.take("top_p", (int, float), None),
        top_k=max(0, top_k),  # -1 means all, too
        max_tokens=fields.take("max_tokens", int, max_tokens),
        stop=read_stop(fields, "stop"),
        stop_token_ids=tuple(stop_ids),
        ignore_eos=fields.take("ignore_eos", bool, False),
    )
    for name, value in _AS_IT_IS.items():
        fields.only(name, value, float(value), remedy="this engine samples from the model as it is; leave it out")
    fields.ignore(*_HARMLESS_SAMPLING)
    fields.end()
    return params.filled(DEFAULT_SAMPLING)


class TokenAnswer:
    """One answer. Its completions, one per seed, are sampled side by side."""

    def __init__(self, served: Served, request: TokenRequest) -> None:
        self._served, self._request = served, request
        self.frames: asyncio.Queue[bytes] = asyncio.Queue()

    async def complete(self) -> dict[str, Any]:
        """The answer in one piece."""
        request, asked = self._request, self._request.asked
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(sample(self._served, asked, seed)) for seed in asked.seeds]
            scoring = group.create_task(self._prompt_logprobs())
        made = [task.result() for task in running]
        choices = [
            {"index": index, "token_ids": list(one.completion_ids), "finish_reason": _finish(one),
             "logprobs": self._logprobs(one.completion_ids, one.logprobs), "weight_versions": spans(one.versions)}
            for index, one in enumerate(made)
        ]  # fmt: skip
        return {
            "request_id": request.id, "model": asked.call.model, "created": int(time.time()), "choices": choices,
            "usage": self._usage(made), "prompt_logprobs": scoring.result(),
        }  # fmt: skip

    async def stream(self) -> None:
        """Put the answer into `frames`, as it is sampled."""
        asked = self._request.asked
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(self._stream(*given)) for given in enumerate(asked.seeds)]
        if self._request.usage_in_stream:
            made = [task.result() for task in running]
            self.frames.put_nowait(
                frame(None, {"request_id": self._request.id, "choices": [], "usage": self._usage(made)})
            )
        self.frames.put_nowait(frame(None, "[DONE]"))

    async def _stream(self, index: int, seed: int) -> Generation:
        sent = 0

        def hear(ids: Sequence[int], logprobs: Sequence[float]) -> None:
            nonlocal sent
            sent += len(ids)
            self._send(index, ids, logprobs)

        made = await sample(self._served, self._request.asked, seed, hear)
        self._send(index, made.completion_ids[sent:], made.logprobs[sent:], made)
        return made

    def _send(self, index: int, ids: Sequence[int], logprobs: Sequence[float], ended: Generation | None = None) -> None:
        choice = {"index": index, "token_ids": list(ids), "logprobs": self._logprobs(ids, logprobs)}
        choice["finish_reason"] = _finish(ended) if ended else None
        choice["weight_versions"] = spans(ended.versions) if ended else None
        self.frames.put_nowait(frame(None, {"request_id": self._request.id, "choices": [choice]}))

    def _logprobs(self, ids: Sequence[int], logprobs: Sequence[float]) -> dict[str, Any] | None:
        if not self._request.logprobs:
            return None
        pairs = zip(ids, logprobs, strict=True)
        return {"content": [{"token_id": token, "logprob": value, "top_logprobs": []} for token, value in pairs]}

    async def _prompt_logprobs(self) -> list[Any] | None:
        """One entry per prompt token; nothing is known of the first."""
        if not self._request.prompt_logprobs:
            return None
        ids = self._request.asked.prompt_ids
        (found,) = await self._served.engine.compute_logprobs([ids])
        return [None, *({str(token): {"logprob": value}} for token, value in zip(ids[1:], found, strict=True))]

    def _usage(self, made: Sequence[Generation]) -> dict[str, int]:
        read, sampled = len(self._request.asked.prompt_ids), sum(len(one.completion_ids) for one in made)
        return {"prompt_tokens": read, "completion_tokens": sampled, "total_tokens": read + sampled}


def spans(versions: Sequence[int]) -> list[dict[str, Any]]:
    """Which tokens which version sampled."""
    found: list[dict[str, Any]] = []
    for version, tokens in itertools.groupby(versions):
        start = found[-1]["end"] if found else 0
        found.append({"version": str(version), "start": start, "end": start + len(list(tokens))})
    return found


def _finish(made: Generation) -> str:
    return "stop" if made.finish_reason == FinishReason.STOP else "length"
