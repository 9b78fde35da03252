"""Advantage estimators: rewards of the groups in, one scalar per trajectory out.

An estimator sees the whole training batch: a list of groups, each a list of rewards. Group-relative ones look at one
group at a time; a group of one has advantage 0 under all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from headrace.config import AlgorithmSection

EPSILON = 1e-6
Rewards = Sequence[Sequence[float]]
Estimator = Callable[[Rewards, AlgorithmSection], list[list[float]]]


def grpo(rewards: Rewards, algorithm: AlgorithmSection) -> list[list[float]]:
    """(r - mean) / (std + eps) within the group; without the division when `normalize_by_std` is false."""
    advantages = []
    for group in rewards:
        # shifted by one of them, so that equal rewards become exactly 0 rather than rounding errors
        shifted = np.asarray(group, dtype=np.float64) - group[0]
        centred = shifted - np.mean(shifted)
        advantages.append((centred / (np.std(shifted) + EPSILON) if algorithm.normalize_by_std else centred).tolist())
    return advantages


def reinforce(rewards: Rewards, algorithm: AlgorithmSection) -> list[list[float]]:
    """The reward itself."""
    return [[float(reward) for reward in group] for group in rewards]


def constant(rewards: Rewards, algorithm: AlgorithmSection) -> list[list[float]]:
    """1 for everything: demonstrations are all to be imitated."""
    return [[1.0] * len(group) for group in rewards]
