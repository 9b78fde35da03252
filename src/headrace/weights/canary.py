"""Canary rows: a few fixed tokens that learner and engine score after every sync. They prove what decoding reads."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from headrace.errors import WeightSyncError

Rows = Sequence[Sequence[int]]
Score = Callable[[Rows], Awaitable[list[list[float]]]]
"""For each row, the log-probability at temperature 1 of every token but the first."""

TOLERANCES = {"float64": 1e-3, "float32": 1e-3, "float16": 0.05, "bfloat16": 0.15}
"""By the dtype of the weights: the largest mean difference of two implementations of one model. A stale output head
or a lost tensor of a policy that has moved is far above it."""
_LENGTH = 24
_WALKS = ((17, 7919), (5, 104729))


@dataclass(frozen=True, slots=True)
class Canary:
    """What both sides score, who scores it for the learner, and how far apart they may be on average."""

    rows: tuple[tuple[int, ...], ...]
    score: Score
    tolerance: float


def canary_rows(vocabulary: int, length: int | None = None) -> tuple[tuple[int, ...], ...]:
    """Two rows of tokens from all over the vocabulary: their scores read every part of the model."""
    size = min(_LENGTH, length or _LENGTH)
    return tuple(tuple((start + i * stride) % vocabulary for i in range(size)) for start, stride in _WALKS)


class CanaryCheck:
    """Compares the two sides after each sync. Remembers the last scores, to say what a stale engine decodes with."""

    def __init__(self, canary: Canary) -> None:
        self._canary = canary
        self._last: tuple[int, list[float]] | None = None

    async def learner_scores(self, again: int | None = None) -> list[float]:
        """The learner's, on its weights as they are now; those of the last version `again`, if it may have left it."""
        if self._last is not None and self._last[0] == again:
            return self._last[1]
        return _flat(await self._canary.score(self._canary.rows))

    async def prove(self, version: int, ours: list[float], engine_score: Score, arrived: bool) -> float:
        """The mean difference of the two sides; WeightSyncError if the engine does not decode with these weights."""
        theirs = _flat(await engine_score(self._canary.rows))
        found = _difference(ours, theirs)
        if not found <= self._canary.tolerance:
            raise WeightSyncError(
                f"version {version} is not what the engine decodes with: its log-probabilities of the canary rows are "
                f"{found:.2g} from the learner's on average, and {self._canary.tolerance:g} is allowed; "
                f"{self._diagnosis(theirs, arrived)}; resume from the last checkpoint, and see docs/engines.md if it "
                f"happens again"
            )
        self._last = (version, ours)
        return found

    def _diagnosis(self, theirs: list[float], arrived: bool) -> str:
        if self._last is not None and _difference(self._last[1], theirs) <= self._canary.tolerance:
            return f"it still decodes with the weights of version {self._last[0]}: the sync changed nothing"
        if arrived:
            return "all tensors arrived, so it decodes with a stale copy of some (a packed or tied output head)"
        return "some tensors are missing, changed, or kept in a stale copy, or the server has another model"


def _difference(ours: list[float], theirs: list[float]) -> float:
    """The mean absolute difference; not a number if one of them is not."""
    if len(ours) != len(theirs):
        return float("inf")
    return sum(abs(a - b) for a, b in zip(ours, theirs, strict=True)) / max(1, len(ours))


def _flat(scores: list[list[float]]) -> list[float]:
    return [value for row in scores for value in row]
