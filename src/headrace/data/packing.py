"""Cutting rows into micro-batches by token budget: the one way, for training and for scoring alike."""

from __future__ import annotations

from collections.abc import Sequence


def cut_by_tokens(lengths: Sequence[int], budget: int, together: int = 1) -> tuple[tuple[int, ...], ...]:
    """Indices of rows in micro-batches of at most `budget` tokens (or one unit that is longer).

    Rows of similar length come together, so that little is padded where padding is needed. A unit of `together`
    consecutive rows (2 for preference pairs) is never torn apart.
    """
    units = [range(start, start + together) for start in range(0, len(lengths), together)]
    units.sort(key=lambda unit: (-max(lengths[i] for i in unit), unit.start))
    batches: list[list[int]] = []
    room = 0
    for unit in units:
        size = sum(lengths[i] for i in unit)
        if size > room:
            batches.append([])
            room = budget
        batches[-1] += unit
        room -= size
    return tuple(tuple(batch) for batch in batches)
