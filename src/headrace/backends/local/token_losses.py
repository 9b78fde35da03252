"""From log-probabilities to the loss of each token: role by role, then corrections, divergence and entropy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import compress

import numpy as np
import torch
from torch import Tensor

from headrace.algorithms.losses import Loss, LossContext, LossMetrics, correction_weights, kl_penalty
from headrace.backends.base import offending_samples
from headrace.backends.local.tokens import TokenTensors, TokenValues
from headrace.config import AlgorithmSection, RunConfig
from headrace.config.derived import chosen
from headrace.data.sample import NO_VERSION, ClipState, Sample, TrainBatch
from headrace.errors import BackendError, DataError, DivergedError
from headrace.models.transfer import download, upload
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
        counts=tuple(tokens.counts),
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
    rejected_R = torch.zeros(context.rows, dtype=torch.bool, device=context.row_M.device)
    if algorithm.correction.name != "none":
        sampler_M = context.sampler_logprobs_M
        # given text has no sampler to correct for, and says nothing about the rest of its row
        old_M = context.old_logprobs_M.where(sampled_M, sampler_M)
        weights_M, more = correction_weights(algorithm.correction, old_M, sampler_M, context.row_M, context.rows)
        loss_M = loss_M * weights_M.where(sampled_M, 1.0)
        loss_metrics |= more
        clip_M = _clip_states(more, clip_M)
        if rejects_rows(algorithm):
            zeros_R = context.row_M.new_zeros(context.rows).index_add(0, context.row_M, (weights_M == 0).long())
            rejected_R = zeros_R > 0
    if algorithm.kl.coef and algorithm.kl.where == "loss":
        if context.reference_logprobs_M is None:
            raise BackendError("algorithm.kl is on, but the samples carry no reference log-probabilities")
        divergence_M = kl_penalty(algorithm.kl.kind, context.logprobs_M, context.reference_logprobs_M)
        loss_M = loss_M + algorithm.kl.coef * divergence_M
        loss_metrics["policy/kl_to_reference"] = divergence_M.detach()
    if algorithm.entropy_coef:
        loss_M = loss_M - algorithm.entropy_coef * entropy_M
    if rejects_rows(algorithm):
        loss_M = without_rejected(loss_M, rejected_R, context.row_M)
        clip_M = clip_M.masked_fill(rejected_R[context.row_M], ClipState.REJECTED)
    return loss_M, loss_metrics, rejected_R, clip_M


def rejects_rows(algorithm: AlgorithmSection) -> bool:
    """Whether the correction may take complete rows out."""
    return facts("correction", algorithm.correction.name).rejects_rows


def without_rejected(loss_M: Tensor, rejected_R: Tensor, row_M: Tensor) -> Tensor:
    """The losses, 0 in rejected rows."""
    return loss_M.masked_fill(rejected_R[row_M], 0.0)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What a micro-batch came to, still on the device."""

    logprobs_M: Tensor
    loss_M: Tensor
    entropy_M: Tensor
    loss_metrics: LossMetrics
    rejected_R: Tensor
    clip_M: Tensor
    rejects: bool
    """Whether a row can be rejected at all: else all tokens count."""


def settle(
    found: MicroBatch,
    tokens: TokenTensors,
    batch: TrainBatch,
    indices: Sequence[int],
    metrics: MetricsAggregator,
    values_by_sample: TokenValues,
) -> list[int]:
    """Bring everything to the host, in one transfer; returns the rejected rows.

    Records metrics, each as its mean, weighed by its values' number, and adds what the samples' tokens came to.
    Raises DivergedError, with the samples that it comes from, for a loss that is not finite.
    """
    row_M, rejected_R = tokens.row_M, found.rejected_R
    bad_R = row_M.new_zeros(len(indices)).index_add(0, row_M, (~torch.isfinite(found.loss_M)).long())
    values = {**found.loss_metrics, "policy/entropy": found.entropy_M}
    values = {key: value.detach() for key, value in values.items() if value.numel()}
    loss_M = found.loss_M.detach()
    kept_M = (~rejected_R[row_M]).to(loss_M.dtype)
    loss = (loss_M * kept_M).sum() / kept_M.sum().clamp(min=1) if found.rejects else loss_M.mean()
    by_token = (found.logprobs_M, found.entropy_M, found.clip_M)
    logprobs_M, entropy_M, clip_M, rejected, bad, kept, loss, *means = download(
        [*by_token, rejected_R, bad_R, kept_M.sum(), loss, *(value.mean() for value in values.values())]
    )
    _require_finite(bad, batch, indices)
    trained = int(kept)
    metrics.record("tokens/trained", trained)
    for (key, value), mean in zip(values.items(), means, strict=True):
        metrics.record(key, float(mean), Reducer.WEIGHTED_MEAN, weight=value.numel())
    if trained and "dpo/loss" not in values:  # dpo reports its loss per pair
        metrics.record("policy/loss", float(loss), Reducer.WEIGHTED_MEAN, weight=trained)
    values_by_sample.add(indices, tokens.counts, logprobs_M, entropy_M, clip_M)
    return [row for row, out in enumerate(rejected.tolist()) if out]


def _require_finite(bad_R: Tensor, batch: TrainBatch, indices: Sequence[int]) -> None:
    bad_rows = [row for row, bad in enumerate(bad_R.tolist()) if bad]
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
        where, selected = _select(context, rows, samples[rows[0]].role)
        part, more = _apply(name, selected)
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
    states_M = kept_M
    for key, state in _CLIP_STATES.items():
        values = loss_metrics.get(key)
        if values is not None and values.shape == states_M.shape:  # a user's loss may report it by row
            states_M = states_M.masked_fill(values != 0, state)
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


def _select(context: LossContext, rows: Sequence[int], role: str) -> tuple[Tensor, LossContext]:
    """Where the tokens of some rows are, and the context of these rows alone, renumbered from 0."""
    assert context.counts is not None, "losses of several roles need the rows' counts"
    row_of = np.repeat(np.arange(context.rows), context.counts)
    number = np.zeros(context.rows, dtype=np.int64)
    number[list(rows)] = np.arange(len(rows))
    where, number_R = upload([np.flatnonzero(np.isin(row_of, rows)), number], context.row_M.device)
    reference = context.reference_logprobs_M
    selected = replace(
        context,
        logprobs_M=context.logprobs_M[where],
        old_logprobs_M=context.old_logprobs_M[where],
        sampler_logprobs_M=context.sampler_logprobs_M[where],
        advantages_M=context.advantages_M[where],
        reference_logprobs_M=None if reference is None else reference[where],
        row_M=number_R[context.row_M[where]],
        rows=len(rows),
        counts=tuple(context.counts[row] for row in rows),
        algorithm=context.algorithm.for_role(role),
    )
    return where, selected
