"""Policy losses: pure functions of flat tensors over the trained tokens of a micro-batch, one loss value per token.

A backend changes a loss in two ways: `kl_penalty` is added, `correction_weights` multiply.
Formulas follow one notation: π the policy now, π_old at the start of the batch, μ the sampler, A the advantage.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from operator import add
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from headrace.config import AlgorithmSection, CorrectionSection
from headrace.errors import ConfigError
from headrace.registry import facts

LOG_RATIO_BOUND = 40.0
"""A log-ratio above this counts as this, and its gradient is 0. In float32 e^89 is inf, and a gradient norm squares
what it sums, so that e^45 would be. There is no lower bound, as exp only goes to 0."""


@dataclass(frozen=True, slots=True)
class LossContext:
    """All that a loss may look at. Axis M runs over the trained tokens of a micro-batch, row after row.

    `logprobs_M` is the policy now, with gradient; nothing else has one. `old_logprobs_M` is the denominator of the
    ratio: the sampler's, or the learner's own at the start of the batch, as algorithm.proximal says.
    `sampler_logprobs_M` is what the tokens were sampled with. `row_M` says which row a token belongs to, of `rows` in
    all (a row may have no token). `reference_logprobs_M` is there only if the run loads a reference.

    A loss of your own is a function of this object. It returns one value per token, which the backend weighs and sums
    as algorithm.aggregation says, and metrics to report, by name: each is a tensor over tokens (or rows, or pairs) and
    is reported as its mean. Name it in the run file as `loss = "my_losses:bounded_reinforce"`:

        import torch

        from headrace.algorithms.losses import LossContext


        def bounded_reinforce(context: LossContext) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            unlikely_M = context.logprobs_M.detach() < -5.0
            loss_M = -context.advantages_M * context.logprobs_M
            return loss_M.masked_fill(unlikely_M, 0.0), {"loss/unlikely_fraction": unlikely_M.float()}

    `sum_by_row` and `mean_by_row` of this module give values of complete rows. There may be no token at all (M = 0).
    """

    logprobs_M: Tensor
    old_logprobs_M: Tensor
    sampler_logprobs_M: Tensor
    advantages_M: Tensor
    row_M: Tensor
    rows: int
    algorithm: AlgorithmSection
    reference_logprobs_M: Tensor | None = None
    dpo_beta: float = 0.1
    counts: tuple[int, ...] | None = None
    """Each row's trained tokens, if the caller knows them without asking the device."""


LossMetrics = dict[str, Tensor]
"""By name, values to report as their mean, weighed by how many there are."""

Loss = Callable[[LossContext], tuple[Tensor, LossMetrics]]
"""A loss returns one value per token, and metrics."""


# ---- by advantage ---------------------------------------------------------------------------------------------------


def ppo_clip(context: LossContext) -> tuple[Tensor, LossMetrics]:
    """-min(r A, clip(r, 1 - low, 1 + high) A) with r = π/π_old; where A < 0 at most -c A, if dual_clip c is set."""
    return _clipped(_ratio(context.logprobs_M - context.old_logprobs_M), context)


def gspo(context: LossContext) -> tuple[Tensor, LossMetrics]:
    """ppo_clip with one ratio per row, exp(mean of log(π/π_old)): a row is kept or clipped as one."""
    log_ratio_M = context.logprobs_M - context.old_logprobs_M
    ratio_R = _ratio(mean_by_row(log_ratio_M, context.row_M, context.rows))
    return _clipped(ratio_R[context.row_M], context)


def _clipped(ratio_M: Tensor, context: LossContext) -> tuple[Tensor, LossMetrics]:
    algorithm, advantages_M = context.algorithm, context.advantages_M
    free_M = ratio_M * advantages_M
    gain_M = torch.minimum(free_M, ratio_M.clamp(1 - algorithm.clip_low, 1 + algorithm.clip_high) * advantages_M)
    if algorithm.dual_clip is not None:
        gain_M = torch.where(advantages_M < 0, torch.maximum(gain_M, algorithm.dual_clip * advantages_M), gain_M)
    # a clip on the side that the minimum does not take changes nothing, and is not counted
    return -gain_M, {"policy/clip_fraction": (gain_M != free_M).float(), "policy/ratio_mean": ratio_M.detach()}


def cispo(context: LossContext) -> tuple[Tensor, LossMetrics]:
    """-sg(clip(r, 1 - low, 1 + high)) A log π with r = π/π_old: a clipped token still has a gradient, only bounded."""
    algorithm = context.algorithm
    ratio_M = _ratio(context.logprobs_M.detach() - context.old_logprobs_M)
    weight_M = ratio_M.clamp(1 - algorithm.clip_low, 1 + algorithm.clip_high)
    metrics = {"policy/clip_fraction": (weight_M != ratio_M).float(), "policy/ratio_mean": ratio_M}
    return -weight_M * context.advantages_M * context.logprobs_M, metrics


def importance_sampling(context: LossContext) -> tuple[Tensor, LossMetrics]:
    """-(π/μ) A: unbiased however old the tokens are, and unbounded."""
    ratio_M = _ratio(context.logprobs_M - context.sampler_logprobs_M)
    return -ratio_M * context.advantages_M, {"policy/ratio_mean": ratio_M.detach()}


def reinforce(context: LossContext) -> tuple[Tensor, LossMetrics]:
    """-A log π: right only for tokens of the policy now."""
    return -context.advantages_M * context.logprobs_M, {}


def dppo_tv(context: LossContext) -> tuple[Tensor, LossMetrics]:
    """importance_sampling without the tokens where A > 0 and π - μ > δ, or A < 0 and π - μ < -δ."""
    moved_M = context.logprobs_M.detach().exp() - context.sampler_logprobs_M.exp()
    return _without(_moves_on(moved_M, context) & (moved_M.abs() > context.algorithm.dppo_delta), context)


def dppo_kl(context: LossContext) -> tuple[Tensor, LossMetrics]:
    """importance_sampling without the tokens whose binary KL of μ and π is above δ and that would move further."""
    logprobs_M, sampler_M = context.logprobs_M.detach(), context.sampler_logprobs_M
    divergence_M = _binary_kl(sampler_M, logprobs_M)
    return _without(_moves_on(logprobs_M - sampler_M, context) & (divergence_M > context.algorithm.dppo_delta), context)


def _moves_on(moved_M: Tensor, context: LossContext) -> Tensor:
    """Whether the advantage pushes the token further in the direction it has moved."""
    return torch.where(context.advantages_M > 0, moved_M > 0, (context.advantages_M < 0) & (moved_M < 0))


def _without(dropped_M: Tensor, context: LossContext) -> tuple[Tensor, LossMetrics]:
    loss_M, metrics = importance_sampling(context)
    return loss_M.masked_fill(dropped_M, 0.0), {**metrics, "policy/dropped_fraction": dropped_M.float()}


def _binary_kl(p_logprobs_M: Tensor, q_logprobs_M: Tensor) -> Tensor:
    """KL from p to q of the event "this token": p log(p/q) + (1 - p) log((1 - p)/(1 - q))."""
    # expm1 keeps 1 - p of a near-certain token; rounding can put a log-probability a hair above 0
    p_not_M, q_not_M = -torch.expm1(p_logprobs_M.clamp(max=0)), -torch.expm1(q_logprobs_M.clamp(max=0))
    token_M = p_logprobs_M.exp() * (p_logprobs_M - q_logprobs_M)
    # xlogy is 0 where 1 - p is 0; the difference of two, as the quotient inside one would be 0/0
    return token_M + torch.xlogy(p_not_M, p_not_M) - torch.xlogy(p_not_M, q_not_M)


# ---- by example -----------------------------------------------------------------------------------------------------


def cross_entropy(context: LossContext) -> tuple[Tensor, LossMetrics]:
    """-log π: imitate."""
    return -context.logprobs_M, {}


def dpo(context: LossContext) -> tuple[Tensor, LossMetrics]:
    """-log σ(β [(log π_c - log ref_c) - (log π_r - log ref_r)]), log-probabilities summed over a row's tokens.

    Rows 2i and 2i + 1 are the chosen and the rejected of pair i. A pair's loss is spread evenly over the tokens of
    both, so that the sum over tokens is the sum over pairs. Metrics are per pair; rewards and margin include β.
    """
    if context.reference_logprobs_M is None:
        raise ConfigError('loss "dpo" needs a reference, and the run has none; set algorithm.objective = "dpo"')
    assert context.rows % 2 == 0, f"dpo needs chosen and rejected in one micro-batch, got {context.rows} rows"
    row_M, rows = context.row_M, context.rows
    above_reference_M = context.logprobs_M - context.reference_logprobs_M
    chosen_P, rejected_P = (context.dpo_beta * sum_by_row(above_reference_M, row_M, rows)).view(-1, 2).unbind(1)
    margin_P = chosen_P - rejected_P
    tokens_P = sum_by_row(torch.ones_like(above_reference_M), row_M, rows).view(-1, 2).sum(1)
    pair_M = row_M // 2
    loss_P = -functional.logsigmoid(margin_P)
    loss_M = loss_P[pair_M] / tokens_P[pair_M]
    metrics = {
        "dpo/loss": loss_P.detach(),
        "dpo/accuracy": (margin_P > 0).float(),
        "dpo/margin": margin_P.detach(),
        "dpo/chosen_reward": chosen_P.detach(),
        "dpo/rejected_reward": rejected_P.detach(),
    }
    if context.counts is not None and all(map(add, context.counts[::2], context.counts[1::2])):
        return loss_M, metrics
    # a pair without a trained token has no loss, so no metrics either
    return loss_M, {key: values_P[tokens_P > 0] for key, values_P in metrics.items()}


# ---- what a backend adds to a loss -----------------------------------------------------------------------------------


def kl_penalty(kind: Literal["k1", "k2", "k3", "abs"], logprobs_M: Tensor, reference_M: Tensor) -> Tensor:
    """How far the policy is from the reference, per token, with gradient: see KlSection.kind."""
    distance_M = logprobs_M - reference_M
    match kind:
        case "k1":
            return distance_M
        case "k2":
            return distance_M.square() / 2
        case "k3":
            # d is bounded, not only exp: otherwise the remaining gradient would point away from the reference
            bounded_M = distance_M.clamp(min=-LOG_RATIO_BOUND)
            return torch.expm1(-bounded_M) + bounded_M
        case "abs":
            return distance_M.abs()


def correction_weights(
    correction: CorrectionSection, old_logprobs_M: Tensor, sampler_logprobs_M: Tensor, row_M: Tensor, rows: int
) -> tuple[Tensor, LossMetrics]:
    """Weights, without gradient, that make token losses of μ's tokens those of π_old's: see CorrectionSection.name."""
    log_ratio_M = (old_logprobs_M - sampler_logprobs_M).detach()
    if correction.name == "none":
        return torch.ones_like(log_ratio_M), {}
    weights_M = _CORRECTIONS[correction.name](correction, log_ratio_M, row_M, rows)
    metrics = {"policy/correction_mean": weights_M}
    if facts("correction", correction.name).masks:
        metrics["policy/masked_fraction"] = (weights_M == 0).float()
    return weights_M, metrics


def _tis(correction: CorrectionSection, log_ratio_M: Tensor, row_M: Tensor, rows: int) -> Tensor:
    if correction.level == "sequence":
        log_ratio_M = sum_by_row(log_ratio_M, row_M, rows)[row_M]
    return _ratio(log_ratio_M).clamp(correction.low, correction.high)


def _icepop(correction: CorrectionSection, log_ratio_M: Tensor, row_M: Tensor, rows: int) -> Tensor:
    ratio_M = _ratio(log_ratio_M)
    return ratio_M * _inside(ratio_M, correction)


def _sequence_mask(correction: CorrectionSection, log_ratio_M: Tensor, row_M: Tensor, rows: int) -> Tensor:
    ratio_R = _ratio(mean_by_row(log_ratio_M, row_M, rows))
    return _inside(ratio_R, correction).to(log_ratio_M.dtype)[row_M]


def _veto(correction: CorrectionSection, log_ratio_M: Tensor, row_M: Tensor, rows: int) -> Tensor:
    below_M = (log_ratio_M < math.log(correction.floor)).to(log_ratio_M.dtype)
    return (sum_by_row(below_M, row_M, rows) == 0).to(log_ratio_M.dtype)[row_M]


_CORRECTIONS: dict[str, Callable[[CorrectionSection, Tensor, Tensor, int], Tensor]] = {
    "tis": _tis,
    "icepop": _icepop,
    "sequence_mask": _sequence_mask,
    "veto": _veto,
}


def _inside(ratio: Tensor, correction: CorrectionSection) -> Tensor:
    return (ratio >= correction.low) & (ratio <= correction.high)


# ---- helpers --------------------------------------------------------------------------------------------------------


def sum_by_row(values_M: Tensor, row_M: Tensor, rows: int) -> Tensor:
    """The sum of each row's tokens, of shape [rows]; 0 for a row without any."""
    return values_M.new_zeros(rows).index_add(0, row_M, values_M)


def mean_by_row(values_M: Tensor, row_M: Tensor, rows: int) -> Tensor:
    """The mean over each row's tokens, of shape [rows]; 0 for a row without any."""
    counts_R = sum_by_row(torch.ones_like(values_M), row_M, rows)
    return sum_by_row(values_M, row_M, rows) / counts_R.clamp(min=1)


def _ratio(log_ratio: Tensor) -> Tensor:
    return torch.exp(log_ratio.clamp(max=LOG_RATIO_BOUND))
