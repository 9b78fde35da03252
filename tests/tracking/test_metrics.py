"""MetricsAggregator: one number per key, however the values were spread."""

from __future__ import annotations

import json
import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import DataError
from headrace.tracking.metrics import MetricsAggregator, Reducer

pytestmark = pytest.mark.usefixtures("any_metric")
any_float = st.floats(allow_nan=True, allow_infinity=True)
weights = st.floats(min_value=0, max_value=1e6)
records = st.lists(st.tuples(any_float, weights, st.integers(0, 3)), max_size=30)


def aggregate(values: list[float], reducer: Reducer) -> float:
    metrics = MetricsAggregator()
    for value in values:
        metrics.record("key", value, reducer)
    return metrics.reduce()["key"]


def bits(reduced: dict[str, float]) -> dict[str, str]:
    """Comparable exactly, NaN included."""
    return {key: (value + 0.0).hex() for key, value in reduced.items()}


def record_everywhere(metrics: MetricsAggregator, value: float, weight: float) -> None:
    for reducer in Reducer:
        metrics.record(f"all/{reducer}", value, reducer, weight if reducer is Reducer.WEIGHTED_MEAN else 1.0)


@pytest.mark.parametrize(
    ("reducer", "expected"),
    [(Reducer.SUM, 9.0), (Reducer.MEAN, 3.0), (Reducer.LAST, 2.0), (Reducer.MIN, 1.0), (Reducer.MAX, 6.0)],
)
def test_each_reducer_does_what_it_is_called(reducer: Reducer, expected: float) -> None:
    assert aggregate([1.0, 6.0, 2.0], reducer) == expected


def test_weighted_mean_weighs() -> None:
    metrics = MetricsAggregator()
    metrics.record("loss", 1.0, Reducer.WEIGHTED_MEAN, weight=3)
    metrics.record("loss", 5.0, Reducer.WEIGHTED_MEAN, weight=1)
    assert metrics.reduce() == {"loss": 2.0}


@given(st.lists(st.tuples(any_float, weights), min_size=1, max_size=30))
def test_recording_each_of_many_equals_recording_them_one_by_one(pairs: list[tuple[float, float]]) -> None:
    values, weight_of = [value for value, _ in pairs], [weight for _, weight in pairs]
    one_by_one, at_once = MetricsAggregator(), MetricsAggregator()
    for value, weight in pairs:
        one_by_one.record("policy/kl_to_sampler", value, weight=weight)
        one_by_one.record("policy/logprob_gap_max", value)
    at_once.record_each("policy/kl_to_sampler", values, weight_of)
    at_once.record_each("policy/logprob_gap_max", values)
    assert bits(at_once.reduce()) == bits(one_by_one.reduce())


def test_recording_each_of_none_records_no_key() -> None:
    metrics = MetricsAggregator()
    metrics.record_each("policy/logprob_gap_max", [])
    assert metrics.reduce() == {}


def test_weights_that_a_reducer_would_ignore_are_refused_for_many_values_too() -> None:
    with pytest.raises(DataError, match="would ignore"):
        MetricsAggregator().record_each("policy/logprob_gap_max", [1.0], [2.0])


def test_weighted_mean_of_no_weight_is_nan() -> None:
    metrics = MetricsAggregator()
    metrics.record("loss", 1.0, Reducer.WEIGHTED_MEAN, weight=0)
    assert math.isnan(metrics.reduce()["loss"])


@given(records)
def test_any_split_and_merge_equals_one_aggregator(entries: list[tuple[float, float, int]]) -> None:
    whole = MetricsAggregator()
    parts = [MetricsAggregator() for _ in range(4)]
    # parts are merged in order, so "last" can only agree when the entries come in that order
    for value, weight, part in sorted(entries, key=lambda entry: entry[2]):
        record_everywhere(whole, value, weight)
        record_everywhere(parts[part], value, weight)
    merged = MetricsAggregator()
    for part in parts:
        merged.merge(MetricsAggregator.from_dict(json.loads(json.dumps(part.to_dict(), allow_nan=False))))
    assert bits(merged.reduce()) == bits(whole.reduce())


@given(st.lists(any_float, min_size=1, max_size=20), st.randoms())
def test_order_matters_to_last_only(values: list[float], random: object) -> None:
    shuffled = list(values)
    random.shuffle(shuffled)  # pyright: ignore[reportAttributeAccessIssue]
    for reducer in set(Reducer) - {Reducer.LAST}:
        assert bits({"key": aggregate(values, reducer)}) == bits({"key": aggregate(shuffled, reducer)})


def test_sums_do_not_lose_small_values_beside_large_ones() -> None:
    assert aggregate([1e16, 1.0, -1e16], Reducer.SUM) == 1.0


def test_many_values_are_added_up_as_exactly_as_few() -> None:
    values = [1e16, *[0.1] * 25_000, -1e16]
    assert aggregate(values, Reducer.SUM) == math.fsum(values)
    assert aggregate(values, Reducer.MEAN) == float(sum(map(Fraction, values)) / len(values))


def test_what_is_recorded_later_does_not_reach_an_aggregator_that_was_merged_or_renamed() -> None:
    metrics, merged = MetricsAggregator(), MetricsAggregator()
    metrics.record("a/loss", 1.0, Reducer.MEAN)
    merged.merge(metrics)
    renamed = metrics.renamed("a/", "b/")
    metrics.record("a/loss", 5.0, Reducer.MEAN)
    assert merged.reduce() == {"a/loss": 1.0} and renamed.reduce() == {"b/loss": 1.0}


@pytest.mark.parametrize("reducer", [Reducer.SUM, Reducer.MEAN, Reducer.MIN, Reducer.MAX, Reducer.WEIGHTED_MEAN])
def test_a_nan_is_shown_wherever_it_comes(reducer: Reducer) -> None:
    assert math.isnan(aggregate([math.nan, 1.0], reducer))
    assert math.isnan(aggregate([1.0, math.nan], reducer))


def test_infinities_pass_through() -> None:
    assert aggregate([1.0, math.inf], Reducer.MEAN) == math.inf
    assert math.isnan(aggregate([math.inf, -math.inf], Reducer.SUM))


def test_two_reducers_for_one_key_are_an_error_that_names_all() -> None:
    metrics = MetricsAggregator()
    metrics.record("reward/mean", 1.0)
    with pytest.raises(DataError, match=r'"reward/mean".*"sum".*"mean"'):
        metrics.record("reward/mean", 1.0, Reducer.SUM)


def test_a_failed_merge_changes_nothing() -> None:
    metrics, other = MetricsAggregator(), MetricsAggregator()
    metrics.record("b", 1.0, Reducer.MEAN)
    other.record("a", 1.0, Reducer.SUM)
    other.record("b", 1.0, Reducer.SUM)
    with pytest.raises(DataError, match='"b"'):
        metrics.merge(other)
    assert metrics.reduce() == {"b": 1.0}


def test_a_weight_that_would_be_ignored_is_an_error() -> None:
    with pytest.raises(DataError, match="weighted_mean"):
        MetricsAggregator().record("loss", 1.0, Reducer.MEAN, weight=2.0)


@pytest.mark.parametrize("weight", [-1.0, math.nan, math.inf])
def test_a_weight_is_finite_and_not_negative(weight: float) -> None:
    with pytest.raises(DataError, match="weight"):
        MetricsAggregator().record("loss", 1.0, Reducer.WEIGHTED_MEAN, weight=weight)


def test_an_unknown_reducer_lists_the_known() -> None:
    with pytest.raises(DataError, match=r'"median".*weighted_mean'):
        Reducer("median")


def test_record_all_puts_the_prefix_in_front_and_keys_come_out_sorted() -> None:
    metrics = MetricsAggregator()
    metrics.record("reward/mean", 0.5, Reducer.MEAN)
    metrics.record_all({"loss": 1, "entropy": 2}, Reducer.LAST, prefix="policy/")
    assert list(metrics.reduce().items()) == [("policy/entropy", 2.0), ("policy/loss", 1.0), ("reward/mean", 0.5)]


def test_clear_forgets_values_and_reducers() -> None:
    metrics = MetricsAggregator()
    metrics.record("key", 1.0, Reducer.MEAN)
    metrics.clear()
    metrics.record("key", 2.0, Reducer.SUM)
    assert metrics.reduce() == {"key": 2.0}
