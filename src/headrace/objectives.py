"""Objectives: from finished groups to what one optimizer step trains on. The trainer knows none of them by name."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from headrace.advantage.assign import assign_advantages, trained_roles
from headrace.advantage.distill import is_distilled, with_teacher
from headrace.advantage.gae import gae
from headrace.advantage.preference import form_pairs
from headrace.agents.chat import ChatTemplate
from headrace.backends.base import Backend
from headrace.config import AlgorithmSection, RunConfig
from headrace.data.episode import Trajectory, TrajectoryGroup
from headrace.data.sample import NO_VERSION, Sample, TrainBatch, merge_steps
from headrace.data.sampler import TaskSampler
from headrace.data.task import load_tasks
from headrace.metrics import MetricsAggregator, Reducer
from headrace.pipeline.batcher import grad_scale, pack, to_samples

IMITATE = AlgorithmSection(loss="cross_entropy")


@dataclass(frozen=True, slots=True)
class Prepared:
    """Batches of one optimizer step with the settings each is trained by; none means that there is nothing to train."""

    parts: tuple[tuple[TrainBatch, AlgorithmSection], ...]
    grad_scale: float
    metrics: MetricsAggregator


class Objective(Protocol):
    """Turns groups into training batches, asking the backend for whatever log-probabilities it needs."""

    async def prepare(self, groups: Sequence[TrajectoryGroup], step: int) -> Prepared:
        """What optimizer step `step` (from 0) trains on."""
        ...


class AdvantageObjective:
    """Rewards (or a teacher, or a value head) to advantages to rows. Supervised training is its simplest case."""

    def __init__(self, config: RunConfig, backend: Backend, chat: ChatTemplate) -> None:
        self._config = config
        self._algorithm = config.algorithm
        self._backend = backend
        self._demonstrations = _Demonstrations(config, chat) if config.sft.coef else None

    async def prepare(self, groups: Sequence[TrajectoryGroup], step: int) -> Prepared:
        metrics = MetricsAggregator()
        groups = await self._with_penalty(trained_roles(groups, self._algorithm), metrics)
        samples = to_samples(await self._with_advantages(groups))
        samples = await self._with_values(samples)
        if not samples:
            return Prepared((), 1.0, metrics)
        if self._algorithm.kl.coef and self._algorithm.kl.where == "loss":
            samples = await self._with_reference(samples)
        batch = self._pack(samples)
        scale = grad_scale([batch], self._algorithm)
        parts = [(batch, self._algorithm)]
        if self._demonstrations is not None:
            parts.append((self._demonstrations.batch(step, scale), IMITATE))
        return Prepared(tuple(parts), scale, metrics)

    def _pack(self, samples: Sequence[Sample]) -> TrainBatch:
        return pack(samples, self._algorithm, self._config.backend.micro_batch_tokens)

    async def _with_advantages(self, groups: Sequence[TrajectoryGroup]) -> list[TrajectoryGroup]:
        """Distilled groups get theirs from the teacher, all others from their estimators."""
        taught = [group for group in groups if is_distilled(group, self._algorithm)]
        others = [group for group in groups if not is_distilled(group, self._algorithm)]
        if taught:
            steps = [step for group in taught for t in group.trajectories for step in t.steps]
            found = await self._backend.teacher_logprobs(steps)
            scores = {id(step): scored for step, scored in zip(steps, found, strict=True)}
            taught = [with_teacher(group, scores, self._config.distill) for group in taught]
        return [*taught, *assign_advantages(others, self._algorithm)]

    async def _with_penalty(
        self, groups: Sequence[TrajectoryGroup], metrics: MetricsAggregator
    ) -> Sequence[TrajectoryGroup]:
        """KL in the reward: its sum over a trajectory's tokens is taken off before advantages are computed."""
        kl = self._algorithm.kl
        if not (kl.coef and kl.where == "reward"):
            return groups
        owners = [(g, t) for g, group in enumerate(groups) for t in range(len(group.trajectories))]
        rows = [(owner, row) for owner in owners for row in merge_steps(groups[owner[0]].trajectories[owner[1]])]
        scored = await self._with_reference([row for _, row in rows])
        divergence = dict.fromkeys(owners, 0.0)
        for (owner, _), row in zip(rows, scored, strict=True):
            divergence[owner] += _divergence(kl.kind, row)
        for value in divergence.values():
            metrics.record("policy/kl_to_reference", value, Reducer.MEAN)
        return [
            replace(
                group,
                trajectories=tuple(
                    replace(trajectory, reward=reward - kl.coef * divergence[g, t])
                    for t, (trajectory, reward) in enumerate(zip(group.trajectories, group.rewards(), strict=True))
                ),
            )
            for g, group in enumerate(groups)
        ]

    async def _with_reference(self, samples: Sequence[Sample]) -> list[Sample]:
        scored = await self._backend.compute_logprobs(self._pack(samples), of="reference")
        return [replace(s, reference_logprobs=tuple(row)) for s, row in zip(samples, scored, strict=True)]

    async def _with_values(self, samples: Sequence[Sample]) -> list[Sample]:
        """Rows of roles under gae get advantages and returns from the value head."""
        chosen = [i for i, s in enumerate(samples) if self._algorithm.for_role(s.role).estimator == "gae"]
        found = list(samples)
        if chosen:
            values = await self._backend.compute_values(self._pack([samples[i] for i in chosen]))
            for index, row_values in zip(chosen, values, strict=True):
                found[index] = _with_gae(samples[index], row_values, self._algorithm)
        return found


class PreferenceObjective:
    """Pairs of better and worse rollouts, compared with the reference. Advantages play no part."""

    def __init__(self, config: RunConfig, backend: Backend, chat: ChatTemplate) -> None:
        self._config = config
        self._algorithm = config.algorithm.model_copy(update={"aggregation": "sequence_mean_token_sum"})
        self._backend = backend
        self._known: dict[tuple[Any, ...], tuple[float, ...]] = {}

    async def prepare(self, groups: Sequence[TrajectoryGroup], step: int) -> Prepared:
        metrics = MetricsAggregator()
        pairs, skipped = form_pairs(groups, self._config.dpo)
        metrics.record("dpo/pairs", len(pairs), Reducer.SUM)
        metrics.record_all(skipped, Reducer.SUM, prefix="dpo/skipped/")
        samples = [sample for pair in pairs for sample in (pair.chosen, pair.rejected)]
        if not samples:
            return Prepared((), 1.0, metrics)
        batch = self._pack(await self._with_known_reference(samples))
        return Prepared(((batch, self._algorithm),), grad_scale([batch], self._algorithm), metrics)

    async def _with_known_reference(self, samples: Sequence[Sample]) -> list[Sample]:
        """The reference never changes: a pair of a file that comes again in a later epoch is not scored again."""
        new = [sample for sample in samples if sample.tokens not in self._known]
        scores = dict(self._known)
        if new:
            batch = pack(new, self._algorithm, self._config.backend.micro_batch_tokens)
            found = await self._backend.compute_logprobs(batch, of="reference")
            scores |= {sample.tokens: tuple(row) for sample, row in zip(new, found, strict=True)}
        # a sampled row hardly ever comes again; only what was read from a file is worth keeping
        self._known |= {s.tokens: scores[s.tokens] for s in new if all(v == NO_VERSION for v in s.versions)}
        return [replace(sample, reference_logprobs=scores[sample.tokens]) for sample in samples]

    def _pack(self, samples: Sequence[Sample]) -> TrainBatch:
        return pack(samples, self._algorithm, self._config.backend.micro_batch_tokens, together=2)


class _Demonstrations:
    """A supervised term beside reinforcement learning: `coef` times the mean cross-entropy of a batch of turns."""

    def __init__(self, config: RunConfig, chat: ChatTemplate) -> None:
        section = config.sft
        self._section = section
        self._budget = config.backend.micro_batch_tokens
        self._chat = chat
        self._sampler = TaskSampler(
            load_tasks(section.tasks, **section.args), section.batch_size, config.run.seed, drop_last=True
        )

    def batch(self, step: int, scale: float) -> TrainBatch:
        """The batch of a step, weighted so that `scale`, which the whole gradient is multiplied with, cancels."""
        epoch, index = divmod(step, len(self._sampler))  # a pure function of the step: nothing to checkpoint
        self._sampler.position = (epoch, index * self._section.batch_size)
        samples = [
            sample
            for task in self._sampler.next_batch()
            for sample in merge_steps(Trajectory(tuple(self._chat.demonstration(task.messages)), "sft"))
        ]
        tokens = sum(sample.trained_tokens for sample in samples)
        weight = self._section.coef / (tokens * scale)
        return replace(pack(samples, IMITATE, self._budget), weights=(weight,) * len(samples))


def _divergence(kind: str, row: Sample) -> float:
    """Sum over the trained tokens of the divergence between sampler and reference."""
    assert row.reference_logprobs is not None
    total = 0.0
    for trained, ours, theirs in zip(row.loss_mask, row.logprobs, row.reference_logprobs, strict=True):
        if trained:
            d = ours - theirs
            total += {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d, "abs": abs(d)}[kind]
    return total


def _with_gae(sample: Sample, values: Sequence[float], algorithm: AlgorithmSection) -> Sample:
    """The row with advantages and returns; its trajectory's reward comes with the last trained token."""
    where = [i for i, trained in enumerate(sample.loss_mask) if trained]
    rewards = [0.0] * (len(where) - 1) + [sample.reward or 0.0]
    found = gae(rewards, [values[i] for i in where], algorithm.gamma, algorithm.gae_lambda)
    advantages, returns = ([0.0] * len(sample.loss_mask) for _ in range(2))
    for i, advantage, value in zip(where, *found, strict=True):
        advantages[i], returns[i] = float(advantage), float(value)
    return replace(sample, advantages=tuple(advantages), returns=tuple(returns))
