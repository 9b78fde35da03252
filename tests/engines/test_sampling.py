"""Choosing tokens: uniform numbers by seed and position, and what the sampling parameters leave to choose from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from headrace.engines.base import SamplingParams
from headrace.engines.torch.sampling import _inverse_cdf, sample_tokens, uniforms
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


# ---- through the cumulative distribution, by blocks of 256 tokens -------------------------------------------------

IMPOSSIBLE = float("-inf")
LAST = float(np.nextafter(1.0, 0.0))
SIZES = [1, 2, 97, 255, 256, 257, 512, 1000]


def fall_on(logits_V: torch.Tensor, draws: Sequence[float]) -> list[int]:
    """The tokens that the numbers fall on, which are the same in every type."""
    found = []
    for dtype in (torch.float32, torch.float64):
        logits_BV = logits_V.to(dtype).repeat(len(draws), 1)
        chosen, logprobs = _inverse_cdf(logits_BV, torch.tensor(draws, dtype=torch.float64))
        wanted = logits_BV.log_softmax(-1).gather(1, chosen[:, None])[:, 0]
        torch.testing.assert_close(logprobs, wanted, atol=1e-5, rtol=0)
        found.append(chosen.tolist())
    assert found[0] == found[1]
    return found[0]


@pytest.mark.parametrize("size", SIZES)
def test_every_token_has_its_stretch_of_the_numbers(size: int) -> None:
    logits_V = torch.randn(size, generator=torch.Generator().manual_seed(size)) * 2
    ends = logits_V.double().softmax(0).cumsum(0).numpy()
    starts = np.concatenate(([0.0], ends[:-1]))
    assert fall_on(logits_V, ((starts + ends) / 2).tolist()) == list(range(size))
    assert fall_on(logits_V, [0.0, LAST]) == [0, size - 1]


@pytest.mark.parametrize("size", [97, 256, 600])
def test_tokens_are_chosen_as_often_as_they_are_likely(size: int) -> None:
    draws = 40_000
    logits_V = torch.randn(size, generator=torch.Generator().manual_seed(1))
    tokens, logprobs = choose(logits_V, seeds=draws)
    expected = logits_V.double().softmax(0).numpy() * draws
    chi_square = float((np.square(np.bincount(tokens, minlength=size) - expected) / expected).sum())
    assert abs(chi_square - (size - 1)) < 4 * np.sqrt(2 * (size - 1))  # four standard deviations
    np.testing.assert_allclose(logprobs, np.log(expected[tokens] / draws), atol=1e-5)


@pytest.mark.parametrize("size", SIZES)
def test_what_has_no_probability_is_not_chosen_at_either_end(size: int) -> None:
    draws = [0.0, 5e-324, 1e-17, 0.25, 0.5, 0.75, 1 - 1e-12, LAST]
    for possible in {0, size // 2, size - 1}:
        logits_V = torch.full((size,), IMPOSSIBLE)
        logits_V[possible] = 3.0
        assert set(fall_on(logits_V, draws)) == {possible}


def test_whole_blocks_without_probability_are_passed_over() -> None:
    logits_V = torch.full((256 * 5,), IMPOSSIBLE)
    logits_V[[300, 511, 769]] = torch.tensor([0.5, 0.25, 0.25]).log()
    assert fall_on(logits_V, [0.0, 0.49, 0.51, 0.74, 0.76, LAST]) == [300, 300, 511, 511, 769, 769]


def test_rows_of_a_batch_are_chosen_for_one_by_one() -> None:
    logits_BV = torch.randn(50, 700, generator=torch.Generator().manual_seed(0)) * 3
    draws = uniforms(range(50), [3] * 50)
    together = _inverse_cdf(logits_BV, torch.from_numpy(draws))[0].tolist()
    assert together == [fall_on(row, [draw])[0] for row, draw in zip(logits_BV, draws.tolist(), strict=True)]
    assert len(set(together)) > 20


@pytest.mark.parametrize("size", [97, 2000])
def test_what_others_ask_for_changes_no_bit_of_a_row(size: int) -> None:
    logits_BV = torch.randn(100, size, generator=torch.Generator().manual_seed(0)) * 3
    plain = SamplingParams(temperature=1.0, top_p=1.0, top_k=0)
    alone = sample_tokens(logits_BV, [plain] * 100, range(100), [0] * 100)
    for changes in ({"temperature": 0.7}, {"temperature": 0.0}, {"top_k": 5}, {"top_p": 0.5}):
        other = replace(plain, **changes)
        found = sample_tokens(logits_BV, [plain, other] * 50, range(100), [0] * 100)
        assert all(one[::2] == two[::2] for one, two in zip(alone, found, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [97, 256, 300])
def test_logits_that_are_not_numbers_hurt_their_own_row_only(size: int, dtype: torch.dtype) -> None:
    logits_BV = torch.zeros(2, size, dtype=dtype)
    logits_BV[0, 3] = float("nan")
    params = SamplingParams(temperature=1.0, top_p=1.0, top_k=0)
    tokens, logprobs, _ = sample_tokens(logits_BV, [params] * 2, [0, 1], [0, 0])
    assert 0 <= tokens[0] < size and np.isnan(logprobs[0])
    assert logprobs[1] == pytest.approx(-np.log(size), abs=1e-5)


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
