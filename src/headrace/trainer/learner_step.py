"""LearnerStep: complete groups become one optimizer step (or several), in one piece or in several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from headrace.algorithms.batching import rows_of_shares
from headrace.algorithms.learning_rate import learning_rate
from headrace.algorithms.objectives import Objective, Part, in_shares
from headrace.backends.base import Backend
from headrace.config import RunConfig
from headrace.config.derived import sampler_kind
from headrace.data.sample import LearnedShare, TrainBatch
from headrace.scheduling.batch_metrics import batch_metrics
from headrace.scheduling.buffer import FinishedGroup
from headrace.scheduling.staleness import StalenessPolicy
from headrace.tracking.metrics import MetricsAggregator
from headrace.trainer.drift import drift_metrics


class LearnerStep:
    """Drives the backend. Gradients are sums, and their normaliser comes last: so pieces add up."""

    def __init__(self, config: RunConfig, backend: Backend, objective: Objective, policy: StalenessPolicy) -> None:
        self._config = config
        self._backend = backend
        self._objective = objective
        self._policy = policy
        self._updates = config.trainer.updates_per_batch
        self._sampler = sampler_kind(config)
        self.streams = objective.streams and self._updates == 1 and not config.filters.min_partial_tasks
        self.roles: set[str] = set()
        """Roles of all trajectories that came so far, trained or not."""
        self.begin(0)

    def begin(self, version: int) -> None:
        """A new step, made at `version`."""
        self._version = version
        self._parts: list[Part] = []
        self._finished: list[FinishedGroup] = []
        self.shares: list[LearnedShare] = []
        """What was learned of the batch's rows with several updates; with one, `batches` have it."""
        self.metrics = MetricsAggregator()

    async def learn(self, finished: Sequence[FinishedGroup], again: Sequence[FinishedGroup] = ()) -> None:
        """Add some groups to the step, and some that were trained before: those are reported only once."""
        groups = [group for item in (*finished, *again) for group in item.groups]
        prepared = await self._objective.prepare(groups, self._version)
        self.metrics.merge(prepared.metrics)
        self._finished += finished
        self.roles |= {trajectory.name for item in finished for e in item.episodes for trajectory in e.trajectories}
        if self._config.produce.reuse > 1:
            self.metrics.record("episodes/reused", sum(group.kept for group in again))
        if prepared.part is not None:
            self._parts.append(prepared.part)
            if self._updates == 1:
                self._parts[-1] = await self._forward_backward(prepared.part)

    @property
    def has_something(self) -> bool:
        """Whether there is anything to train in what was added."""
        return bool(self._parts)

    @property
    def batches(self) -> tuple[TrainBatch, ...]:
        """The rows of all that was added, without those that belong to no group."""
        return tuple(part.batch for part in self._parts)

    async def update(self, step: int) -> int:
        """Apply what was learned to the weights; the optimizer steps made, after `step` of them."""
        if self._updates == 1:
            completion = self._objective.complete(self._parts, step)
            for part in completion.parts:
                await self._forward_backward(part)
            await self._optim_step(step + 1, completion.grad_scale)
            made = 1
        else:
            made = await self._several_updates(step)
        await self._refresh_teacher()
        samples = [sample for part in self._parts for sample in part.batch.samples]
        self.metrics.merge(batch_metrics(self._finished, samples, self._version))
        return made

    async def _refresh_teacher(self) -> None:
        """The teacher becomes the policy at every Nth version."""
        every, version = self._config.distill.refresh_every, self._version + 1
        if every and version % every == 0:
            await self._backend.refresh_teacher()

    async def _several_updates(self, step: int) -> int:
        (whole,) = self._parts  # a supervised term beside it is refused at start-up
        shares = min(self._updates, self._config.trainer.steps - step)
        parts = in_shares(whole, shares, self._config.backend.micro_batch_tokens)
        places = rows_of_shares(whole.batch, shares)
        for made, part in enumerate(parts):
            trained = await self._forward_backward(part, updated=made > 0)
            self.shares.append(LearnedShare(tuple(places[made]), trained.batch))
            await self._optim_step(step + made + 1, self._objective.complete([trained], step).grad_scale)
        return len(parts)

    async def _forward_backward(self, part: Part, updated: bool = False) -> Part:
        """Learn from a part. It comes back with what was learned, and rejected, which the normaliser must know."""
        trained = await self._backend.forward_backward(part.batch, part.algorithm)
        self.metrics.merge(trained.metrics.renamed("policy/", f"{part.area}/"))
        samples = part.batch.samples
        drift = drift_metrics(samples, trained.logprobs, self._version, updated, self._sampler, trained.entropies)
        self.metrics.merge(drift.renamed("policy/", f"{part.area}/"))
        if not updated:
            self._policy.observe(samples, trained.logprobs, self._version)
        return replace(part, batch=replace(part.batch, rejected=trained.rejected, learned=trained.learned))

    async def _optim_step(self, step: int, grad_scale: float) -> None:
        rate = learning_rate(step, self._config.trainer.steps, self._config.optimizer)
        self.metrics.merge(await self._backend.optim_step(rate, grad_scale))
