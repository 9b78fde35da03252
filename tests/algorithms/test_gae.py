"""Generalised advantage estimation against its definition."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes import examples
from headrace.algorithms.advantages.gae import gae

numbers = st.floats(-10, 10)
rows = st.lists(st.tuples(numbers, numbers), min_size=1, max_size=12)
shares = st.floats(0, 1)


def by_definition(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """A_t as the sum over all later deltas, each written out."""
    after = [*values[1:], 0.0]
    advantages = []
    for t in range(len(rewards)):
        total = 0.0
        for later in range(t, len(rewards)):
            delta = rewards[later] + gamma * after[later] - values[later]
            total += (gamma * lam) ** (later - t) * delta
        advantages.append(total)
    return advantages


def columns(row: list[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [reward for reward, _ in row], [value for _, value in row]


@examples
@given(rows, shares, shares)
def test_advantages_are_the_discounted_sum_of_later_deltas(
    row: list[tuple[float, float]], gamma: float, lam: float
) -> None:
    rewards, values = columns(row)
    advantages, returns = gae(rewards, values, gamma, lam)
    assert advantages == pytest.approx(by_definition(rewards, values, gamma, lam), abs=1e-9)
    assert returns == pytest.approx(advantages + np.array(values), abs=1e-12)


@examples
@given(rows)
def test_with_lambda_1_and_no_discount_returns_are_the_rewards_to_come(row: list[tuple[float, float]]) -> None:
    rewards, values = columns(row)
    _, returns = gae(rewards, values, gamma=1.0, lam=1.0)
    assert returns == pytest.approx(np.cumsum(rewards[::-1])[::-1], abs=1e-9)


@examples
@given(rows, shares)
def test_with_lambda_0_advantages_look_one_token_ahead(row: list[tuple[float, float]], gamma: float) -> None:
    rewards, values = columns(row)
    advantages, _ = gae(rewards, values, gamma, lam=0.0)
    after = np.array([*values[1:], 0.0])
    assert advantages == pytest.approx(np.array(rewards) + gamma * after - np.array(values), abs=1e-12)


def test_worked() -> None:
    # deltas: .5 * .4 - .2 = 0, then 1 - .4 = .6; A_0 = 0 + .5 * .5 * .6
    advantages, returns = gae([0.0, 1.0], [0.2, 0.4], gamma=0.5, lam=0.5)
    assert advantages == pytest.approx([0.15, 0.6])
    assert returns == pytest.approx([0.35, 1.0])


def test_nothing_follows_the_last_token() -> None:
    advantages, returns = gae([1.0], [0.25], gamma=1.0, lam=1.0)
    assert (advantages.tolist(), returns.tolist()) == ([0.75], [1.0])


def test_a_perfect_value_head_leaves_no_advantage() -> None:
    advantages, _ = gae([0.0, 0.0, 1.0], [1.0, 1.0, 1.0], gamma=1.0, lam=0.95)
    assert advantages.tolist() == [0.0, 0.0, 0.0]


def test_a_row_without_trained_tokens_has_none() -> None:
    advantages, returns = gae([], [], gamma=0.9, lam=0.9)
    assert advantages.shape == returns.shape == (0,)


def test_it_computes_in_float64_and_leaves_its_input_alone() -> None:
    rewards, values = np.ones(3, dtype=np.float32), np.full(3, 0.5, dtype=np.float32)
    advantages, returns = gae(rewards, values, 0.9, 0.8)
    assert advantages.dtype == returns.dtype == np.float64
    assert rewards.tolist() == [1.0] * 3 and values.tolist() == [0.5] * 3


@pytest.mark.parametrize(("rewards", "values"), [([1.0, 2.0], [1.0]), ([[1.0]], [[1.0]]), (1.0, 1.0)])
def test_one_reward_and_one_value_per_token(rewards: list[float], values: list[float]) -> None:
    with pytest.raises(AssertionError):
        gae(rewards, values, 1.0, 1.0)
