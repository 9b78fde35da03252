"""Cutting rows into micro-batches by token budget: the one way, for training and for scoring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_PREFIX = 16  # tokens: rows that begin with the same ones count as rows with a shared prefix
_REPEATED = 0.25  # cost of a token that the row before has, too: nothing with prefix sharing, a full token without


def cut_by_tokens(rows: Sequence[Sequence[Any]], budget: int, together: int = 1) -> tuple[tuple[int, ...], ...]:
    """Indices of rows in micro-batches of at most `budget` tokens (or one unit that is longer).

    Rows with a shared prefix (of a group, of a conversation) keep their order and stay together, unless that needs more
    micro-batches: a model may then compute the prefix once, so its tokens count less. Beyond that, rows of similar
    length come together, which saves padding. `together` consecutive rows (2 for preference pairs) are never split.
    """
    families = _families(rows, together)
    fewest, unsplit = (_filled(families, budget, apart) for apart in (False, True))
    return unsplit if len(unsplit) == len(fewest) else fewest


@dataclass(frozen=True, slots=True)
class _Unit:
    rows: range
    alone: float
    """Tokens, if a micro-batch begins with it."""
    more: float
    """Tokens, after the unit before it in its family."""


def _families(rows: Sequence[Sequence[Any]], together: int) -> list[list[_Unit]]:
    by_prefix: dict[str, list[range]] = {}
    for start in range(0, len(rows), together):
        by_prefix.setdefault(str(rows[start][:_PREFIX]), []).append(range(start, start + together))

    def longest(family: list[range]) -> int:
        return max(len(rows[i]) for unit in family for i in unit)

    families: list[list[_Unit]] = []
    for family in sorted(by_prefix.values(), key=lambda family: (-longest(family), family[0].start)):
        families.append([])
        before: Sequence[Any] = ()
        for unit in family:
            more = 0.0
            for row in (rows[i] for i in unit):
                common = _common(before, row)
                more += len(row) - (1 - _REPEATED) * common * (common >= _PREFIX)
                before = row
            families[-1].append(_Unit(unit, float(sum(len(rows[i]) for i in unit)), more))
    return families


def _filled(families: Sequence[Sequence[_Unit]], budget: float, apart: bool) -> tuple[tuple[int, ...], ...]:
    """`apart`: what fits into a micro-batch only without what is there already gets one of its own."""
    batches: list[list[int]] = []
    room = 0.0
    for family in families:
        if apart and room < sum(unit.more for unit in family) <= budget:
            room = 0.0
        for unit in family:
            size = unit.more
            if size > room:
                batches.append([])
                room, size = budget, unit.alone
            batches[-1] += unit.rows
            room -= size
    return tuple(tuple(batch) for batch in batches)


def _common(one: Sequence[Any], two: Sequence[Any]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))
