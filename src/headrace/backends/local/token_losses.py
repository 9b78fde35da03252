"""From log-probabilities to the loss of each token: role by role, then corrections, divergence and entropy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import compress

import torch
from torch import Tensor

from headrace.algorithms.losses import Loss, LossContext, LossMetrics, correction_weights, kl_penalty
from headrace.backends.base import offending_samples
from headrace.backends.local.tokens import TokenTensors
from headrace.config import AlgorithmSection, RunConfig
from headrace.config.derived import chosen
from headrace.data.sample import NO_VERSION, ClipState, Sample, TrainBatch
from headrace.errors import BackendError, DataError, DivergedError
from headrace.registry import facts, resolve
from headrace.tracking.metrics import MetricsAggregator, Reducer


def loss_context(
    tokens: TokenTensors, logprobs_M: Tensor, algorithm: AlgorithmSection, dpo_beta: float = 0.1
) -> LossContext:
    """What the losses of a micro-batch look at, from the policy's log-probabilities of its trained targets."""
    old_M = tokens.sampler_M
    if algorithm.proximal == "recompute":  # without those of the start of the batch, the batch starts here
        old_M = logprobs_M.detach() if tokens.old_M is None else tokens.old_M
    return LossContext(
        logprobs_M=logprobs_M,
        old_logprobs_M=old_M,
        sampler_logprobs_M=tokens.sampler_M,
        advantages_M=tokens.advantages_M,
        row_M=tokens.row_M,
        rows=len(tokens.counts),
        algorithm=algorithm,
        reference_logprobs_M=tokens.reference_M,
        dpo_beta=dpo_beta,
    )


def token_losses(
    context: LossContext, samples: Sequence[Sample], entropy_M: Tensor, sampled_M: Tensor
) -> tuple[Tensor, LossMetrics, Tensor, Tensor]:
    """The loss of every trained token of a micro-batch, metrics to report, which rows are rejected, and clip states.

    The loss of a rejected row is 0, divergence and entropy bonus included; the step is normalised without it.
    """
    algorithm = context.algorithm
    loss_M, loss_metrics, clip_M = _by_role(context, samples)
    rejected_R = torch.zeros(context.rows, dtype=torch.bool)
    if algorithm.correction.name != "none":
        sampler_M = context.sampler_logprobs_M
        # given text has no sampler to correct for, and says nothing about the rest of its row
        old_M = context.old_logprobs_M.where(sampled_M, sampler_M)
        weights_M, more = correction_weights(algorithm.correction, old_M, sampler_M, context.row_M, context.rows)
        loss_M = loss_M * weights_M.where(sampled_M, 1.0)
        loss_metrics |= more
        clip_M = _clip_states(more, clip_M)
        if facts("correction", algorithm.correction.name).rejects_rows:
            rejected_R[context.row_M[weights_M == 0]] = True
    if algorithm.kl.coef and algorithm.kl.where == "loss":
        if context.reference_logprobs_M is None:
            raise BackendError("algorithm.kl is on, but the samples carry no reference log-probabilities")
        divergence_M = kl_penalty(algorithm.kl.kind, context.logprobs_M, context.reference_logprobs_M)
        loss_M = loss_M + algorithm.kl.coef * divergence_M
        loss_metrics["policy/kl_to_reference"] = divergence_M.detach()
    if algorithm.entropy_coef:
        loss_M = loss_M - algorithm.entropy_coef * entropy_M
    clip_M = clip_M.masked_fill(rejected_R[context.row_M], ClipState.REJECTED)
    return without_rejected(loss_M, rejected_R, context.row_M), loss_metrics, rejected_R, clip_M


def without_rejected(loss_M: Tensor, rejected_R: Tensor, row_M: Tensor) -> Tensor:
    """The losses, 0 in rejected rows."""
    return loss_M.masked_fill(rejected_R[row_M], 0.0) if bool(rejected_R.any()) else loss_M


def record_losses(metrics: MetricsAggregator, loss_M: Tensor, entropy_M: Tensor, loss_metrics: LossMetrics) -> None:
    """How many tokens were trained (those of `loss_M`: rejected rows are left out), and each metric as its mean.

    Means are weighed by how many values there are.
    """
    metrics.record("tokens/trained", loss_M.numel())
    whole = {} if "dpo/loss" in loss_metrics else {"policy/loss": loss_M}  # dpo reports its loss per pair
    for key, values in {**loss_metrics, **whole, "policy/entropy": entropy_M}.items():
        if values.numel():
            metrics.record(key, float(values.detach().mean()), Reducer.WEIGHTED_MEAN, weight=values.numel())


def require_finite(loss_M: Tensor, row_M: Tensor, batch: TrainBatch, indices: Sequence[int]) -> None:
    """Raise DivergedError, with the samples that it comes from, for a loss that is not finite."""
    bad_rows = row_M[~torch.isfinite(loss_M)].unique().tolist()
    if bad_rows:
        report = offending_samples(batch, [indices[row] for row in bad_rows])
        raise DivergedError(
            f"the loss is not finite in {len(bad_rows)} of {len(indices)} samples; lower optimizer.lr or look at "
            f"these:\n{report}"
        )


def require_known_losses(config: RunConfig) -> None:
    """Raise ConfigError for the name of a loss that there is not: at start-up, before a model is loaded."""
    for name in chosen(config.algorithm, "loss"):
        resolve("loss", name)


def require_trainable(algorithm: AlgorithmSection, batch: TrainBatch) -> None:
    """A ratio to log-probabilities that were never recorded would be a ratio to 1; a greedy choice has no gradient."""
    for sample in batch.samples:
        if sample.temperature <= 0:
            raise DataError(
                f'task "{sample.task_id}", role {sample.role}: tokens chosen greedily (temperature 0) cannot be '
                f"trained; sample them, or leave the role out with algorithm.roles.{sample.role}.train = false"
            )
        if facts("loss", algorithm.for_role(sample.role).loss).ratio is None:
            continue
        if NO_VERSION in compress(sample.versions, sample.loss_mask):
            raise DataError(
                f'task "{sample.task_id}", role {sample.role}: loss "{algorithm.for_role(sample.role).loss}" needs the '
                f"log-probabilities that the tokens were sampled with, and they have none; "
                f'use loss "cross_entropy" for given text'
            )


def _by_role(context: LossContext, samples: Sequence[Sample]) -> tuple[Tensor, LossMetrics, Tensor]:
    """Each row by the loss of its role; the third is the tokens' clip states."""
    names = [context.algorithm.for_role(sample.role).loss for sample in samples]
    clip_M = torch.zeros_like(context.logprobs_M, dtype=torch.uint8)
    if len(set(names)) == 1:
        alone = _apply(names[0], replace(context, algorithm=context.algorithm.for_role(samples[0].role)))
        return *alone, _clip_states(alone[1], clip_M)
    loss_M = torch.zeros_like(context.logprobs_M)
    loss_metrics: LossMetrics = {}
    for name in sorted(set(names)):
        rows = [i for i, other in enumerate(names) if other == name]
        where = torch.isin(context.row_M, torch.tensor(rows)).nonzero().squeeze(1)
        part, more = _apply(name, _select(context, where, rows, samples[rows[0]].role))
        loss_M = loss_M.index_put((where,), part)
        clip_M[where] = _clip_states(more, clip_M[where])
        for key, values in more.items():  # roles with different losses may report the same metric
            loss_metrics[key] = torch.cat([loss_metrics[key], values]) if key in loss_metrics else values
    return loss_M, loss_metrics, clip_M


_CLIP_STATES = {
    "policy/clip_fraction": ClipState.CLIPPED,
    "policy/dropped_fraction": ClipState.DROPPED,
    "policy/masked_fraction": ClipState.MASKED,
}


def _clip_states(loss_metrics: LossMetrics, kept_M: Tensor) -> Tensor:
    """What losses report of each token as a fraction of all; `kept_M` has the state that is left where none does."""
    states_M = kept_M.clone()
    for key, state in _CLIP_STATES.items():
        values = loss_metrics.get(key)
        if values is not None and values.shape == states_M.shape:  # a user's loss may report it by row
            states_M[values != 0] = state
    return states_M


def _apply(name: str, context: LossContext) -> tuple[Tensor, LossMetrics]:
    """Call a loss, which may be a user's own, and check the form of what it returns."""
    loss: Loss = resolve("loss", name)
    result = loss(context)
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], Tensor) and isinstance(result[1], dict):
        if result[0].shape == context.logprobs_M.shape:
            return result
        got = f"values of shape {tuple(result[0].shape)}"
    else:
        got = f"shape {tuple(result.shape)}" if isinstance(result, Tensor) else type(result).__name__
    raise DataError(
        f'loss "{name}" must return (one value per token, metrics by name): a tensor of shape '
        f"{tuple(context.logprobs_M.shape)} and a dict, got {got}"
    )


def _select(context: LossContext, where: Tensor, rows: Sequence[int], role: str) -> LossContext:
    """The context of some rows alone, renumbered from 0."""
    number_R = torch.zeros(context.rows, dtype=torch.long)
    number_R[list(rows)] = torch.arange(len(rows))
    reference = context.reference_logprobs_M
    return replace(
        context,
        logprobs_M=context.logprobs_M[where],
        old_logprobs_M=context.old_logprobs_M[where],
        sampler_logprobs_M=context.sampler_logprobs_M[where],
        advantages_M=context.advantages_M[where],
        reference_logprobs_M=None if reference is None else reference[where],
        row_M=number_R[context.row_M[where]],
        rows=len(rows),
        algorithm=context.algorithm.for_role(role),
    )
