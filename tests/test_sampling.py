"""Choosing tokens: uniform numbers by seed and position, and what the sampling parameters leave to choose from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from headrace.engine.base import SamplingParams
from headrace.engine.sampling import sample_tokens, uniforms
from headrace.errors import ConfigError


def test_uniform_numbers_are_uniform_and_unrelated() -> None:
    seeds, positions = np.meshgrid(np.arange(300), np.arange(300), indexing="ij")
    draws = uniforms(seeds.ravel().tolist(), positions.ravel().tolist()).reshape(300, 300)
    assert draws.min() >= 0 and draws.max() < 1
    histogram = np.histogram(draws, 50, (0, 1))[0] / draws.size * 50
    assert np.abs(histogram - 1).max() < 0.1
    for shifted in (draws[1:] * draws[:-1], draws[:, 1:] * draws[:, :-1], draws[1:, 1:] * draws[:-1, :-1]):
        assert abs(shifted.mean() - 0.25) < 0.005
    assert len(np.unique(draws)) == draws.size


def test_uniform_numbers_depend_on_seed_and_position_only() -> None:
    together = uniforms([5, 6, 7], [0, 9, 3])
    assert together.tolist() == [uniforms([s], [p])[0] for s, p in ((5, 0), (6, 9), (7, 3))]


def choose(logits: Sequence[float] | torch.Tensor, seeds: int = 200, **params: Any) -> tuple[list[int], list[float]]:
    """Tokens and their log-probabilities under many seeds."""
    full = SamplingParams(**{"temperature": 1.0, "top_p": 1.0, "top_k": 0, **params})
    logits_BV = torch.as_tensor(logits, dtype=torch.float32).expand(seeds, -1)
    tokens, logprobs, _ = sample_tokens(logits_BV, [full] * seeds, list(range(seeds)), [0] * seeds)
    return tokens, logprobs


def test_top_k_keeps_k_even_among_equals() -> None:
    tokens, logprobs = choose([1.0] * 10, top_k=3)
    assert len(set(tokens)) == 3
    np.testing.assert_allclose(logprobs, np.log(1 / 3), atol=1e-6)


def test_top_p_keeps_the_token_that_crosses_it() -> None:
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05])
    assert set(choose(probabilities.log(), top_p=0.49)[0]) == {0}
    assert set(choose(probabilities.log(), top_p=0.51)[0]) == {0, 1}
    assert set(choose(probabilities.log(), top_p=0.96)[0]) == {0, 1, 2, 3}
    assert set(choose(probabilities.log(), top_p=1e-9)[0]) == {0}


def test_top_p_is_a_share_of_what_top_k_left() -> None:
    probabilities = torch.tensor([0.4, 0.2, 0.2, 0.1, 0.1])
    assert set(choose(probabilities.log(), top_k=2, top_p=0.6)[0]) == {0}  # 0.4 is two thirds of 0.6


def test_a_nucleus_may_be_wider_than_the_first_guess() -> None:
    logits_V = torch.linspace(0, -0.1, 5000)
    tokens, logprobs = choose(logits_V, seeds=500, top_p=0.9)
    probabilities = logits_V.softmax(0)
    size = int((probabilities.cumsum(0) - probabilities < 0.9).sum())
    assert 4000 < max(tokens) < size
    kept = probabilities[:size].log() - probabilities[:size].sum().log()
    np.testing.assert_allclose(logprobs, kept[tokens], atol=1e-4)


def test_tiny_temperatures_are_nearly_greedy_and_finite() -> None:
    tokens, logprobs = choose([0.0, 3.0, 2.9], temperature=1e-4)
    assert set(tokens) == {1}
    assert np.isfinite(logprobs).all()


def test_impossible_tokens_are_never_chosen() -> None:
    tokens, _ = choose([float("-inf"), 0.0, float("-inf"), 0.0, float("-inf")], seeds=500)
    assert set(tokens) == {1, 3}


@pytest.mark.parametrize("stop", ["\n\n", ("",), ("a", "")])
def test_stop_strings_that_would_stop_everything_are_refused(stop: Any) -> None:
    with pytest.raises(ConfigError, match="stop must be a tuple of strings"):
        SamplingParams(stop=stop)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -1),
        ("max_tokens", 0),
    ],
)
def test_parameters_out_of_range_are_refused(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be .*got {value}"):
        SamplingParams(**{name: value})  # type: ignore[arg-type]
