"""MetricsAggregator: many recorded values become one number per key, by the reducer each metric names.

Sums are kept as exact fractions, so the result does not depend on how the values were spread over micro-batches
and processes: merging aggregators gives bit for bit what recording everything in one gives.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from typing import Any, SupportsFloat

from headrace.errors import DataError


class Reducer(StrEnum):
    """How the values of one metric become one number."""

    SUM = "sum"
    MEAN = "mean"
    LAST = "last"
    MIN = "min"
    MAX = "max"
    WEIGHTED_MEAN = "weighted_mean"

    @classmethod
    def _missing_(cls, value: object) -> Reducer:
        raise DataError(f'unknown reducer "{value}"; use one of {", ".join(cls)}')


class MetricsAggregator:
    """Collects metrics of one step. A NaN or infinity that is recorded comes out again: it is shown, not hidden."""

    def __init__(self) -> None:
        self._states: dict[str, _State] = {}

    def record(self, key: str, value: SupportsFloat, reducer: Reducer, weight: SupportsFloat = 1.0) -> None:
        """Add one value. `weight` counts for `weighted_mean` only; one key keeps one reducer."""
        reducer = Reducer(reducer)
        _check_weight(key, reducer, float(weight))
        self._states[key] = self._joined(key, _State.of(float(value), reducer, float(weight)))

    def record_all(self, values: Mapping[str, SupportsFloat], reducer: Reducer, prefix: str = "") -> None:
        """Record every value under `prefix` + its key (the prefix is used as it is: `"policy/"`)."""
        for key, value in values.items():
            self.record(prefix + key, value, reducer)

    def merge(self, other: MetricsAggregator) -> None:
        """Add everything `other` recorded, as if it had been recorded here, after what is here already."""
        joined = {key: self._joined(key, state) for key, state in other._states.items()}
        self._states.update(joined)  # after all of them joined, so that an error leaves this aggregator as it was

    def renamed(self, prefix: str, new_prefix: str) -> MetricsAggregator:
        """The same metrics, with `new_prefix` where a key began with `prefix`."""
        other = MetricsAggregator()
        other._states = {
            new_prefix + key.removeprefix(prefix) if key.startswith(prefix) else key: state
            for key, state in self._states.items()
        }
        return other

    def reduce(self) -> dict[str, float]:
        """One number per key, keys sorted."""
        return {key: self._states[key].result() for key in sorted(self._states)}

    def clear(self) -> None:
        """Forget everything, the reducers too."""
        self._states.clear()

    def to_dict(self) -> dict[str, dict[str, str]]:
        """Plain JSON-able data. Numbers are strings, which keep them exact and let NaN through strict JSON."""
        return {key: state.to_dict() for key, state in self._states.items()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Mapping[str, str]]) -> MetricsAggregator:
        """The aggregator that `to_dict` was called on."""
        aggregator = cls()
        aggregator._states = {key: _State.from_dict(fields) for key, fields in data.items()}
        return aggregator

    def _joined(self, key: str, state: _State) -> _State:
        known = self._states.get(key)
        if known is None:
            return state
        if known.reducer is not state.reducer:
            raise DataError(
                f'metric "{key}" is recorded with reducer "{state.reducer}" and before with "{known.reducer}"; '
                f"use one reducer per key, or two keys"
            )
        return known.joined(state)


@dataclass(frozen=True, slots=True)
class _State:
    """What is known of one metric. Recording joins the state of a single value, so it cannot differ from merging."""

    reducer: Reducer
    value: float
    """last, min, max: the value so far. Sums: the sum of the non-finite values, else 0."""
    total: Fraction
    """Sums: the weighted sum of the finite values."""
    weight: Fraction

    @classmethod
    def of(cls, value: float, reducer: Reducer, weight: float) -> _State:
        exact_weight = Fraction(weight)
        if reducer in (Reducer.LAST, Reducer.MIN, Reducer.MAX):
            return cls(reducer, value, Fraction(0), exact_weight)
        if not math.isfinite(value):
            return cls(reducer, value, Fraction(0), exact_weight)
        return cls(reducer, 0.0, Fraction(value) * exact_weight, exact_weight)

    def joined(self, later: _State) -> _State:
        match self.reducer:
            case Reducer.LAST:
                value = later.value
            case Reducer.MIN | Reducer.MAX:
                value = _extreme(self.reducer, self.value, later.value)
            case _:
                value = self.value + later.value
        return _State(self.reducer, value, self.total + later.total, self.weight + later.weight)

    def result(self) -> float:
        if self.reducer in (Reducer.LAST, Reducer.MIN, Reducer.MAX) or not math.isfinite(self.value):
            return self.value
        if self.reducer is Reducer.SUM:
            return _to_float(self.total)
        return _to_float(self.total / self.weight) if self.weight else math.nan

    def to_dict(self) -> dict[str, str]:
        numbers = {"value": repr(self.value), "total": str(self.total), "weight": str(self.weight)}
        return {"reducer": self.reducer.value, **numbers}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> _State:
        total, weight = Fraction(fields["total"]), Fraction(fields["weight"])
        return cls(Reducer(fields["reducer"]), float(fields["value"]), total, weight)


def _check_weight(key: str, reducer: Reducer, weight: float) -> None:
    if reducer is not Reducer.WEIGHTED_MEAN and weight != 1.0:
        raise DataError(
            f'metric "{key}" has weight {weight}, which reducer "{reducer}" would ignore; '
            f'use reducer "weighted_mean" or leave the weight out'
        )
    if not (math.isfinite(weight) and weight >= 0):
        raise DataError(f'metric "{key}" has weight {weight}; a weight is finite and not negative')


def _extreme(reducer: Reducer, a: float, b: float) -> float:
    # min() and max() keep or lose a NaN depending on the order of their arguments
    if math.isnan(a) or math.isnan(b):
        return math.nan
    return min(a, b) if reducer is Reducer.MIN else max(a, b)


def _to_float(exact: Fraction) -> float:
    try:
        return float(exact)
    except OverflowError:
        return math.inf if exact > 0 else -math.inf
