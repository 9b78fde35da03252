"""Policy losses: pure functions of flat tensors over the trained tokens only, one loss value per token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.config import AlgorithmSection


@dataclass(frozen=True, slots=True)
class LossContext:
    """All a loss may look at. Axis M runs over the trained tokens of a micro-batch, row after row.

    `logprobs_M` is the policy now (with gradient), `old_logprobs_M` the denominator of the ratio, `sampler_logprobs_M`
    what the tokens were sampled with; `row_M` says which row a token belongs to, of `rows` in all.
    """

    logprobs_M: Tensor
    old_logprobs_M: Tensor
    sampler_logprobs_M: Tensor
    advantages_M: Tensor
    row_M: Tensor
    rows: int
    algorithm: AlgorithmSection


Loss = Callable[[LossContext], tuple[Tensor, dict[str, Tensor]]]
"""A loss returns one value per token and, by name, figures per token to report as means."""


def ppo_clip(context: LossContext) -> tuple[Tensor, dict[str, Tensor]]:
    """-min(r A, clip(r, 1 - low, 1 + high) A), bounded below by -c |A| where A < 0 if dual_clip is set."""
    algorithm, advantages = context.algorithm, context.advantages_M
    ratio = torch.exp(context.logprobs_M - context.old_logprobs_M)
    clipped = ratio.clamp(1 - algorithm.clip_low, 1 + algorithm.clip_high)
    gain = torch.minimum(ratio * advantages, clipped * advantages)
    if algorithm.dual_clip is not None:
        gain = torch.where(advantages < 0, torch.maximum(gain, algorithm.dual_clip * advantages), gain)
    with torch.no_grad():
        cut = (ratio * advantages > clipped * advantages).float()
    return -gain, {"policy/clip_fraction": cut}


def cross_entropy(context: LossContext) -> tuple[Tensor, dict[str, Tensor]]:
    """-log π: imitate."""
    return -context.logprobs_M, {}
