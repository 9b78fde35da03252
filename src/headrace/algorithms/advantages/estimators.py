"""Advantage estimators: the rewards of groups in, one scalar per trajectory out.

All have the signature `estimator(groups, algorithm)` and see the complete training batch, though most look at one group
at a time. A rollout counts once, however many trajectories of the role it has: means, spreads and counts are over
rollouts, each with the mean reward of its trajectories. A group-relative estimator gives 0 to a group of one rollout:
there is nothing to compare it with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import comb, frexp, isfinite
from statistics import mean

import numpy as np

from headrace.algorithms.facts import estimator
from headrace.config import AlgorithmSection
from headrace.errors import DataError

EPSILON = 1e-6


@dataclass(frozen=True, slots=True)
class GroupRewards:
    """What an estimator sees of one group: per trajectory its reward, its response tokens and its rollout.

    `rollouts` numbers the group's rollouts from 0 in the order in which they come; left out, every trajectory is a
    rollout of its own. Any numbers are accepted; they are renumbered.
    """

    rewards: tuple[float, ...]
    lengths: tuple[int, ...]
    rollouts: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if len(self.rewards) != len(self.lengths):
            raise DataError(f"GroupRewards: {len(self.rewards)} rewards, but {len(self.lengths)} lengths")
        given = self.rollouts or tuple(range(len(self.rewards)))
        if len(given) != len(self.rewards):
            raise DataError(f"GroupRewards: {len(self.rewards)} rewards, but {len(given)} rollouts")
        number = {rollout: position for position, rollout in enumerate(dict.fromkeys(given))}
        object.__setattr__(self, "rollouts", tuple(number[rollout] for rollout in given))

    @property
    def count(self) -> int:
        """Rollouts in the group."""
        return max(self.rollouts, default=-1) + 1

    @property
    def rollout_rewards(self) -> tuple[float, ...]:
        """One reward per rollout: the mean of its trajectories'. Baselines are made of these."""
        members: list[list[float]] = [[] for _ in range(self.count)]
        for rollout, reward in zip(self.rollouts, self.rewards, strict=True):
            members[rollout].append(float(reward))
        return tuple(mean(rewards) if len(rewards) > 1 else rewards[0] for rewards in members)


Estimator = Callable[[Sequence[GroupRewards], AlgorithmSection], list[list[float]]]

group_relative = estimator(group_relative=True)
"""The older way to declare that an estimator compares within a group."""


def grpo(groups: Sequence[GroupRewards], algorithm: AlgorithmSection) -> list[list[float]]:
    """(r - mean) / (std + eps) within the group; without the division when `normalize_by_std` is false (Dr. GRPO)."""

    def advantages(group: GroupRewards) -> np.ndarray:
        unit = _unit([group])
        centred, by_rollout = _centred(group, unit)
        return _in_spreads(centred, by_rollout, unit) if algorithm.normalize_by_std else _rescaled(centred, unit)

    return _per_group(groups, advantages)


def rloo(groups: Sequence[GroupRewards], algorithm: AlgorithmSection) -> list[list[float]]:
    """n / (n - 1) times (r - mean): of a rollout with one trajectory, r - mean of the others in the group."""

    def advantages(group: GroupRewards) -> np.ndarray:
        unit = _unit([group])
        return _rescaled(_centred(group, unit)[0] * (group.count / (group.count - 1)), unit)

    return _per_group(groups, advantages)


def reinforce(groups: Sequence[GroupRewards], algorithm: AlgorithmSection) -> list[list[float]]:
    """The reward itself."""
    return [[float(reward) for reward in group.rewards] for group in groups]


def reinforce_plus_plus_baseline(groups: Sequence[GroupRewards], algorithm: AlgorithmSection) -> list[list[float]]:
    """(r - mean of the group) / (std of all centred rewards of the batch + eps)."""
    unit = _unit(groups)
    # the only trajectories of a group of one rollout may differ from their mean, and still have nothing to compare with
    centred = [_centred(group, unit) if group.count > 1 else _zeros(group) for group in groups]
    spread = np.array([value for _, by_rollout in centred for value in by_rollout])
    return [_in_spreads(values, spread, unit).tolist() for values, _ in centred]


def prpo(groups: Sequence[GroupRewards], algorithm: AlgorithmSection) -> list[list[float]]:
    """(r - mean) / (std + eps) over the complete batch: tasks are compared with each other too."""
    firsts = [0, *np.cumsum([group.count for group in groups]).tolist()]
    rewards = [reward for group in groups for reward in group.rewards]
    rollouts = [first + rollout for first, group in zip(firsts, groups, strict=False) for rollout in group.rollouts]
    batch, unit = GroupRewards(tuple(rewards), (0,) * len(rewards), tuple(rollouts)), _unit(groups)
    advantages = iter(_in_spreads(*_centred(batch, unit), unit).tolist())
    return [[next(advantages) for _ in group.rewards] for group in groups]


def maxrl(groups: Sequence[GroupRewards], algorithm: AlgorithmSection) -> list[list[float]]:
    """(r - mean) / (mean + eps) within the group: the rarer success is, the more it counts."""

    def advantages(group: GroupRewards) -> np.ndarray:
        unit = _unit([group])
        average = float(np.mean(np.array(group.rollout_rewards) / unit))
        if average < 0:  # the division would turn every sign around, and train towards the worst
            raise DataError(
                f"maxrl needs groups whose mean reward is not negative, got {average * unit:g}; "
                f'shift the rewards to begin at 0 or use estimator "grpo"'
            )
        with np.errstate(over="ignore"):
            return _finite(_centred(group, unit)[0] / (average + EPSILON / unit), unit)

    return _per_group(groups, advantages)


def pkpo(groups: Sequence[GroupRewards], algorithm: AlgorithmSection) -> list[list[float]]:
    """Credit for the best of k: the sum over the k-subsets that hold i of their best reward, over C(n, k); centred.

    With k = 1 this is (r - mean) / n. A group of no more than k rollouts has advantage 0: all its members are in the
    same subsets. Credit is a rollout's: its trajectories have the same.
    """

    def advantages(group: GroupRewards) -> np.ndarray:
        if group.count <= algorithm.pass_k:
            return np.zeros(len(group.rewards))
        unit = _unit([group])
        credit = _credit_for_best_of(algorithm.pass_k, np.array(group.rollout_rewards) / unit)
        shifted = credit - credit[:1]
        return _rescaled((shifted - np.mean(shifted))[list(group.rollouts)], unit)

    return _per_group(groups, advantages)


def opo(groups: Sequence[GroupRewards], algorithm: AlgorithmSection) -> list[list[float]]:
    """r - mean of the group weighted by length: the baseline of least variance when gradients grow with length.

    The length of a rollout is the mean of its trajectories'.
    """

    def advantages(group: GroupRewards) -> np.ndarray:
        if not any(group.lengths):
            return np.zeros(len(group.lengths))  # no token to train, and no weights for the mean
        unit = _unit([group])
        shifted = _shifted(group, unit)
        lengths = _by_rollout(np.asarray(group.lengths), group)
        return _rescaled(shifted - np.average(_by_rollout(shifted, group), weights=lengths), unit)

    return _per_group(groups, advantages)


def constant(groups: Sequence[GroupRewards], algorithm: AlgorithmSection) -> list[list[float]]:
    """1 for everything: demonstrations are all to be imitated."""
    return [[1.0] * len(group.rewards) for group in groups]


def _per_group(groups: Sequence[GroupRewards], advantages: Callable[[GroupRewards], np.ndarray]) -> list[list[float]]:
    return [advantages(group).tolist() if group.count > 1 else [0.0] * len(group.rewards) for group in groups]


# ---- means and spreads over rollouts ---------------------------------------------------------------------------------

_LARGE = 2.0**400  # its square, and a sum of very many such, is a float
_NO_SPREAD = 1e-12  # as a share of the largest: rounding


def _unit(groups: Sequence[GroupRewards]) -> float:
    """What to divide rewards by, so that neither their sum nor their squares overflow: a power of two, mostly 1."""
    largest = max((abs(reward) for group in groups for reward in group.rewards), default=0.0)
    return 2.0 ** (frexp(largest)[1] - 1) if isfinite(largest) and largest > _LARGE else 1.0


def _rescaled(values: np.ndarray, unit: float) -> np.ndarray:
    with np.errstate(over="ignore"):
        return _finite(values * unit, unit)


def _finite(values: np.ndarray, unit: float) -> np.ndarray:
    """What is larger than any float becomes the largest."""
    return values if unit == 1.0 else np.clip(values, -np.finfo(np.float64).max, np.finfo(np.float64).max)


def _by_rollout(values: np.ndarray, group: GroupRewards) -> np.ndarray:
    """The mean of each rollout's."""
    if group.count == len(values):
        return values
    return np.bincount(group.rollouts, weights=values) / np.bincount(group.rollouts)


def _shifted(group: GroupRewards, unit: float) -> np.ndarray:
    # by one of them, so that equal rewards become exactly 0 rather than rounding errors
    values = np.asarray(group.rewards, dtype=np.float64) / unit
    return values - values[:1]


def _centred(group: GroupRewards, unit: float) -> tuple[np.ndarray, np.ndarray]:
    """Rewards without the mean over rollouts: of each trajectory, and of each rollout."""
    shifted = _shifted(group, unit)
    by_rollout = _by_rollout(shifted, group)
    average = np.mean(by_rollout) if len(by_rollout) else 0.0
    return shifted - average, by_rollout - average


def _zeros(group: GroupRewards) -> tuple[np.ndarray, np.ndarray]:
    return np.zeros(len(group.rewards)), np.zeros(group.count)


def _in_spreads(centred: np.ndarray, by_rollout: np.ndarray, unit: float) -> np.ndarray:
    """Divided by the population standard deviation of the rollouts plus epsilon.

    0 where all rollouts are equal, though their trajectories may differ: divided by epsilon they would be huge.
    """
    spread = float(np.std(by_rollout)) if len(by_rollout) else 0.0
    if spread <= _NO_SPREAD * float(np.max(np.abs(centred), initial=0.0)):
        return np.zeros(len(centred))
    return centred / (spread + EPSILON / unit)


def _credit_for_best_of(k: int, rewards: np.ndarray) -> np.ndarray:
    """Per rollout, the sum over the k-subsets that hold it of their best reward, divided by C(n, k).

    The worst reward is subtracted first, which lowers every credit by the same. In ascending order the best of a subset
    is its last. The rollout at rank p is the best of C(p, k - 1) subsets: the others have lower ranks. A rollout at a
    higher rank q is the best of C(q - 1, k - 2) subsets that hold p.
    """
    count = len(rewards)
    order = np.argsort(rewards, kind="stable")
    ascending = rewards[order]
    ascending -= ascending[0]
    # integers, divided once: C(n, k) of a large group does not fit a float
    subsets = comb(count, k)
    as_best = np.array([comb(rank, k - 1) / subsets for rank in range(count)])
    as_other = np.array([comb(rank - 1, k - 2) / subsets if rank and k > 1 else 0.0 for rank in range(count)])
    by_later = np.append(np.cumsum((ascending * as_other)[:0:-1])[::-1], 0.0)
    credit = np.empty(count)
    credit[order] = ascending * as_best + by_later
    return credit
