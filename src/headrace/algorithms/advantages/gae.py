"""Generalised advantage estimation, for a backend with a value head."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from headrace.algorithms.advantages.estimators import GroupRewards
from headrace.config import AlgorithmSection


def gae(rewards: ArrayLike, values: ArrayLike, gamma: float, lam: float) -> tuple[np.ndarray, np.ndarray]:
    """Advantages and returns over the trained tokens of one row, in order.

    With V the value before each token, and 0 after the last: delta_t = r_t + gamma V_{t+1} - V_t and
    A_t = delta_t + gamma lam A_{t+1}. Returns are A + V: what the value head is to predict.
    """
    rewards, values = np.asarray(rewards, dtype=np.float64), np.asarray(values, dtype=np.float64)
    # or numpy would stretch one to the other
    assert rewards.ndim == 1 and rewards.shape == values.shape, f"rewards {rewards.shape}, values {values.shape}"
    deltas = rewards + gamma * np.append(values[1:], 0.0) - values if len(values) else rewards
    advantages = np.empty_like(deltas)
    later = 0.0
    for t in reversed(range(len(deltas))):
        later = deltas[t] + gamma * lam * later
        advantages[t] = later
    return advantages, advantages + values


def terminal_reward(groups: Sequence[GroupRewards], algorithm: AlgorithmSection) -> list[list[float]]:
    """Generalised advantage estimation with a value head; until values are known, the reward stands in."""
    return [list(group.rewards) for group in groups]
