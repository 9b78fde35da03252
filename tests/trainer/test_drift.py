"""What sampler and learner differ by, and whether tokens were drawn as they should be."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.data.sample import NO_VERSION, Sample
from headrace.trainer.drift import drift_metrics

SHARES = np.array([0.7, 0.2, 0.1])
ENTROPY = float(-(SHARES * np.log(SHARES)).sum())
ROWS, TOKENS = 200, 5


def rows_of(drawn: np.ndarray, versions: int = 3) -> tuple[list[Sample], list[list[float]]]:
    logprobs = np.log(SHARES)[drawn].tolist()
    zeros, targets = (0.0,) * TOKENS, (1,) * TOKENS
    samples = [
        Sample((0, *map(int, row)), targets, tuple(found), (versions,) * TOKENS, zeros)
        for row, found in zip(drawn, logprobs, strict=True)
    ]
    return samples, logprobs


def surprise(drawn: np.ndarray) -> float:
    samples, logprobs = rows_of(drawn)
    found = drift_metrics(samples, logprobs, 3, entropies=[[ENTROPY] * TOKENS] * len(samples)).reduce()
    assert found["drift/same_version"] == 0.0  # the log-probabilities are right in any case
    return found["drift/surprise"]


def test_tokens_that_are_drawn_as_stated_surprise_by_their_entropy() -> None:
    drawn = np.random.default_rng(0).choice(3, (ROWS, TOKENS), p=SHARES)
    spread = float(np.sqrt((SHARES * np.log(SHARES) ** 2).sum() - ENTROPY**2))
    assert abs(surprise(drawn)) < 4 * spread / (ROWS * TOKENS) ** 0.5


def test_a_sampler_that_prefers_likely_tokens_shows() -> None:
    drawn = np.random.default_rng(0).choice(3, (ROWS, TOKENS), p=[0.9, 0.1, 0.0])
    assert surprise(drawn) < -0.2


def test_surprise_is_of_sampled_tokens_of_the_current_version_whose_entropy_is_known() -> None:
    (sample,), (logprobs,) = rows_of(np.zeros((1, TOKENS), int))
    given = Sample(sample.tokens, sample.loss_mask, sample.logprobs, (NO_VERSION, 3, 3, 3, 3), sample.advantages)
    found = drift_metrics([given], [[-9.0, *logprobs[1:]]], 3, entropies=[[0.0] + [ENTROPY] * 4]).reduce()
    assert found["drift/surprise"] == pytest.approx(-np.log(0.7) - ENTROPY)
    assert "drift/surprise" not in drift_metrics([given], [logprobs], 3).reduce()
    assert "drift/surprise" not in drift_metrics([given], [logprobs], 3, entropies=[[]]).reduce()
    older = drift_metrics([given], [logprobs], 4, entropies=[[ENTROPY] * TOKENS]).reduce()
    assert older.get("drift/surprise") is None
