"""`asample`: a request checked, sampled and scored."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tinker import types

from headrace.data.episode import FinishReason
from headrace.engines.base import Generation, SamplingParams
from headrace.tinker_server.options import Refusal
from headrace.tinker_server.sampler_pool import SamplerLane, SamplerPool, Scores
from headrace.tinker_server.service import Service
from headrace.tinker_server.wire import Outcome, SampledTokens, SampleResult, sample_outcome

_MOST_SAMPLES = 1024
_MOST_TOP = 256
_HIGHEST_TEMPERATURE = 100
_MOST_TOKENS = 100_000_000
_STRIDE = 0x9E3779B97F4A7C15  # odd: no two samples of a request share random numbers


@dataclass(frozen=True, slots=True)
class CheckedRequest:
    """A checked request."""

    prompt: tuple[int, ...]
    params: SamplingParams
    seeds: tuple[int, ...]
    prompt_logprobs: bool
    last_n: int | None
    prompt_k: int
    sample_k: int


def start_sample(service: Service, request: types.SampleRequest, digest: str) -> dict[str, Any]:
    """Begin to sample; the answer names the promise and the sequences to come."""
    key, session, prefix = _source(service, request)
    number = secrets.token_hex(8) if request.seq_id is None else request.seq_id
    request_id = f"{prefix}:{number}"
    if service.promises.find(request_id, digest) is None:
        asked = _check(service, request)
        if service.pool.waiting + len(asked.seeds) > service.options.max_waiting:
            raise Refusal("too many sequences are waiting to be sampled; come again in a moment", status=429)

        async def work() -> Outcome:
            return sample_outcome(await _sample(service.pool, await service.samplers.lane(key), asked))

        service.promises.start(service.promises.add(request_id, session, digest, work))
    return {"request_id": request_id, "sample_sequence_ids": [f"{request_id}:{i}" for i in range(request.num_samples)]}


def _source(service: Service, request: types.SampleRequest) -> tuple[str, str, str]:
    """(key of the weights, session, what the request's id begins with)."""
    if request.sampling_session_id is None:
        return service.sampler_key(request.base_model, request.model_path), "", f"sample:{secrets.token_hex(8)}"
    sampling = service.sampling_session(request.sampling_session_id)
    return sampling.key, sampling.session.id, sampling.id


def _check(service: Service, request: types.SampleRequest) -> CheckedRequest:
    if request.target_prompt_logprobs is not None or request.prompt_alt_tokens_k or request.record_stability_info:
        raise Refusal(
            "this server does not offer target_prompt_logprobs, prompt_alt_tokens_k or record_stability_info; "
            "leave them out"
        )
    prompt = _prompt(service, request.prompt)
    if not 1 <= request.num_samples <= _MOST_SAMPLES:
        raise Refusal(f"num_samples must be between 1 and {_MOST_SAMPLES}, got {request.num_samples}")
    for name in ("topk_prompt_logprobs", "topk_sample_logprobs"):
        most = min(_MOST_TOP, service.base.model.vocabulary)
        if not 0 <= getattr(request, name) <= most:
            raise Refusal(f"{name} must be between 0 and {most}, got {getattr(request, name)}")
    last_n = request.prompt_logprobs_last_n
    if last_n is not None and not (request.prompt_logprobs and 1 <= last_n < len(prompt)):
        raise Refusal(f"prompt_logprobs_last_n must be between 1 and {len(prompt) - 1}, with prompt_logprobs set")
    given = request.sampling_params.seed
    first = secrets.randbits(63) if given is None else given
    return CheckedRequest(
        prompt=prompt,
        params=_params(request.sampling_params, service.base.max_length - len(prompt), service.base.model.vocabulary),
        seeds=tuple((first + i * _STRIDE) % 2**64 for i in range(request.num_samples)),
        prompt_logprobs=bool(request.prompt_logprobs),
        last_n=last_n,
        prompt_k=request.topk_prompt_logprobs,
        sample_k=request.topk_sample_logprobs,
    )


def _prompt(service: Service, given: types.ModelInput) -> tuple[int, ...]:
    tokens: list[int] = []
    for chunk in given.chunks:
        if not isinstance(chunk, types.EncodedTextChunk):
            raise Refusal(f"the prompt has a chunk of {chunk.type}; this server reads text tokens only")
        tokens += chunk.tokens
    if not tokens:
        raise Refusal("the prompt is empty; give at least one token")
    vocabulary, longest = service.base.model.vocabulary, service.base.max_length
    odd = next((token for token in tokens if not 0 <= token < vocabulary), None)
    if odd is not None:
        raise Refusal(f"the prompt has the token {odd}, and the model has 0 to {vocabulary - 1}; another tokenizer?")
    if len(tokens) >= longest:
        raise Refusal(f"the prompt has {len(tokens)} tokens, which leaves no room for a reply within {longest}")
    return tuple(tokens)


def _params(given: types.SamplingParams, room: int, vocabulary: int) -> SamplingParams:
    stop = [given.stop] if isinstance(given.stop, str) else list(given.stop or ())
    texts = tuple(entry for entry in stop if isinstance(entry, str))
    ids = tuple(entry for entry in stop if not isinstance(entry, str))
    if odd := [entry for entry in ids if not 0 <= entry < vocabulary]:
        raise Refusal(f"stop has the token {odd[0]}, and the model has 0 to {vocabulary - 1}")
    if given.top_k < -1:
        raise Refusal(f"top_k must be -1 (all), or 1 and above, got {given.top_k}")
    if not 0 <= given.temperature <= _HIGHEST_TEMPERATURE:
        raise Refusal(f"temperature must be between 0 and {_HIGHEST_TEMPERATURE}, got {given.temperature:g}")
    if given.max_tokens is not None and not 1 <= given.max_tokens <= _MOST_TOKENS:
        raise Refusal(f"max_tokens must be between 1 and {_MOST_TOKENS}, got {given.max_tokens}")
    return SamplingParams(
        temperature=given.temperature,
        top_p=given.top_p,
        top_k=max(given.top_k, 0),
        max_tokens=room if given.max_tokens is None else given.max_tokens,
        stop=texts,
        stop_token_ids=ids,
        ignore_eos=given.stop is not None,  # what is given replaces the end of sequence
    )


async def _sample(pool: SamplerPool, lane: SamplerLane, asked: CheckedRequest) -> SampleResult:
    jobs: list[Coroutine[Any, Any, Any]] = [pool.generate(lane, asked.prompt, asked.params, s) for s in asked.seeds]
    scored = asked.prompt_logprobs or asked.prompt_k > 0
    if scored:
        jobs.append(pool.score(lane, asked.prompt, asked.prompt_k))
    found = await _all(jobs)
    generations: list[Generation] = found[: len(asked.seeds)]
    tops: Sequence[Scores | None] = [None] * len(generations)
    if asked.sample_k:
        tops = await _all([pool.score(lane, asked.prompt + g.completion_ids, asked.sample_k) for g in generations])
    sequences = [_sequence(one, top, len(asked.prompt)) for one, top in zip(generations, tops, strict=True)]
    if not scored:
        return SampleResult(sequences)
    logprobs, top = _prompt_scores(found[-1], asked)
    return SampleResult(sequences, logprobs if asked.prompt_logprobs else None, top)


async def _all(jobs: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
    """The results of all; if one fails, or all are cancelled, the others are cancelled."""
    tasks = [asyncio.ensure_future(job) for job in jobs]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def _sequence(one: Generation, scores: Scores | None, prompt_length: int) -> SampledTokens:
    top = None
    if scores is not None and scores.top is not None:
        top = scores.top[0][prompt_length - 1 :], scores.top[1][prompt_length - 1 :]
    return SampledTokens(one.completion_ids, one.logprobs, one.finish_reason == FinishReason.STOP, top)


def _prompt_scores(scores: Scores, asked: CheckedRequest) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray] | None]:
    """One entry per prompt token; NaN for the first, which nothing comes before, and where none was asked for."""
    logprobs = np.concatenate([[np.nan], scores.logprobs])
    unasked = slice(0, len(logprobs) - asked.last_n if asked.last_n is not None else 1)
    logprobs[unasked] = np.nan
    if scores.top is None:
        return logprobs, None
    ids, best = (np.concatenate([np.zeros((1, asked.prompt_k)), part]) for part in scores.top)
    best[unasked] = np.nan
    return logprobs, (ids, best)
