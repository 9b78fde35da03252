"""What a vLLM server is asked, and what its answers mean."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import Any

import numpy as np

from headrace.data.episode import FinishReason
from headrace.engines.request import Request
from headrace.engines.servers.facts import require_finite
from headrace.errors import DataError, EngineError

_LOWEST = 0.01  # vLLM samples with this temperature where it is asked for a lower one that is not 0


class AbortedError(Exception):
    """The server gave the request up; it may be asked again."""


def generate_body(request: Request, model: str, salt: str, stops: bool, priority: int) -> dict[str, Any]:
    """A request for one completion. `salt` keeps prefix caches of different weights apart."""
    params = request.params
    assert params.temperature is not None
    if 0 < params.temperature < _LOWEST:
        raise DataError(f"vLLM samples with no temperature between 0 and {_LOWEST}, got {params.temperature}")
    strings = list(params.stop or ()) if stops else []
    sampling: dict[str, Any] = {
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "max_tokens": request.limit,
        "seed": request.seed & (2**63 - 1),
        "logprobs": 0,
        "ignore_eos": True,  # which tokens end a reply is decided here
        "stop_token_ids": sorted(request.stop_ids),
        "detokenize": bool(strings),
    }
    if strings:
        sampling["stop"] = strings
    body = {"model": model, "token_ids": list(request.prompt), "sampling_params": sampling, "cache_salt": salt}
    return {**body, "priority": priority} if priority else body


def score_body(row: Sequence[int], model: str) -> dict[str, Any]:
    """A request for the log-probabilities of a row. One token is sampled behind it, which nobody reads."""
    sampling = {"temperature": 0.0, "max_tokens": 1, "prompt_logprobs": 0, "detokenize": False}
    return {"model": model, "token_ids": list(row), "sampling_params": sampling}


def score_token_body(row: Sequence[int], at: int, model: str) -> dict[str, Any]:
    """A request for the log-probability of one token of a row. vLLM fails to score whole rows with adapters."""
    ids = [row[at], 0 if row[at] else 1]  # the sampled token comes first, and as many as there are ids in all
    sampling = {"temperature": 1.0, "max_tokens": 1, "logprobs": 2, "logprob_token_ids": ids, "detokenize": False}
    return {"model": model, "token_ids": list(row[:at]), "sampling_params": sampling}


def token_logprob(token: int, answer: Any, url: str) -> float:
    """The answer to `score_token_body`."""
    try:
        (entry,) = answer["choices"][0]["logprobs"]["content"]
        found = {one["token_id"]: one["logprob"] for one in (entry, *entry["top_logprobs"])}[token]
    except (KeyError, TypeError, ValueError):
        raise EngineError(f"{url} did not score the token {token}: {str(answer)[:200]}") from None
    require_finite([found], url)
    return found


def take_answer(request: Request, answer: Any, version: int | None, url: str, routed: bool = False) -> str:
    """Append what was sampled, as far as the reply goes; why it ended.

    Versions come with the answer, unless all tokens are of one `version`. `routed`: so do the experts of each token.
    """
    try:
        (choice,) = answer["choices"]
        ids = choice["token_ids"] or []
        logprobs = [one["logprob"] for one in choice["logprobs"]["content"]]
        ended = choice["finish_reason"]
        spans = choice.get("weight_versions")
    except (KeyError, TypeError, ValueError):
        raise EngineError(f"{url} answered with something else than tokens: {str(answer)[:200]}") from None
    if ended in ("abort", "error"):
        raise AbortedError(ended)
    if not ids or len(ids) != len(logprobs):
        raise EngineError(f"{url} answered with {len(ids)} tokens and {len(logprobs)} log-probabilities")
    require_finite(logprobs, url)
    versions = [version] * len(ids) if version is not None else token_versions(spans, len(ids), url)
    reason = _take(request, ids, logprobs, versions, ended)
    if routed:
        request.take_routing(routed_experts(choice.get("routed_experts"), url), url)
    return reason


def routed_experts(encoded: Any, url: str) -> np.ndarray:
    """Experts [tokens, layers, experts of each] of every token that was read: an .npy file in base64."""
    try:
        return np.load(io.BytesIO(base64.b64decode(encoded)), allow_pickle=False)
    except (TypeError, ValueError, EOFError):
        raise EngineError(
            f"{url} does not say which experts it routed tokens to (routed_experts: {str(encoded)[:40]}); start it "
            f"with --enable-return-routed-experts"
        ) from None


def _take(request: Request, ids: Sequence[int], logprobs: Sequence[float], versions: Sequence[int], ended: str) -> str:
    params = request.params
    plain = params.temperature == 1.0 and params.top_p == 1.0 and not params.top_k
    greedy = params.temperature == 0
    reason: str | None = None
    for token, logprob, version in zip(ids, logprobs, versions, strict=True):
        request.ids.append(token)
        request.logprobs.append(0.0 if greedy else logprob)
        if plain or greedy:
            request.model_logprobs.append(logprob)
        request.versions.append(version)
        if params.stop and (reason := request.finish_reason()) is not None:
            return reason  # servers search for stop strings with a tokenizer of their own
    return FinishReason.STOP if ended == "stop" else request.finish_reason() or FinishReason.STOP


def token_versions(spans: Any, count: int, url: str) -> list[int]:
    """The version of every token, from spans of versions."""
    found: list[int] = []
    try:
        for span in spans:
            if span["start"] != len(found):
                break
            found += [int(span["version"])] * (span["end"] - span["start"])
    except (KeyError, TypeError, ValueError):
        found = []
    if len(found) != count:
        raise EngineError(
            f"{url} does not say which weights sampled each of {count} tokens (weight_versions: {str(spans)[:200]}); "
            f"use vLLM 0.32 or newer, and let nobody else change its weights"
        )
    return found


def row_logprobs(row: Sequence[int], answer: Any, url: str) -> list[float]:
    """The log-probability of every token of a row but the first."""
    try:
        entries = answer["prompt_logprobs"]
        found = [float(entry[str(token)]["logprob"]) for token, entry in zip(row[1:], entries[1:], strict=True)]
    except (KeyError, TypeError, ValueError):
        raise EngineError(f"{url} did not score a row of {len(row)} tokens: {str(answer)[:200]}") from None
    require_finite(found, url)
    return found
