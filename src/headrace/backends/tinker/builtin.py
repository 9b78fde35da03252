"""Which of Headrace's losses the service computes by itself, to the same meaning."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from tinker import types

from headrace.backends.tinker.rows import datum
from headrace.config import AlgorithmSection
from headrace.data.sample import Sample, TrainBatch

_BY_NAME: dict[str, types.LossFnType] = {
    "cross_entropy": "cross_entropy",
    "reinforce": "cross_entropy",  # with advantages as weights
    "importance_sampling": "importance_sampling",
    "ppo_clip": "ppo",
    "cispo": "cispo",
}
_CLIPPED = ("ppo_clip", "cispo")


@dataclass(frozen=True, slots=True)
class BuiltIn:
    """A loss of the service, and its settings."""

    loss: str
    name: types.LossFnType
    settings: dict[str, float] = field(default_factory=dict)
    recomputed: bool = False
    """Whether the ratio's denominator is the learner's own, of the start of the batch."""

    def datums(self, samples: Sequence[Sample], weights: Sequence[float], scale: float) -> list[types.Datum]:
        """Rows whose summed loss is `scale` times the sum over tokens of weight times loss."""
        return [self._datum(sample, weight * scale) for sample, weight in zip(samples, weights, strict=True)]

    def _datum(self, sample: Sample, scale: float) -> types.Datum:
        kept = np.asarray(sample.loss_mask, dtype=np.float64) * scale
        if self.loss == "cross_entropy":
            return datum(sample, weights=kept)
        # both the minimum and the clip are of the ratio alone: a positive factor of the advantage is one of the loss
        advantages = np.where(np.asarray(sample.loss_mask) != 0, np.asarray(sample.advantages) * kept, 0.0)
        if self.loss == "reinforce":
            return datum(sample, weights=advantages)
        old = sample.old_logprobs if self.recomputed and sample.old_logprobs is not None else sample.logprobs
        return datum(sample, logprobs=np.where(kept != 0, old, 0.0), advantages=advantages)


def find_builtin(algorithm: AlgorithmSection, samples: Sequence[Sample]) -> BuiltIn | None:
    """The service's own loss for these rows; None if it has none that means exactly the same."""
    names = {algorithm.for_role(sample.role).loss for sample in samples}
    if len(names) != 1 or not names <= _BY_NAME.keys() or _has_more(algorithm):
        return None
    (name,) = names
    if any(sample.temperature != 1.0 or not _is_finite(sample) for sample in samples):
        return None
    recomputed = name in _CLIPPED and algorithm.proximal == "recompute"
    if recomputed and any(sample.old_logprobs is None for sample in samples):
        return None  # the denominator is what this very pass finds
    clips = {"clip_low_threshold": 1 - algorithm.clip_low, "clip_high_threshold": 1 + algorithm.clip_high}
    return BuiltIn(name, _BY_NAME[name], clips if name in _CLIPPED else {}, recomputed)


def _has_more(algorithm: AlgorithmSection) -> bool:
    """Whether anything is put onto the loss that the service does not know."""
    kl_in_loss = bool(algorithm.kl.coef) and algorithm.kl.where == "loss"
    extra = algorithm.dual_clip is not None or bool(algorithm.entropy_coef)
    return kl_in_loss or extra or algorithm.correction.name != "none"


def _is_finite(sample: Sample) -> bool:
    """Whether the service can compute it; our own loss reports values that are not finite, with their samples."""
    return bool(np.isfinite(sample.advantages).all() and np.isfinite(sample.logprobs).all())


def likely_scale(batch: TrainBatch, algorithm: AlgorithmSection) -> float:
    """The normaliser of a step, if this batch is all of it."""
    match algorithm.aggregation:
        case "token_mean":
            return 1.0 / max(sum(sample.trained_tokens for sample in batch.samples), 1)
        case "sequence_mean_token_mean" | "sequence_mean_token_sum":
            return 1.0 / max(batch.sequences, 1)
        case "constant":
            return 1.0 / (max(batch.sequences, 1) * algorithm.aggregation_length)
        case "token_sum":
            return 1.0
