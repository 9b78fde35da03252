"""Losses computed here, on log-probabilities that the service returned: their gradient goes back as weights.

The service's cross-entropy is -Σ w log π. With w = -dL/d(log π), its gradient is that of any loss L of
log-probabilities.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from tinker import types
from torch import Tensor

from headrace.backends.local.token_losses import MicroBatch, loss_context, rejects_rows, settle, token_losses
from headrace.backends.local.tokens import TokenTensors, TokenValues
from headrace.backends.tinker.rows import datum, wide_datum
from headrace.config import AlgorithmSection
from headrace.data.sample import Sample, TrainBatch
from headrace.errors import BackendError
from headrace.tracking.metrics import MetricsAggregator


@dataclass(frozen=True, slots=True)
class RowGradient:
    """dL/d(log π) of one row's targets, [T] or [T, V]; `sent` is the factor with which the service has it already."""

    sample: Sample
    gradient: np.ndarray
    sent: float = 0.0

    def datum(self, scale: float) -> types.Datum:
        """What adds the rest of `scale` times the gradient."""
        weights = -self.gradient * (scale - self.sent)
        if weights.ndim == 2:
            return wide_datum(self.sample, weights.shape[1], weights)
        return datum(self.sample, weights=weights)

    def digest(self) -> str:
        """Of what is learned from the row."""
        made = hashlib.blake2b(np.asarray(self.sample.tokens, dtype=np.int64).tobytes(), digest_size=16)
        made.update(self.gradient.astype(np.float32).tobytes())
        return made.hexdigest()


@dataclass(frozen=True, slots=True)
class Learned:
    """What one micro-batch comes to: a gradient per row, and rejected rows."""

    rows: list[RowGradient]
    rejected: list[int]
    """Indices into the batch."""


def learn(
    batch: TrainBatch,
    indices: Sequence[int],
    returned: Sequence[Tensor],
    algorithm: AlgorithmSection,
    dpo_beta: float,
    metrics: MetricsAggregator,
    found: TokenValues,
    sent: float = 0.0,
) -> Learned:
    """Losses of a micro-batch by the local backend's functions; metrics into `metrics`, values into `found`."""
    samples = [batch.samples[i] for i in indices]
    tokens = TokenTensors(samples, [batch.weights[i] for i in indices], torch.float64)
    leaves = [one.clone().requires_grad_() for one in returned]
    logprobs_M, entropy_M = _of_trained(samples, leaves, tokens.where_M)
    context = loss_context(tokens, logprobs_M, algorithm, dpo_beta)
    loss_M, loss_metrics, rejected_R, clip_M = token_losses(context, samples, entropy_M, tokens.sampled_M)
    (loss_M * tokens.weights_M).sum().backward()
    came_to = MicroBatch(logprobs_M, loss_M, entropy_M, loss_metrics, rejected_R, clip_M, rejects_rows(algorithm))
    rejected = settle(came_to, tokens, batch, indices, metrics, found)
    gradients = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
    rows = [RowGradient(s, g.numpy(), sent) for s, g in zip(samples, gradients, strict=True)]
    return Learned(rows, [indices[row] for row in rejected])


def _of_trained(samples: Sequence[Sample], leaves: Sequence[Tensor], where_M: Tensor) -> tuple[Tensor, Tensor]:
    """(log-probability, entropy) of the trained targets; no entropy where only the targets' own are known."""
    if leaves[0].ndim == 1:
        return torch.cat(list(leaves))[where_M], torch.empty(0, dtype=torch.float64)
    pairs = [at_temperature(leaf, sample) for leaf, sample in zip(leaves, samples, strict=True)]
    return torch.cat([p[0] for p in pairs])[where_M], torch.cat([p[1] for p in pairs])[where_M]


def at_temperature(logprobs_TV: Tensor, sample: Sample) -> tuple[Tensor, Tensor]:
    """(log-probability of the row's targets, entropy) at the sample's temperature, from whole distributions."""
    mass_T = logprobs_TV.detach().exp().sum(-1)
    if bool((mass_T - 1).abs().max() > 1e-3):
        raise BackendError(
            f"the probabilities of tokens 0 to {logprobs_TV.shape[1] - 1} sum to {float(mass_T.min()):.4f}, not to 1; "
            f"set tinker.vocabulary to what the model has"
        )
    heated_TV = torch.log_softmax(logprobs_TV / sample.temperature, -1)
    targets_T1 = torch.tensor(sample.tokens[1:])[:, None]
    return heated_TV.gather(1, targets_T1).squeeze(1), -(heated_TV.exp() * heated_TV).sum(1)
