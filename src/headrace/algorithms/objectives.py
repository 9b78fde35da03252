"""Objectives: from finished groups to what one optimizer step trains on. The trainer knows none of them by name."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from headrace.algorithms.advantages.assign import assign_advantages, trained_roles
from headrace.algorithms.advantages.gae import gae
from headrace.algorithms.advantages.precomputed import brings_advantages
from headrace.algorithms.batching import grad_scale, pack, split, to_samples
from headrace.algorithms.distill import is_distilled, with_teacher
from headrace.algorithms.preference import form_pairs
from headrace.config import AlgorithmSection, RunConfig
from headrace.config.derived import asks_teacher, group_by_group
from headrace.data.episode import Trajectory, TrajectoryGroup
from headrace.data.sample import NO_VERSION, Sample, TrainBatch, merge_steps
from headrace.data.sampler import TaskSampler
from headrace.data.task import load_tasks
from headrace.errors import BackendError, ConfigError
from headrace.registry import facts
from headrace.tracking.metrics import MetricsAggregator
from headrace.utils.usercode import contained

if TYPE_CHECKING:
    from headrace.backends.base import Backend
    from headrace.rollout.chat import ChatTemplate
    from headrace.scheduling.staleness import StalenessPolicy

IMITATE = AlgorithmSection(loss="cross_entropy")


@dataclass(frozen=True, slots=True)
class Part:
    """One batch of an optimizer step, the settings it is trained by, and the area of its metrics."""

    batch: TrainBatch
    algorithm: AlgorithmSection
    area: str = "policy"


@dataclass(frozen=True, slots=True)
class Prepared:
    """Some groups as a batch; None means that there is nothing to train in them."""

    part: Part | None
    metrics: MetricsAggregator


@dataclass(frozen=True, slots=True)
class Completion:
    """What completes an optimizer step: parts that belong to no group, and the factor of the summed gradient."""

    parts: tuple[Part, ...]
    grad_scale: float


def in_shares(part: Part, shares: int, micro_batch_tokens: int) -> list[Part]:
    """One batch as several, each with an equal share of the rows."""
    batches = split(part.batch, part.algorithm, micro_batch_tokens, shares) if shares > 1 else [part.batch]
    return [replace(part, batch=batch) for batch in batches]


class Objective(Protocol):
    """Turns groups into training batches, asking the backend for whatever log-probabilities it needs.

    Where it `streams`, a step's groups may be prepared piece by piece.
    """

    streams: bool

    async def prepare(self, groups: Sequence[TrajectoryGroup], version: int) -> Prepared:
        """What is trained of groups of a step that is made at `version`."""
        ...

    def complete(self, parts: Sequence[Part], step: int) -> Completion:
        """What completes optimizer step `step` (from 0), now that all its parts are known."""
        ...


class AdvantageObjective:
    """Rewards (or a teacher, or a value head) to advantages to rows. Supervised training is its simplest case.

    `demonstrations`, for a supervised term beside reinforcement learning, replace those that the configuration names.
    """

    def __init__(
        self,
        config: RunConfig,
        backend: Backend,
        chat: ChatTemplate,
        demonstrations: TaskSampler | None = None,
        policy: StalenessPolicy | None = None,
    ) -> None:
        self._config = config
        self._algorithm = config.algorithm
        self._backend = backend
        self._policy = policy
        demonstrations = demonstrations or demonstration_sampler(config)
        self._demonstrations = _Demonstrations(config, chat, demonstrations) if demonstrations else None
        self.streams = _streams(config)

    async def prepare(self, groups: Sequence[TrajectoryGroup], version: int) -> Prepared:
        metrics = MetricsAggregator()
        groups = await self._with_penalty(trained_roles(groups, self._algorithm), metrics)
        samples = await self._within_staleness(await self._rows(groups), version, metrics)
        if not samples:
            return Prepared(None, metrics)
        if self._algorithm.kl.coef and self._algorithm.kl.where == "loss":
            samples = await self._with_reference(samples)
        if self._algorithm.proximal == "recompute" and self._config.trainer.updates_per_batch > 1:
            samples = await self._with_old(samples)
        return Prepared(Part(self._pack(samples), self._algorithm), metrics)

    def complete(self, parts: Sequence[Part], step: int) -> Completion:
        scale = grad_scale([part.batch for part in parts], self._algorithm)
        if self._demonstrations is None:
            return Completion((), scale)
        return Completion((Part(self._demonstrations.batch(step, scale), IMITATE, "sft"),), scale)

    async def _within_staleness(self, samples: list[Sample], version: int, metrics: MetricsAggregator) -> list[Sample]:
        """The rows without the tokens that the staleness policy leaves out."""
        if self._policy is None:
            return [sample for sample in samples if sample.trained_tokens]
        measured = self._policy.to_measure(samples, version)
        scored = await self._backend.compute_logprobs(self._pack([samples[i] for i in measured])) if measured else []
        limited = self._policy.limit(samples, version, dict(zip(measured, scored, strict=True)), metrics)
        return [sample for sample in limited if sample.trained_tokens]

    def _pack(self, samples: Sequence[Sample]) -> TrainBatch:
        apart = self._config.run.deterministic
        return pack(samples, self._algorithm, self._config.backend.micro_batch_tokens, groups_apart=apart)

    async def _rows(self, groups: Sequence[TrajectoryGroup]) -> list[Sample]:
        """Rows with advantages: a teacher's, the workflow's own, the value head's or an estimator's."""
        taught = [group for group in groups if is_distilled(group, self._algorithm)]
        others = [group for group in groups if not is_distilled(group, self._algorithm)]
        with contained("an estimator", self._config.trainer.hook_timeout_s):
            assigned = assign_advantages(others, self._algorithm)
        valued = [self._is_valued(group) for group in others]
        rows = [
            *to_samples(await self._with_teacher(taught)),
            *to_samples([group for group, by_value in zip(assigned, valued, strict=True) if not by_value]),
            *await self._with_values(to_samples([g for g, by_value in zip(assigned, valued, strict=True) if by_value])),
        ]
        return sorted(rows, key=lambda row: row.group_id)

    def _is_rewarded(self, group: TrajectoryGroup) -> bool:
        """Whether the group is trained by its rewards, and not by a teacher or the workflow's own advantages."""
        own = self._algorithm.use_precomputed_advantage and brings_advantages(group)
        return not own and not is_distilled(group, self._algorithm)

    def _is_valued(self, group: TrajectoryGroup) -> bool:
        estimator = facts("estimator", self._algorithm.for_role(group.name).estimator)
        return estimator.needs_value_head and self._is_rewarded(group)

    async def _with_teacher(self, groups: Sequence[TrajectoryGroup]) -> list[TrajectoryGroup]:
        if not groups:
            return []
        steps = [step for group in groups for t in group.trajectories for step in t.steps]
        found = await self._backend.teacher_logprobs(steps)
        if len(found) != len(steps):
            raise BackendError(f"the teacher was asked about {len(steps)} steps and scored {len(found)}")
        scores = {id(step): scored for step, scored in zip(steps, found, strict=True)}
        return [with_teacher(group, scores, self._config.distill) for group in groups]

    async def _with_penalty(
        self, groups: Sequence[TrajectoryGroup], metrics: MetricsAggregator
    ) -> Sequence[TrajectoryGroup]:
        """KL in the reward: its sum over a trajectory's tokens is subtracted before advantages are computed.

        Groups that a teacher or the workflow gives advantages have no reward to subtract it from.
        """
        kl = self._algorithm.kl
        if not (kl.coef and kl.where == "reward"):
            return groups
        divergence = {
            (g, t): 0.0
            for g, group in enumerate(groups)
            if self._is_rewarded(group)
            for t in range(len(group.trajectories))
        }
        if not divergence:
            warnings.warn(
                'algorithm.kl.where is "reward", and no group of the batch is trained by its reward: the teacher or '
                'the workflow gives the advantages; use algorithm.kl.where = "loss"',
                stacklevel=2,
            )
            return groups
        rows = [((g, t), row) for g, t in divergence for row in merge_steps(_plain(groups[g].trajectories[t]))]
        scored = await self._with_reference([row for _, row in rows])
        for (owner, _), row in zip(rows, scored, strict=True):
            divergence[owner] += _divergence(kl.kind, row)
        for value in divergence.values():
            metrics.record("reward/kl_to_reference", value)
        return [
            _penalised(group, [kl.coef * divergence[g, t] for t in range(len(group.trajectories))])
            if self._is_rewarded(group)
            else group
            for g, group in enumerate(groups)
        ]

    async def _with_reference(self, samples: Sequence[Sample]) -> list[Sample]:
        scored = await self._backend.compute_logprobs(self._pack(samples), of="reference")
        return [replace(s, reference_logprobs=tuple(row)) for s, row in zip(samples, scored, strict=True)]

    async def _with_old(self, samples: Sequence[Sample]) -> list[Sample]:
        """With the learner's log-probabilities before the first of several updates, which would change them."""
        scored = await self._backend.compute_logprobs(self._pack(samples))
        return [replace(s, old_logprobs=tuple(row)) for s, row in zip(samples, scored, strict=True)]

    async def _with_values(self, samples: Sequence[Sample]) -> list[Sample]:
        """The rows with advantages and returns from the value head."""
        if not samples:
            return []
        values = await self._backend.compute_values(self._pack(samples))
        return [_with_gae(row, row_values, self._algorithm) for row, row_values in zip(samples, values, strict=True)]


class PreferenceObjective:
    """Pairs of better and worse rollouts, compared with the reference. Advantages play no part."""

    streams = True

    def __init__(
        self,
        config: RunConfig,
        backend: Backend,
        chat: ChatTemplate,
        demonstrations: TaskSampler | None = None,
        policy: StalenessPolicy | None = None,
    ) -> None:
        assert demonstrations is None, "preferences have no supervised term: the start-up rules refuse it"
        self._config = config
        self._algorithm = config.algorithm.model_copy(update={"aggregation": "sequence_mean_token_sum"})
        self._backend = backend
        self._known: dict[tuple[Any, ...], tuple[float, ...]] = {}

    async def prepare(self, groups: Sequence[TrajectoryGroup], version: int) -> Prepared:
        metrics = MetricsAggregator()
        pairs, skipped = form_pairs(groups, self._config.dpo)
        metrics.record("dpo/pairs", len(pairs))
        metrics.record_all(skipped, prefix="dpo/skipped/")
        samples = [sample for pair in pairs for sample in (pair.chosen, pair.rejected)]
        if not samples:
            return Prepared(None, metrics)
        batch = self._pack(await self._with_known_reference(samples))
        return Prepared(Part(batch, self._algorithm), metrics)

    def complete(self, parts: Sequence[Part], step: int) -> Completion:
        return Completion((), grad_scale([part.batch for part in parts], self._algorithm))

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
        apart = self._config.run.deterministic
        return pack(samples, self._algorithm, self._config.backend.micro_batch_tokens, together=2, groups_apart=apart)


def _streams(config: RunConfig) -> bool:
    """Whether the pieces of a batch give the same result as the complete batch."""
    if config.algorithm.use_precomputed_advantage:  # which warns once for a complete batch
        return False
    if config.run.deterministic and asks_teacher(config.algorithm):  # its scores depend, in the last bit, on the pieces
        return False
    return group_by_group(config.algorithm)


def demonstration_sampler(config: RunConfig) -> TaskSampler | None:
    """The demonstrations of the supervised term, batch by batch; None where there is no such term."""
    section = config.sft
    if not section.coef:
        return None
    tasks = load_tasks(section.tasks, **section.args)
    if len(tasks) < section.batch_size:
        raise ConfigError(
            f"sft.batch_size is {section.batch_size}, but {section.tasks} has only {len(tasks)} demonstrations; "
            f"lower it"
        )
    return TaskSampler(tasks, section.batch_size, config.run.seed)


class _Demonstrations:
    """A supervised term beside reinforcement learning: `coef` times the mean cross-entropy of a batch of turns."""

    def __init__(self, config: RunConfig, chat: ChatTemplate, sampler: TaskSampler) -> None:
        self._section = config.sft
        self._budget = config.backend.micro_batch_tokens
        self._chat = chat
        self._sampler = sampler

    def batch(self, step: int, scale: float) -> TrainBatch:
        """The batch of a step, weighted so that `scale`, the factor of the complete gradient, cancels."""
        epoch, index = divmod(step, len(self._sampler))  # a pure function of the step: nothing to checkpoint
        self._sampler.position = (epoch, index * self._section.batch_size)
        samples = [
            sample
            for _, task in self._sampler.next_batch()
            for sample in merge_steps(Trajectory(tuple(self._chat.demonstration(task.messages)), "sft"))
        ]
        tokens = sum(sample.trained_tokens for sample in samples)
        weight = self._section.coef / (tokens * scale)
        return replace(pack(samples, IMITATE, self._budget), weights=(weight,) * len(samples))


def _plain(trajectory: Trajectory) -> Trajectory:
    """Without the workflow's advantages, which are not replaced yet and may be of the wrong length."""
    return replace(trajectory, steps=tuple(replace(step, advantage=None) for step in trajectory.steps))


def _penalised(group: TrajectoryGroup, penalties: Sequence[float]) -> TrajectoryGroup:
    """The group with so much less reward for each trajectory."""
    members = zip(group.trajectories, group.rewards(), penalties, strict=True)
    return replace(group, trajectories=tuple(replace(t, reward=reward - less) for t, reward, less in members))


def _divergence(kind: str, row: Sample) -> float:
    """Sum over the trained tokens of the divergence between sampler and reference; given text has no sampler."""
    assert row.reference_logprobs is not None
    total = 0.0
    for trained, version, ours, theirs in zip(
        row.loss_mask, row.versions, row.logprobs, row.reference_logprobs, strict=True
    ):
        if trained and version != NO_VERSION:
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
