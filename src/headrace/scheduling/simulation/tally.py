"""Counters of a simulation, and the metrics computed from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from headrace.config import FleetSection
from headrace.ledger.account import Account
from headrace.scheduling.simulation.fleet import sync_seconds
from headrace.scheduling.simulation.virtual import VirtualGroup


@dataclass(frozen=True, slots=True)
class Outcome:
    """The metrics of one simulation, after its warm-up. Shares and ratios have no unit."""

    steps: int
    warmup: int
    """Steps before that, which do not count."""
    seconds: float
    """On the virtual clock."""
    end_s: float
    """The virtual clock at the end, including the warm-up."""
    groups_per_s: float
    """Groups trained, each counted once."""
    steps_per_s: float
    learner_busy: float
    """Share of the time that the learner is busy."""
    generation_busy: float
    """Running groups as a share of the slots: the mean over time."""
    staleness_mean: float
    """Over trained tokens."""
    staleness_max: int
    ages: tuple[int, ...]
    """How many trained tokens were 0, 1, 2 … versions old."""
    wasted_tokens: float
    """Share of generated tokens that are never trained: masked, stale, failed or filtered."""
    wasted_time: float
    """The same, each token weighted with its share of its group's duration."""
    slow_groups: float
    """Share of slow tasks among trained groups, by their share among those submitted. 1 is no bias."""
    slow_tokens: float
    """The same among trained tokens."""
    duration_bias: float
    """Mean duration of trained groups, by that of those submitted."""
    rows_too_old: float
    """Share of trained rows with a trained token older than the bound."""
    rows_measured: float
    """Share of trained rows that the policy scored. Each costs a forward pass, which is not simulated."""
    rows_too_far: int
    """Rows trained over the divergence bound that the policy reported."""
    lost_nodes: int
    """Nodes that were lost."""
    lost_time: float
    """Group-seconds of groups that began again because their engine was lost, by those of all that ended."""
    sync_s: float
    """Seconds of one weight sync, where simulate.fleet gives its size."""
    trained_tokens_per_s: float
    cost_per_million: float
    """Price of a million trained tokens; 0 without prices."""
    account: Account
    """The account of episodes at the end, including the warm-up."""


@dataclass(slots=True)
class _Work:
    """A sum over groups: all of them, and the slow ones."""

    groups: int = 0
    slow_groups: int = 0
    tokens: float = 0.0
    slow_tokens: float = 0.0
    seconds: float = 0.0

    def add(self, group: VirtualGroup, tokens: float) -> None:
        self.groups += 1
        self.tokens += tokens
        self.seconds += group.seconds
        if group.slow:
            self.slow_groups += 1
            self.slow_tokens += tokens

    @property
    def mean_s(self) -> float:
        return self.seconds / self.groups if self.groups else 0.0


@dataclass(slots=True)
class Tally:
    """Counters of one simulation from `since_s` on. Time is added before the event at its end."""

    since_s: float
    since_step: int
    slots: int
    """Groups that can run at the same time."""
    tokens_per_group: int
    steps: int = 0
    learner_s: float = 0.0
    running_s: float = 0.0
    groups: int = 0
    """Groups that steps took, even if all their tokens were masked."""
    submitted: _Work = field(default_factory=_Work)
    trained: _Work = field(default_factory=_Work)
    wasted_tokens: float = 0.0
    wasted_s: float = 0.0
    ended_s: float = 0.0
    """Group-seconds of all groups in a final state."""
    ages: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    rows: int = 0
    rows_too_old: int = 0
    rows_measured: int = 0
    rows_too_far: int = 0
    lost_nodes: int = 0
    lost_s: float = 0.0

    def time_passed(self, seconds: float, learning: bool, running: int) -> None:
        """Time passed without a change."""
        self.learner_s += seconds * learning
        self.running_s += seconds * running

    def group_submitted(self, group: VirtualGroup) -> None:
        """A group was started."""
        self.submitted.add(group, self.tokens_per_group)

    def group_ended(self, group: VirtualGroup, trained_tokens: int) -> None:
        """A group was trained, in part or not at all."""
        share = trained_tokens / self.tokens_per_group
        self.wasted_tokens += self.tokens_per_group - trained_tokens
        self.wasted_s += group.seconds * (1.0 - share)
        self.ended_s += group.seconds
        if trained_tokens:
            self.trained.add(group, trained_tokens)

    def rows_trained(self, age_BT: np.ndarray, mask_BT: np.ndarray, max_staleness: int, measured: int) -> None:
        """A step trained these rows."""
        counts = np.bincount(age_BT[mask_BT])
        if len(counts) > len(self.ages):
            self.ages = np.pad(self.ages, (0, len(counts) - len(self.ages)))
        self.ages[: len(counts)] += counts
        self.rows += int(mask_BT.any(axis=1).sum())
        self.rows_too_old += int(((age_BT > max_staleness) & mask_BT).any(axis=1).sum())
        self.rows_measured += measured

    def outcome(self, now_s: float, account: Account, fleet: FleetSection = FleetSection()) -> Outcome:  # noqa: B008  # frozen
        """The metrics."""
        seconds = max(now_s - self.since_s, 1e-12)
        tokens_per_s = self.trained.tokens / seconds
        price_per_s = (fleet.engines * fleet.engine_price + fleet.learners * fleet.learner_price) / 3600
        submitted, trained = self.submitted, self.trained
        slow_submitted = _ratio(submitted.slow_groups, submitted.groups)
        ages = self.ages.tolist()
        return Outcome(
            steps=self.steps,
            warmup=self.since_step,
            seconds=seconds,
            end_s=now_s,
            groups_per_s=self.groups / seconds,
            steps_per_s=self.steps / seconds,
            learner_busy=self.learner_s / seconds,
            generation_busy=self.running_s / (seconds * self.slots),
            staleness_mean=_ratio(sum(age * count for age, count in enumerate(ages)), sum(ages)),
            staleness_max=max(len(ages) - 1, 0),
            ages=tuple(ages),
            wasted_tokens=_ratio(self.wasted_tokens, self.wasted_tokens + trained.tokens),
            wasted_time=_ratio(self.wasted_s, self.ended_s),
            slow_groups=_ratio(_ratio(trained.slow_groups, trained.groups), slow_submitted, 1.0),
            slow_tokens=_ratio(_ratio(trained.slow_tokens, trained.tokens), slow_submitted, 1.0),
            duration_bias=_ratio(trained.mean_s, submitted.mean_s, 1.0),
            rows_too_old=_ratio(self.rows_too_old, self.rows),
            rows_measured=_ratio(self.rows_measured, self.rows),
            rows_too_far=self.rows_too_far,
            lost_nodes=self.lost_nodes,
            lost_time=_ratio(self.lost_s, self.lost_s + self.ended_s),
            sync_s=sync_seconds(fleet),
            trained_tokens_per_s=tokens_per_s,
            cost_per_million=1e6 * _ratio(price_per_s, tokens_per_s),
            account=account,
        )


def _ratio(part: float, total: float, otherwise: float = 0.0) -> float:
    return part / total if total else otherwise


def share_over(ages: Sequence[int], bound: int) -> float:
    """Share of the tokens that are older than the bound."""
    return _ratio(sum(ages[bound + 1 :]), sum(ages))
