"""Choosing tokens: one uniform number per (seed, position), turned into a token through the cumulative distribution."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.engines.base import SamplingParams
from headrace.models.kernels.cpu import kernels_for
from headrace.models.transfer import download, upload

_NUCLEUS = 512  # candidates for top_p that are looked at first: sorting a whole vocabulary is slow
_BLOCK = 256
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
    """(tokens, log-probabilities under the sampling distribution, log-probabilities at temperature 1).

    All is computed where the logits are. Only what was drawn comes to the host, in one transfer.
    """
    logits_BV = logits_BV.to(torch.promote_types(logits_BV.dtype, torch.float32))
    draws = uniforms(seeds, positions)
    if all(is_plain(p) for p in params):
        tokens_B, logprobs_B = _inverse_cdf(logits_BV, *_upload(logits_BV.device, draws))
        return _to_host(tokens_B, logprobs_B, logprobs_B)
    temperatures = np.array([p.temperature for p in params], dtype=np.float32)
    greedy = temperatures == 0
    cut = [i for i, p in enumerate(params) if (p.top_k or (p.top_p or 1.0) < 1.0) and p.temperature]
    plain = temperatures == 1
    plain[cut] = False
    uniforms_B, divisors_B, greedy_B, plain_B = _upload(
        logits_BV.device, draws, np.where(greedy, np.float32(1), temperatures), greedy, plain
    )
    scaled_BV = logits_BV
    if not bool((temperatures == 1).all()):
        scaled_BV = logits_BV / divisors_B[:, None]
    if cut:
        scaled_BV = scaled_BV.clone() if scaled_BV is logits_BV else scaled_BV
        _truncate_rows(scaled_BV, cut, [params[i] for i in cut])
    tokens_B, logprobs_B = _inverse_cdf(scaled_BV, uniforms_B)
    if bool(greedy.any()):
        tokens_B = torch.where(greedy_B, logits_BV.argmax(-1), tokens_B)
    model_B = logprobs_B
    if scaled_BV is not logits_BV:  # a row at temperature 1 has the same bits whatever the others have
        model_B = torch.where(plain_B, logprobs_B, _pick(logits_BV, tokens_B) - logits_BV.logsumexp(-1))
    logprobs_B = torch.where(greedy_B, 0.0, logprobs_B)  # a greedy choice is certain
    return _to_host(tokens_B, logprobs_B, model_B)


def _upload(device: torch.device, draws: np.ndarray, *more: np.ndarray) -> list[Tensor]:
    narrow = device.type == "mps"  # which has no float64
    return upload([draws.astype(np.float32) if narrow else draws, *more], device)


def _to_host(tokens_B: Tensor, logprobs_B: Tensor, model_B: Tensor) -> tuple[list[int], list[float], list[float]]:
    different = [model_B] if model_B is not logprobs_B else []
    tokens, logprobs, *model = download([tokens_B, logprobs_B, *different])
    drawn = logprobs.tolist()
    return tokens.long().tolist(), drawn, model[0].tolist() if model else drawn


def is_plain(params: SamplingParams) -> bool:
    """Whether tokens are drawn from the model's own distribution."""
    return params.temperature == 1 and not params.top_k and params.top_p in (None, 1.0)


def _pick(values_BV: Tensor, tokens_B: Tensor) -> Tensor:
    return values_BV.gather(1, tokens_B[:, None]).squeeze(1)


def _truncate_rows(scaled_BV: Tensor, rows: Sequence[int], params: Sequence[SamplingParams]) -> None:
    """Leave of these rows what `top_k` and `top_p` leave, renormalised; in place."""
    if scaled_BV.device.type == "cpu":
        for i, one in zip(rows, params, strict=True):
            scaled_BV[i] = _truncate(torch.log_softmax(scaled_BV[i], -1), one.top_k or 0, one.top_p or 1.0)
        return
    size = scaled_BV.shape[1]
    ranks = np.array([one.top_k or size for one in params], dtype=np.int64)
    shares = np.array([one.top_p or 1.0 for one in params], dtype=np.float32)
    rows_C, ranks_C, shares_C = upload([np.array(rows, dtype=np.int64), ranks, shares], scaled_BV.device)
    scaled_BV[rows_C] = _truncate_together(torch.log_softmax(scaled_BV[rows_C], -1), ranks_C, shares_C)


def _truncate_together(logprobs_CV: Tensor, ranks_C: Tensor, shares_C: Tensor) -> Tensor:
    """As `_truncate` does row by row, by a sort of all: an accelerator sorts fast, and nobody waits for a count."""
    ordered, index = logprobs_CV.sort(-1, descending=True)
    kept = torch.arange(ordered.shape[1], device=ordered.device) < ranks_C[:, None]
    mass = ordered.exp().where(kept, 0.0)
    kept &= (mass.cumsum(-1) - mass) < shares_C[:, None] * mass.sum(-1, keepdim=True)
    ordered = ordered.masked_fill(~kept, float("-inf"))
    return torch.empty_like(ordered).scatter_(-1, index, ordered - ordered.logsumexp(-1, keepdim=True))


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


def _inverse_cdf(scaled_BV: Tensor, uniforms_B: Tensor) -> tuple[Tensor, Tensor]:
    """(the token that each uniform number falls on, its log-probability).

    First the block of tokens that it falls on, then the token in it: a cumulative sum of the whole vocabulary would
    cost more than all the rest.
    """
    if kernels := kernels_for(scaled_BV):
        return kernels.sample(scaled_BV, uniforms_B)
    batch, size = scaled_BV.shape
    top_B1 = scaled_BV.amax(-1, keepdim=True)
    mass_BV = (scaled_BV - top_B1).exp_()
    if missing := -size % _BLOCK:
        mass_BV = F.pad(mass_BV, (0, missing))
    mass_BKb = mass_BV.view(batch, -1, _BLOCK)
    ends_BK = _wide(mass_BKb.sum(-1)).cumsum(-1)
    draws_B1 = uniforms_B[:, None] * ends_BK[:, -1:]
    # right=True: the first end above the draw, so that what has probability 0 is never chosen
    block_B1 = torch.searchsorted(ends_BK, draws_B1, right=True).clamp_(max=ends_BK.shape[1] - 1)
    end_B1 = ends_BK.gather(1, block_B1)
    before_B1 = torch.where(block_B1 > 0, ends_BK.gather(1, (block_B1 - 1).clamp_(min=0)), 0.0)
    inside_Bb = _wide(mass_BKb[torch.arange(batch, device=mass_BKb.device), block_B1.squeeze(1)]).cumsum(-1)
    share_B1 = ((draws_B1 - before_B1) / (end_B1 - before_B1)).clamp_(0, 1 - 1e-12)
    token_B1 = torch.searchsorted(inside_Bb, share_B1 * inside_Bb[:, -1:], right=True)
    tokens_B = (block_B1 * _BLOCK + token_B1).squeeze(1).clamp_(max=size - 1)  # of NaN: whoever trains on it says so
    total_B = top_B1.squeeze(1) + ends_BK[:, -1].log().to(scaled_BV.dtype)
    return tokens_B, _pick(scaled_BV, tokens_B) - total_B


def _wide(x: Tensor) -> Tensor:
    return x if x.device.type == "mps" else x.double()
