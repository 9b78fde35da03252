"""Facts about every algorithm, declared once: start-up rules, objectives, `headrace algorithms` and the docs read them.

This module imports nothing, so that settings can be checked before torch is loaded. The configuration is a layer below
and reads it by name, with `registry.facts`. Estimators and losses of your own declare theirs with the decorators here:

    from headrace.algorithms.facts import estimator, loss


    @estimator(group_relative=True, one_group=True)
    def above_median(groups, algorithm): ...


    @loss(ratio="sampler")
    def bounded(context): ...

One that declares nothing counts as `EstimatorFacts()` or `LossFacts()`. Whatever it declares, it may read any setting.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

F = TypeVar("F", bound=Callable[..., Any])
Ratio = Literal["old", "sampler"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimatorFacts:
    """What an advantage estimator reads and needs."""

    group_relative: bool = False
    """Compares the rollouts of a group: a group of one has advantage 0."""
    one_group: bool = False
    """Looks at one group at a time, so that groups can be trained as soon as they are complete (`trainer.stream`)."""
    reads_rewards: bool = True
    needs_value_head: bool = False
    needs_teacher: bool = False
    settings: tuple[str, ...] = ()
    """Keys of [algorithm] that it reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossFacts:
    """What a policy loss reads and needs."""

    ratio: Ratio | None = "old"
    """What the policy's probability is divided by: the one at the start of the batch (see `algorithm.proximal`) or the
    sampler's. None: no ratio, so it needs no sampler, and does not correct for tokens of another policy."""
    needs_pairs: bool = False
    needs_reference: bool = False
    settings: tuple[str, ...] = ()
    """Keys of [algorithm] that it reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectionFacts:
    """What a correction does to tokens, and which keys of [algorithm.correction] it reads."""

    summary: str
    masks: bool = True
    """Gives some tokens weight 0."""
    rejects_rows: bool = False
    """Takes complete rows out of the step: out of the loss and out of its normaliser."""
    settings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class KlFacts:
    """An estimate of the divergence from the reference, with d = log policy - log reference."""

    summary: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveFacts:
    """What an objective trains on, and what it settles."""

    summary: str
    estimator: str | None = None
    """The estimator that it always uses; None: `algorithm.estimator`, if it uses one."""
    loss: str | None = None
    """The loss that it always uses; None: `algorithm.loss`."""
    needs_reference: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendFacts:
    """What a backend can do of what algorithms need."""

    value_head: bool


Facts = EstimatorFacts | LossFacts | CorrectionFacts | KlFacts | ObjectiveFacts | BackendFacts

_CLIP = ("clip_low", "clip_high")

ESTIMATORS: Mapping[str, EstimatorFacts] = {
    "grpo": EstimatorFacts(group_relative=True, one_group=True, settings=("normalize_by_std",)),
    "rloo": EstimatorFacts(group_relative=True, one_group=True),
    "reinforce": EstimatorFacts(one_group=True),
    "reinforce_plus_plus_baseline": EstimatorFacts(group_relative=True),
    "prpo": EstimatorFacts(),
    "maxrl": EstimatorFacts(group_relative=True, one_group=True),
    "pkpo": EstimatorFacts(group_relative=True, one_group=True, settings=("pass_k",)),
    "opo": EstimatorFacts(group_relative=True, one_group=True),
    "gae": EstimatorFacts(
        one_group=True, needs_value_head=True, settings=("gamma", "gae_lambda", "value_head", "value_coef")
    ),
    "distill": EstimatorFacts(one_group=True, reads_rewards=False, needs_teacher=True),
    "constant": EstimatorFacts(one_group=True, reads_rewards=False),
}

LOSSES: Mapping[str, LossFacts] = {
    "ppo_clip": LossFacts(settings=(*_CLIP, "dual_clip")),
    "gspo": LossFacts(settings=(*_CLIP, "dual_clip")),
    "cispo": LossFacts(settings=_CLIP),
    "importance_sampling": LossFacts(ratio="sampler"),
    "reinforce": LossFacts(ratio=None),
    "dppo_tv": LossFacts(ratio="sampler", settings=("dppo_delta",)),
    "dppo_kl": LossFacts(ratio="sampler", settings=("dppo_delta",)),
    "cross_entropy": LossFacts(ratio=None),
    "dpo": LossFacts(ratio=None, needs_pairs=True, needs_reference=True),
}

CORRECTIONS: Mapping[str, CorrectionFacts] = {
    "none": CorrectionFacts(summary="Trust the sampler's log-probabilities.", masks=False),
    "tis": CorrectionFacts(
        summary="Weigh tokens or sequences by learner / sampler, clamped.",
        masks=False,
        settings=("level", "low", "high"),
    ),
    "icepop": CorrectionFacts(
        summary="Weigh tokens by learner / sampler, and drop those outside the bounds.", settings=("low", "high")
    ),
    "sequence_mask": CorrectionFacts(
        summary="Drop sequences whose mean weight is outside the bounds.", rejects_rows=True, settings=("low", "high")
    ),
    "veto": CorrectionFacts(
        summary="Drop sequences with a token whose weight is below the floor.", rejects_rows=True, settings=("floor",)
    ),
}

KLS: Mapping[str, KlFacts] = {
    "k1": KlFacts(summary="d = log policy - log reference."),
    "k2": KlFacts(summary="d² / 2: low variance, biased."),
    "k3": KlFacts(summary="exp(-d) - 1 + d: low variance, never negative."),
    "abs": KlFacts(summary="|d|."),
}

OBJECTIVES: Mapping[str, ObjectiveFacts] = {
    "rl": ObjectiveFacts(summary="Train on rollouts by advantages."),
    "sft": ObjectiveFacts(
        summary="Imitate the assistant turns of given conversations.", estimator="constant", loss="cross_entropy"
    ),
    "dpo": ObjectiveFacts(
        summary="Prefer the better of two rollouts, or of two given replies.", loss="dpo", needs_reference=True
    ),
}

BACKENDS: Mapping[str, BackendFacts] = {
    "local": BackendFacts(value_head=True),
    "fsdp": BackendFacts(value_head=True),
    "tinker": BackendFacts(value_head=False),
    "verl": BackendFacts(value_head=False),
}

FACTS: Mapping[str, Mapping[str, Facts]] = {
    "estimator": ESTIMATORS,
    "loss": LOSSES,
    "correction": CORRECTIONS,
    "kl": KLS,
    "objective": OBJECTIVES,
    "backend": BACKENDS,
}
"""By kind, what is declared of everything that Headrace brings."""

UNDECLARED: Mapping[str, Facts] = {"estimator": EstimatorFacts(), "loss": LossFacts()}
"""By kind, what counts for one of your own that declares nothing."""


# ---- for your own ---------------------------------------------------------------------------------------------------


def estimator(*, group_relative: bool = False, one_group: bool = False) -> Callable[[F], F]:
    """Declare facts about an estimator of your own: see EstimatorFacts."""
    return lambda function: _declared(function, EstimatorFacts(group_relative=group_relative, one_group=one_group))


def loss(*, ratio: Ratio | None) -> Callable[[F], F]:
    """Declare facts about a loss of your own: see LossFacts."""
    return lambda function: _declared(function, LossFacts(ratio=ratio))


def _declared(function: F, facts: Facts) -> F:
    marked: Any = function
    marked.facts = facts
    return function
