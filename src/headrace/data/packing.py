"""Cutting rows into micro-batches by token budget: the one way, for training and for scoring alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_BEGINNING = 16  # tokens by which rows are taken to begin alike
_REPEATED = 0.25  # of a token that the row before has, too: it costs nothing where beginnings are shared, else all


def cut_by_tokens(rows: Sequence[Sequence[Any]], budget: int, together: int = 1) -> tuple[tuple[int, ...], ...]:
    """Indices of rows in micro-batches of at most `budget` tokens (or one unit that is longer).

    Rows that begin alike (a group's, a conversation's) keep their order and come together, so that a model may run the
    beginning once, and it counts less; beyond that, rows of similar length do, so that little is padded where padding
    is needed. A unit of `together` consecutive rows (2 for preference pairs) is never torn apart.
    """
    families: dict[str, list[range]] = {}
    for start in range(0, len(rows), together):
        families.setdefault(str(rows[start][:_BEGINNING]), []).append(range(start, start + together))

    def longest(family: list[range]) -> int:
        return max(len(rows[i]) for unit in family for i in unit)

    batches: list[list[int]] = []
    room = 0.0
    for family in sorted(families.values(), key=lambda family: (-longest(family), family[0].start)):
        before: Sequence[Any] = ()
        for unit in family:
            size = 0.0
            for row in (rows[i] for i in unit):
                alike = _common(before, row)
                size += len(row) - (1 - _REPEATED) * alike * (alike >= _BEGINNING)
                before = row
            if size > room:
                batches.append([])
                room, size = float(budget), float(sum(len(rows[i]) for i in unit))
            batches[-1] += unit
            room -= size
    return tuple(tuple(batch) for batch in batches)


def _common(one: Sequence[Any], two: Sequence[Any]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))
