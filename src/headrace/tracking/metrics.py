"""MetricsAggregator: many recorded values become one number per key, by the reducer that the catalogue has for it.

Sums are exact, so the result does not depend on how the values were spread over micro-batches and processes: merging
aggregators gives bit for bit what recording everything in one gives.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any, SupportsFloat

from headrace.errors import DataError
from headrace.tracking.catalogue import Reducer, reducer_of


class MetricsAggregator:
    """Collects the metrics of one step. A NaN or infinity that is recorded is also the result: shown, not hidden."""

    def __init__(self) -> None:
        self._states: dict[str, _State] = {}

    def record(
        self, key: str, value: SupportsFloat, reducer: Reducer | None = None, weight: SupportsFloat = 1.0
    ) -> None:
        """Add one value. `weight` counts for `weighted_mean` only.

        `reducer` is for keys that are not in the catalogue; one key keeps one reducer.
        """
        state = self._state(key, reducer)
        if weight != 1.0:
            _check_weight(key, state.reducer, float(weight))
        state.add(float(value), float(weight))
        self._states[key] = state

    def record_each(self, key: str, values: Sequence[float], weights: Sequence[float] | None = None) -> None:
        """Record values one after the other, as `record` does, in less time."""
        if not values:
            return
        state = self._state(key, None)
        if weights is None:
            weights = [1.0] * len(values)
        else:
            for weight in weights:
                _check_weight(key, state.reducer, weight)
        for value, weight in zip(values, weights, strict=True):
            state.add(value, weight)
        self._states[key] = state

    def _state(self, key: str, reducer: Reducer | None) -> _State:
        state = self._states.get(key)
        if state is None:
            return _State(reducer_of(key, reducer))
        if reducer is not None and state.reducer is not reducer:
            _require_same(key, state.reducer, Reducer(reducer))
        return state

    def record_all(self, values: Mapping[str, SupportsFloat], reducer: Reducer | None = None, prefix: str = "") -> None:
        """Record every value under `prefix` + its key (the prefix is used as it is: `"policy/"`)."""
        for key, value in values.items():
            self.record(prefix + key, value, reducer)

    def merge(self, other: MetricsAggregator) -> None:
        """Add everything `other` recorded, as if it had been recorded here, after what is here already."""
        for key, state in other._states.items():  # all of them first, so that an error leaves this one as it was
            if key in self._states:
                _require_same(key, self._states[key].reducer, state.reducer)
        for key, state in other._states.items():
            self._states.setdefault(key, _State(state.reducer)).join(state)

    def renamed(self, prefix: str, new_prefix: str) -> MetricsAggregator:
        """The same metrics, with `new_prefix` where a key began with `prefix`."""
        other = MetricsAggregator()
        for key, state in self._states.items():
            name = new_prefix + key.removeprefix(prefix) if key.startswith(prefix) else key
            other._states[name] = _State(state.reducer)
            other._states[name].join(state)
        return other

    def reduce(self) -> dict[str, float]:
        """One number per key, keys sorted."""
        return {key: self._states[key].result() for key in sorted(self._states)}

    def clear(self) -> None:
        """Remove everything, the reducers too."""
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


_ADD_UP = (Reducer.SUM, Reducer.MEAN, Reducer.WEIGHTED_MEAN)
_MOST_PENDING = 10_000


class _State:
    """The values of one metric so far. Those to be summed wait in a list: an exact sum is slow, and one is enough."""

    __slots__ = ("_pending", "_total", "_weight", "reducer", "value")

    def __init__(self, reducer: Reducer) -> None:
        self.reducer = reducer
        self.value: float | None = None
        """last, min, max: the value so far. Sums: the sum of the non-finite values, None if there is none."""
        self._total = self._weight = Fraction(0)
        self._pending: list[tuple[float, float]] = []

    def add(self, value: float, weight: float) -> None:
        if self.reducer not in _ADD_UP:
            self._replace(value)
        elif math.isfinite(value):
            self._pending.append((value, weight))
        else:
            self._pending.append((0.0, weight))
            self.value = value if self.value is None else self.value + value
        if len(self._pending) > _MOST_PENDING:
            self._settle()

    def join(self, later: _State) -> None:
        """Add everything that `later` recorded."""
        self._pending += later._pending
        if later._weight:
            self._total += later._total
            self._weight += later._weight
        if later.value is not None and self.reducer not in _ADD_UP:
            self._replace(later.value)
        elif later.value is not None:
            self.value = later.value if self.value is None else self.value + later.value

    def _replace(self, value: float) -> None:
        if self.value is None or self.reducer is Reducer.LAST:
            self.value = value
        else:
            self.value = _extreme(self.reducer, self.value, value)

    def _settle(self) -> None:
        """Add up the values that wait."""
        if self._pending:
            total, weight = _exact_sums(self._pending)
            self._total += total
            self._weight += weight
            self._pending = []

    def result(self) -> float:
        if self.value is not None:
            return self.value
        self._settle()
        if self.reducer is Reducer.SUM:
            return _to_float(self._total)
        return _to_float(self._total / self._weight) if self._weight else math.nan

    def to_dict(self) -> dict[str, str]:
        self._settle()
        value = "" if self.value is None else repr(self.value)
        return {"reducer": self.reducer.value, "value": value, "total": str(self._total), "weight": str(self._weight)}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> _State:
        state = cls(Reducer(fields["reducer"]))
        state.value = float(fields["value"]) if fields["value"] else None
        state._total, state._weight = Fraction(fields["total"]), Fraction(fields["weight"])
        return state


_SCALE = 1074  # every finite float is an integer multiple of 2 ** -1074


def _exact_sums(pairs: Iterable[tuple[float, float]]) -> tuple[Fraction, Fraction]:
    """Sum of value times weight, and of the weights: in integers, which is many times faster than in fractions."""
    total = weights = ones = 0
    for value, weight in pairs:
        numerator, denominator = value.as_integer_ratio()  # the denominator is a power of 2
        numerator <<= _SCALE + 1 - denominator.bit_length()
        if weight == 1.0:
            ones += 1
            total += numerator << _SCALE
        else:
            factor, divisor = weight.as_integer_ratio()
            factor <<= _SCALE + 1 - divisor.bit_length()
            weights += factor
            total += numerator * factor
    return Fraction(total, 1 << 2 * _SCALE), Fraction(weights, 1 << _SCALE) + ones


def _require_same(key: str, known: Reducer, now: Reducer) -> None:
    if known is not now:
        raise DataError(
            f'metric "{key}" is recorded with reducer "{now}" and before with "{known}"; '
            f"use one reducer per key, or two keys"
        )


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
