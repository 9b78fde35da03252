"""Ranks against one learner: cases that the quick and the slow suite share."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from contracts.backend_contract import random_samples
from headrace.algorithms.batching import grad_scale, pack
from headrace.backends.fsdp.group import LearnerGroup
from headrace.backends.fsdp.launching import new_launcher
from headrace.backends.local.learner import Learner
from headrace.config import AlgorithmSection, RunConfig
from headrace.config.loading import build_config
from headrace.data.sample import Sample, TrainBatch
from headrace.registry import builtin

TIGHT = 1e-10
BUDGET = 48  # several micro-batches for every rank, and not equally many


@dataclass(frozen=True)
class Case:
    """A loss with all that changes its gradient."""

    name: str
    algorithm: AlgorithmSection
    sections: dict[str, Any] = field(default_factory=dict)
    together: int = 1

    def config(self, ranks: int = 0) -> RunConfig:
        """Of ranks; 0: of the local learner."""
        backend = {"name": "fsdp", "ranks": ranks} if ranks else {"name": "local"}
        given: dict[str, Any] = {
            "model": {"dtype": "float64", "fast_path": False, **self.sections.get("model", {})},
            "backend": {**backend, "micro_batch_tokens": BUDGET, **(self.sections.get("backend", {}) if ranks else {})},
            "trainer": {"placement": "separate"},
            "optimizer": {"eps": 1e-3, **self.sections.get("optimizer", {})},
            "algorithm": self.sections.get("algorithm", {}),
        }
        return build_config(given)

    def batch(self, seed: int = 0, count: int = 10) -> TrainBatch:
        return pack(self.samples(seed, count), self.algorithm, BUDGET, self.together)

    def samples(self, seed: int, count: int) -> list[Sample]:
        """With what any loss may want: log-probabilities of a reference and of the start of the batch, some returns."""
        rng = random.Random(seed)
        found = []
        for number, sample in enumerate(random_samples(count, 90, seed)):
            near = [-rng.random() * 5 for _ in sample.loss_mask]
            found.append(
                replace(
                    sample,
                    reference_logprobs=tuple(near),
                    old_logprobs=tuple(value + rng.uniform(-0.3, 0.3) for value in near),
                    temperature=1.0 if self.together == 2 else rng.choice([1.0, 0.7]),
                    returns=tuple(rng.random() for _ in near) if self.valued and number < 3 else None,
                )
            )
        return found

    def on(self, **backend: Any) -> Case:
        """The same with other settings of the ranks."""
        return replace(self, sections={**self.sections, "backend": {**self.sections.get("backend", {}), **backend}})

    @property
    def valued(self) -> bool:
        return bool(self.sections.get("algorithm", {}).get("value_head"))


def losses() -> list[Case]:
    """Every loss that there is, with divergence and entropy; then corrections, adapters and the value head."""
    usual = {"kl": {"coef": 0.1, "kind": "k3"}, "entropy_coef": 0.01}
    cases = [
        Case(name, AlgorithmSection.model_validate({"loss": name, **usual}), together=1 + (name == "dpo"))
        for name in builtin("loss")
    ]
    rejecting = {"proximal": "recompute", "correction": {"name": "sequence_mask", "low": 0.2, "high": 50.0}}
    values = {"estimator": "gae", "value_head": True}
    means = AlgorithmSection(loss="ppo_clip", aggregation="sequence_mean_token_mean")
    return [
        *cases,
        Case("rejected", AlgorithmSection.model_validate(rejecting)),
        Case("sequence means", means),
        Case("adapters", AlgorithmSection(loss="ppo_clip"), {"model": {"lora": {"rank": 4}}}),
        Case("value head", AlgorithmSection.model_validate({"loss": "ppo_clip", **values}), {"algorithm": values}),
        Case("checkpointing", AlgorithmSection(), {"backend": {"gradient_checkpointing": True, "logits_chunk": 7}}),
        Case("weight decay", AlgorithmSection(), {"optimizer": {"weight_decay": 0.1, "grad_clip": 0.01}}),
    ]


def new_group(config: RunConfig) -> LearnerGroup:
    section = config.backend
    return LearnerGroup(new_launcher(config), section.micro_batch_tokens, split=section.tensor_parallel)


def new_learner(case: Case) -> Learner:
    torch.set_num_threads(1)
    learner = Learner(case.config())
    spread_weights(learner)
    return learner


@torch.no_grad()
def spread_weights(learner: Learner) -> None:
    """Adapters and value heads begin at 0, where parts of the gradient vanish: move everything trained off it."""
    generator = torch.Generator().manual_seed(7)
    for parameter in learner.modules().parameters():
        if parameter.requires_grad:
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_(0.02 * noise.to(parameter.dtype))


def local_gradient(learner: Learner) -> dict[str, Tensor]:
    return {name: p.grad for name, p in learner.modules().named_parameters() if p.grad is not None}


def difference(one: dict[str, Tensor], two: dict[str, Tensor]) -> float:
    """The largest, relative to the largest entry of its tensor."""
    assert one.keys() == two.keys() and one
    return max(float((one[k] - two[k]).abs().max() / one[k].abs().max().clamp(min=1e-30)) for k in one)


def steps(learner: Learner | LearnerGroup, case: Case, seeds: Sequence[int]) -> list[float]:
    """Optimizer steps on different batches; the norms of their gradients."""
    norms = []
    for seed in seeds:
        batch = case.batch(seed)
        found = learner.forward_backward(batch, case.algorithm)
        scale = grad_scale([replace(batch, rejected=found.rejected)], case.algorithm)
        norms.append(learner.optim_step(1e-3, scale).reduce()["policy/grad_norm"])
    return norms
