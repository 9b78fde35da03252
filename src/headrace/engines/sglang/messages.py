"""What an SGLang server is asked, and what its answers mean."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np

from headrace.data.episode import FinishReason
from headrace.engines.request import Request
from headrace.engines.servers.facts import require_finite
from headrace.errors import EngineError


def generate_body(request: Request, priority: int, routed: bool = False) -> dict[str, Any]:
    """A request for what is left of a completion: the tokens so far are read, like the prompt."""
    params = request.params
    sampling: dict[str, Any] = {
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k or -1,
        "max_new_tokens": request.limit - len(request.ids),
        "sampling_seed": request.seed & (2**31 - 1),
        "ignore_eos": True,  # which tokens end a reply is decided here
        "stop_token_ids": sorted(request.stop_ids),
        "skip_special_tokens": False,
        "no_stop_trim": True,  # what was sampled is trained, the stop string too
    }
    if params.stop:
        sampling["stop"] = list(params.stop)
    body: dict[str, Any] = {
        "input_ids": [*request.prompt, *request.ids],
        "sampling_params": sampling,
        "return_logprob": True,
        "stream": False,
    }
    if is_cut(request):
        body["return_sampling_mask"] = True
    if routed:
        body["return_routed_experts"] = True
    return {**body, "priority": priority} if priority else body


def score_body(row: Sequence[int]) -> dict[str, Any]:
    """A request for the log-probabilities of a row. One token is sampled behind it, which nobody reads."""
    sampling = {"temperature": 1.0, "max_new_tokens": 1, "ignore_eos": True}
    return {"input_ids": list(row), "sampling_params": sampling, "return_logprob": True, "logprob_start_len": 0}


def is_cut(request: Request) -> bool:
    """Whether some tokens cannot be sampled: log-probabilities are then those of the ones that can."""
    params = request.params
    return bool(params.temperature) and (params.top_p != 1.0 or bool(params.top_k))


def take_answer(request: Request, answer: Any, url: str, routed: bool = False) -> str | None:
    """Append what was sampled, all of it by one version; why the reply ended, or None if the server gave it up.

    The version is that of the server when the answer ended. No answer lives through a weight sync: a pause ends them
    all, and one that comes during the pause begins after it.
    """
    try:
        about = answer["meta_info"]
        version = int(about["weight_version"])
        ended = about["finish_reason"]["type"]
        ids = list(answer.get("output_ids") or ())
        found = about.get("output_token_logprobs") or ()
        said = [token for _, token, *_ in found]
        logprobs = [logprob for logprob, *_ in found]
        if is_cut(request) and ids:
            logprobs = list(about["output_token_sampling_logprobs"])
    except (KeyError, TypeError, ValueError):
        raise EngineError(f"{url} answered with something else than tokens: {str(answer)[:200]}") from None
    if said != ids or len(logprobs) != len(ids) or not (ids or ended == "abort"):
        raise EngineError(
            f"{url} answered with {len(ids)} tokens and {len(logprobs)} log-probabilities; they must be one for one"
        )
    require_finite(logprobs, url)
    read = len(request.prompt) + len(request.ids) + len(ids) - 1
    reason = _take(request, ids, logprobs, version)
    if routed and ids:
        request.take_routing(routed_experts(about.get("routed_experts"), read, url), url)
    if reason is not None:
        return reason
    if ended == "abort":
        return None
    return FinishReason.STOP if ended == "stop" else request.finish_reason() or FinishReason.STOP


def routed_experts(encoded: Any, read: int, url: str) -> np.ndarray:
    """Experts [tokens, slots] of every token that was read: int32 numbers in base64."""
    try:
        return np.frombuffer(base64.b64decode(encoded), "<i4").reshape(read, -1)
    except (TypeError, ValueError):
        raise EngineError(
            f"{url} does not say which experts it routed {read} tokens to (routed_experts: {str(encoded)[:40]}); start "
            f"it with --enable-return-routed-experts"
        ) from None


def _take(request: Request, ids: Sequence[int], logprobs: Sequence[float], version: int) -> str | None:
    params = request.params
    greedy = params.temperature == 0
    plain = params.temperature == 1.0 and not is_cut(request)
    for token, logprob in zip(ids, logprobs, strict=True):
        request.ids.append(token)
        request.logprobs.append(0.0 if greedy else logprob)
        if plain or greedy:
            request.model_logprobs.append(logprob)
        request.versions.append(version)
        if (reason := request.finish_reason()) is not None:
            return reason
    return None


def row_logprobs(row: Sequence[int], answer: Any, url: str) -> list[float]:
    """The log-probability of every token of a row but the first."""
    try:
        found = answer["meta_info"]["input_token_logprobs"]
        if [token for _, token, *_ in found] != list(row):
            raise ValueError("other tokens")
        logprobs = [float(logprob) for logprob, *_ in found[1:]]
    except (KeyError, TypeError, ValueError):
        raise EngineError(f"{url} did not score a row of {len(row)} tokens: {str(answer)[:200]}") from None
    require_finite(logprobs, url)
    return logprobs
