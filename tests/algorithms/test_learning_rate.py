"""The learning rate as a function of the step."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes import examples
from headrace.algorithms.learning_rate import learning_rate, schedule_factor
from headrace.config import OptimizerSection
from headrace.config.base import LEAST

RATIOS = st.just(0.0) | st.floats(LEAST, 1)
SCHEDULES = ["constant", "linear", "cosine"]
optimizers = st.builds(
    OptimizerSection,
    schedule=st.sampled_from(SCHEDULES),
    warmup_steps=st.integers(0, 50),
    warmup_ratio=RATIOS,
    min_lr_ratio=RATIOS,
)


def factors(total: int, schedule: Any, **changes: Any) -> list[float]:
    optimizer = OptimizerSection(schedule=schedule, **changes)
    return [schedule_factor(step, total, optimizer) for step in range(1, total + 1)]


def test_constant_is_constant() -> None:
    assert factors(3, "constant") == [1.0, 1.0, 1.0]


def test_linear_falls_in_equal_parts() -> None:
    assert factors(4, "linear") == [1.0, 0.75, 0.5, 0.25]


def test_cosine_falls_along_the_cosine() -> None:
    assert factors(4, "cosine") == pytest.approx([1.0, 0.853553, 0.5, 0.146447], abs=1e-6)


def test_the_fall_ends_above_the_smallest_rate() -> None:
    assert factors(4, "linear", min_lr_ratio=0.2) == pytest.approx([1.0, 0.8, 0.6, 0.4])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_warm_up_over_half_of_20_steps_is_half_done_at_step_5(schedule: Any) -> None:
    optimizer = OptimizerSection(schedule=schedule, warmup_ratio=0.5)
    assert schedule_factor(5, 20, optimizer) == 0.5
    assert schedule_factor(10, 20, optimizer) == 1.0


def test_warm_up_in_steps_goes_before_its_share() -> None:
    assert factors(8, "constant", warmup_steps=2, warmup_ratio=1.0) == [0.5] + [1.0] * 7


def test_the_fall_begins_after_warm_up() -> None:
    assert factors(6, "linear", warmup_steps=2) == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]


def test_the_rate_is_the_share_of_the_peak() -> None:
    optimizer = OptimizerSection(lr=4e-4, schedule="linear")
    assert learning_rate(2, 4, optimizer) == pytest.approx(3e-4)


@examples
@given(optimizers, st.integers(1, 10_000), st.data())
def test_no_step_has_the_rate_0_and_none_is_above_the_peak(
    optimizer: OptimizerSection, total: int, data: st.DataObject
) -> None:
    for step in (1, total, data.draw(st.integers(1, total))):
        assert 0.0 < schedule_factor(step, total, optimizer) <= 1.0
        assert 0.0 < learning_rate(step, total, optimizer) <= optimizer.lr


@examples
@given(optimizers, st.integers(1, 60))
def test_the_rate_rises_during_warm_up_and_never_after(optimizer: OptimizerSection, total: int) -> None:
    warmup = optimizer.warmup_steps or round(optimizer.warmup_ratio * total)
    rates = [schedule_factor(step, total, optimizer) for step in range(1, total + 1)]
    rising, falling = rates[:warmup], rates[warmup:]
    assert rising == sorted(rising) and falling == sorted(falling, reverse=True)
    assert all(rate >= optimizer.min_lr_ratio for rate in falling)
