"""Advantage estimators: the rewards of groups in, one scalar per trajectory out.

All have the signature `estimator(groups, algorithm)` and see the whole training batch, though most look at one group
at a time. A group-relative one gives 0 to a group of one: there is nothing to compare it with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import comb
from typing import Any, TypeVar

import numpy as np

from headrace.config import AlgorithmSection
from headrace.errors import DataError

EPSILON = 1e-6


@dataclass(frozen=True, slots=True)
class GroupRewards:
    """What an estimator sees of one group: per trajectory its reward and its number of response tokens."""

    rewards: tuple[float, ...]
    lengths: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.rewards) != len(self.lengths):
            raise DataError(f"GroupRewards: {len(self.rewards)} rewards, but {len(self.lengths)} lengths")


Estimator = Callable[[Sequence[GroupRewards], AlgorithmSection], list[list[float]]]
E = TypeVar("E", bound=Estimator)


def group_relative(estimator: E) -> E:
    """Mark an estimator that compares within a group, and so has nothing to say about a group of one."""
    marked: Any = estimator
    marked.group_relative = True
    return estimator


def is_group_relative(estimator: Callable[..., Any]) -> bool:
    """Whether the estimator gives 0 to a group of one because it only compares within groups."""
    return getattr(estimator, "group_relative", False)


@group_relative
def grpo(groups: Sequence[GroupRewards], algorithm: AlgorithmSection) -> list[list[float]]:
    """(r - mean) / (std + eps) within the group; without the division when `normalize_by_std` is false (Dr. GRPO)."""

    def advantages(group: GroupRewards) -> np.ndarray:
        centred = _centred(group.rewards)
        return centred / _spread(centred) if algorithm.normalize_by_std else centred

    return _per_group(groups, advantages)


@group_relative
def rloo(groups: Sequence[GroupRewards], algorithm: AlgorithmSection) -> list[list[float]]:
    """r - mean of the others in the group, which is n / (n - 1) times (r - mean)."""

    def advantages(group: GroupRewards) -> np.ndarray:
        count = len(group.rewards)
        return _centred(group.rewards) * (count / (count - 1))

    return _per_group(groups, advantages)


def reinforce(groups: Sequence[GroupRewards], algorithm: AlgorithmSection) -> list[list[float]]:
    """The reward itself."""
    return [[float(reward) for reward in group.rewards] for group in groups]


@group_relative
def reinforce_plus_plus_baseline(groups: Sequence[GroupRewards], algorithm: AlgorithmSection) -> list[list[float]]:
    """(r - mean of the group) / (std of all centred rewards of the batch + eps)."""
    centred = [_centred(group.rewards) for group in groups]
    scale = _spread([value for values in centred for value in values])
    return [(values / scale).tolist() for values in centred]


def prpo(groups: Sequence[GroupRewards], algorithm: AlgorithmSection) -> list[list[float]]:
    """(r - mean) / (std + eps) over the whole batch: tasks are compared with each other too."""
    centred = _centred([reward for group in groups for reward in group.rewards])
    advantages = iter((centred / _spread(centred)).tolist())
    return [[next(advantages) for _ in group.rewards] for group in groups]


@group_relative
def maxrl(groups: Sequence[GroupRewards], algorithm: AlgorithmSection) -> list[list[float]]:
    """(r - mean) / (mean + eps) within the group: the rarer success is, the more it counts."""

    def advantages(group: GroupRewards) -> np.ndarray:
        mean = float(np.mean(group.rewards))
        if mean < 0:  # the division would turn every sign around, and train towards the worst
            raise DataError(
                f"maxrl needs groups whose mean reward is not negative, got {mean:g}; "
                f'shift the rewards to begin at 0 or use estimator "grpo"'
            )
        return _centred(group.rewards) / (mean + EPSILON)

    return _per_group(groups, advantages)


@group_relative
def pkpo(groups: Sequence[GroupRewards], algorithm: AlgorithmSection) -> list[list[float]]:
    """Credit for the best of k: the sum over the k-subsets that hold i of their best reward, over C(n, k); centred.

    With k = 1 this is (r - mean) / n. A group of no more than k has advantage 0: all its members are in the same
    subsets.
    """

    def advantages(group: GroupRewards) -> np.ndarray:
        if len(group.rewards) <= algorithm.pass_k:
            return np.zeros(len(group.rewards))
        return _centred(_credit_for_best_of(algorithm.pass_k, group.rewards))

    return _per_group(groups, advantages)


@group_relative
def opo(groups: Sequence[GroupRewards], algorithm: AlgorithmSection) -> list[list[float]]:
    """r - mean of the group weighted by length: the baseline of least variance when gradients grow with length."""

    def advantages(group: GroupRewards) -> np.ndarray:
        if not any(group.lengths):
            return np.zeros(len(group.lengths))  # no token to train, and no weights for the mean
        shifted = _shifted(group.rewards)
        return shifted - np.average(shifted, weights=group.lengths)

    return _per_group(groups, advantages)


def constant(groups: Sequence[GroupRewards], algorithm: AlgorithmSection) -> list[list[float]]:
    """1 for everything: demonstrations are all to be imitated."""
    return [[1.0] * len(group.rewards) for group in groups]


def _per_group(groups: Sequence[GroupRewards], advantages: Callable[[GroupRewards], np.ndarray]) -> list[list[float]]:
    return [advantages(group).tolist() if len(group.rewards) > 1 else [0.0] * len(group.rewards) for group in groups]


def _shifted(rewards: Sequence[float] | np.ndarray) -> np.ndarray:
    # by one of them, so that equal rewards become exactly 0 rather than rounding errors
    values = np.asarray(rewards, dtype=np.float64)
    return values - values[:1]


def _centred(rewards: Sequence[float] | np.ndarray) -> np.ndarray:
    shifted = _shifted(rewards)
    return shifted - np.mean(shifted) if len(shifted) else shifted


def _spread(values: Sequence[float] | np.ndarray) -> float:
    """What to divide by: population standard deviation (0 of nothing) plus epsilon."""
    return (float(np.std(values)) if len(values) else 0.0) + EPSILON


def _credit_for_best_of(k: int, rewards: Sequence[float]) -> np.ndarray:
    """Per trajectory, the sum over the k-subsets that hold it of their best reward, divided by C(n, k).

    Rewards count from the worst, which takes the same off every credit. In ascending order the best of a subset is its
    last. For the one at place p that is itself in C(p, k - 1) subsets, whose others stand before it, and the one at a
    later place q in C(q - 1, k - 2), whose others stand before q.
    """
    count = len(rewards)
    order = np.argsort(rewards, kind="stable")
    ascending = np.asarray(rewards, dtype=np.float64)[order]
    ascending -= ascending[0]
    # whole numbers, divided once: C(n, k) of a large group does not fit a float
    subsets = comb(count, k)
    as_best = np.array([comb(place, k - 1) / subsets for place in range(count)])
    as_other = np.array([comb(place - 1, k - 2) / subsets if place and k > 1 else 0.0 for place in range(count)])
    by_later = np.append(np.cumsum((ascending * as_other)[:0:-1])[::-1], 0.0)
    credit = np.empty(count)
    credit[order] = ascending * as_best + by_later
    return credit
