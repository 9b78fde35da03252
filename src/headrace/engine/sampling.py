"""Choosing tokens: one uniform number per (seed, position), turned into a token through the cumulative distribution."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from headrace.engine.base import SamplingParams

_NUCLEUS = 512  # candidates for top_p that are looked at first: sorting a whole vocabulary is slow
_STRIDE = np.uint64(0x9E3779B97F4A7C15)


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> np.ndarray:
    """Uniform numbers in [0, 1) that depend on (seed, position) and nothing else (SplitMix64)."""
    with np.errstate(over="ignore"):
        state = np.asarray(seeds, dtype=np.uint64)
        state = _mix(state + _STRIDE) + (np.asarray(positions, dtype=np.uint64) + np.uint64(1)) * _STRIDE
        return (_mix(state) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def sample_tokens(
    logits_BV: Tensor, params: Sequence[SamplingParams], seeds: Sequence[int], positions: Sequence[int]
) -> tuple[list[int], list[float], list[float]]:
    """(tokens, log-probabilities under the sampling distribution, log-probabilities at temperature 1)."""
    logits_BV = logits_BV.to(torch.promote_types(logits_BV.dtype, torch.float32))
    temperatures = torch.tensor([p.temperature for p in params])
    greedy_B = temperatures == 0
    model_BV = torch.log_softmax(logits_BV, dim=-1)
    if bool((temperatures == 1).all()):
        sampling_BV = model_BV
    else:
        scale = torch.where(greedy_B, 1.0, temperatures)[:, None]
        sampling_BV = torch.log_softmax(logits_BV / scale, dim=-1)
    cut = [i for i, p in enumerate(params) if (p.top_k or (p.top_p or 1.0) < 1.0) and p.temperature]
    if cut:
        sampling_BV = sampling_BV.clone()
        for i in cut:
            sampling_BV[i] = _truncate(sampling_BV[i], params[i].top_k or 0, params[i].top_p or 1.0)
    tokens_B = _inverse_cdf(sampling_BV.exp(), torch.from_numpy(uniforms(seeds, positions)))
    logprobs_B = sampling_BV.gather(1, tokens_B[:, None]).squeeze(1)
    if bool(greedy_B.any()):
        tokens_B = torch.where(greedy_B, logits_BV.argmax(-1), tokens_B)
        logprobs_B = torch.where(greedy_B, 0.0, logprobs_B)  # a greedy choice is certain
    model_B = model_BV.gather(1, tokens_B[:, None]).squeeze(1)
    return tokens_B.tolist(), logprobs_B.tolist(), model_B.tolist()


def _truncate(logprobs_V: Tensor, top_k: int, top_p: float) -> Tensor:
    """Keep the k likeliest tokens and of those the smallest set with mass top_p; renormalise."""
    size = logprobs_V.shape[0]
    count = min(top_k or _NUCLEUS, size)
    ordered, index = logprobs_V.topk(count)
    while not top_k and count < size and float(ordered.exp().sum()) <= top_p:  # a wide nucleus
        count = min(count * 8, size)
        ordered, index = logprobs_V.topk(count)
    if top_p < 1:
        mass = ordered.exp() / (ordered.exp().sum() if top_k else 1.0)
        count = int(((mass.cumsum(0) - mass) < top_p).sum())  # the token that crosses top_p stays in
        ordered, index = ordered[:count], index[:count]
    return torch.full_like(logprobs_V, float("-inf")).scatter(0, index, ordered - ordered.logsumexp(0))


def _inverse_cdf(probs_BV: Tensor, uniforms_B: Tensor) -> Tensor:
    cumulative = probs_BV.double().cumsum(-1)
    draws = uniforms_B[:, None] * cumulative[:, -1:]
    # right=True: the first entry above the draw, so a token of probability 0 is never chosen
    return torch.searchsorted(cumulative, draws, right=True).squeeze(1).clamp_(max=probs_BV.shape[1] - 1)
