"""Metrics of a training batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain, compress
from statistics import fmean, mean, pstdev

from headrace.algorithms.filters import is_uniform
from headrace.config import AlgorithmSection
from headrace.data.episode import TrajectoryGroup
from headrace.data.sample import NO_VERSION, Sample
from headrace.scheduling.buffer import FinishedGroup
from headrace.tracking.metrics import MetricsAggregator


def batch_metrics(finished: Sequence[FinishedGroup], samples: Sequence[Sample], version: int) -> MetricsAggregator:
    """Rewards, lengths, staleness and the episode metrics of users."""
    metrics = MetricsAggregator()
    episodes = [episode for item in finished for episode in item.episodes if not episode.failed]
    groups = [group for item in finished for group in item.groups if group.has_rewards and _is_sampled(group)]
    rewards = [reward for group in groups for reward in group.rewards()]
    if rewards:
        metrics.record("reward/mean", _mean(rewards))
        metrics.record("reward/std", pstdev(rewards))
        metrics.record("reward/uniform_groups", fmean(is_uniform(group) for group in groups))
    names = {group.name for group in groups}
    for group in groups if len(names) > 1 else ():
        for reward in group.rewards():
            metrics.record(f"reward/{group.name}/mean", reward)
    for episode in episodes:
        metrics.record("tokens/generated", episode.generated_tokens)
        metrics.record("response/length_mean", episode.response_tokens)
        metrics.record("response/cut_share", episode.termination == "length")
        metrics.record_all(episode.metrics, prefix="episode/")
    versions = Counter(chain.from_iterable(compress(sample.versions, sample.loss_mask) for sample in samples))
    del versions[NO_VERSION]
    if versions:
        average = sum(sampled * tokens for sampled, tokens in versions.items()) / versions.total()
        metrics.record("staleness/max", version - min(versions))
        metrics.record("staleness/mean", version - average)
    failed = sum(item.failed for item in finished)
    if failed:
        metrics.record("batch/failed", failed)
    metrics.record("batch/rows", len(samples))
    metrics.record("batch/tokens", sum(len(sample.tokens) for sample in samples))
    return metrics


class RewardsBeforeFilters:
    """The rewards of all complete groups: `reward/mean` without filters."""

    def __init__(self, algorithm: AlgorithmSection) -> None:
        self._algorithm = algorithm
        self._rewards: list[float] = []

    def add(self, group: FinishedGroup) -> None:
        """Add a complete group, dropped or not. Failed episodes have no reward."""
        self._rewards += [
            trajectory.final_reward
            for episode in group.episodes
            if not episode.failed
            for trajectory in episode.trajectories
            if trajectory.final_reward is not None
            and self._algorithm.trains(trajectory.name)
            and any(step.versions is not None for step in trajectory.steps)
        ]

    def metrics(self) -> MetricsAggregator:
        """Of the groups added since the last call."""
        metrics, rewards = MetricsAggregator(), self._rewards
        self._rewards = []
        if rewards:
            metrics.record("reward/before_filters/mean", _mean(rewards))
        return metrics


def _mean(values: Sequence[float]) -> float:
    try:
        return fmean(values)
    except OverflowError:  # the sum overflows, the mean does not
        return mean(values)


def _is_sampled(group: TrajectoryGroup) -> bool:
    """Whether the policy sampled any of it; rewards of demonstrations and given pairs say nothing about the policy."""
    return any(step.versions is not None for trajectory in group.trajectories for step in trajectory.steps)
