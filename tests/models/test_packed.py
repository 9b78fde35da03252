"""Rows laid end to end: what they begin alike with stands there once, and every token sees its own row and no other."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fakes import examples
from headrace.models.packed import PackedRows
from tiny import random_rows

Rows = list[list[int]]
SHARED = 16
FIRST, SECOND, THIRD = random_rows(20, 20, 20)


def pack(rows: Rows) -> PackedRows:
    return PackedRows.from_rows(rows, share=True)


def stems(packed: PackedRows) -> set[tuple[int, int, int, int]]:
    return {(s.piece.start, s.piece.stop, s.below.start, s.below.stop) for s in packed.stems}


def seen_by(packed: PackedRows) -> list[set[int]]:
    """What attention by pieces lets each token see: its piece up to itself, and the stems that it is below."""
    seen: list[set[int]] = []
    start = 0
    for length in packed.pieces:
        seen += [set(range(start, token + 1)) for token in range(start, start + length)]
        start += length
    for stem in packed.stems:
        for token in range(stem.below.start, stem.below.stop):
            seen[token] |= set(range(stem.piece.start, stem.piece.stop))
    return seen


def assert_holds(packed: PackedRows, rows: Rows) -> None:
    """Every row is there in its order, and a token sees what stands before it in its row: no more, no less, once."""
    assert packed.lengths == tuple(len(row) for row in rows)
    assert sum(packed.pieces) == len(packed.ids_N) == len(packed.positions_N)
    seen = seen_by(packed)
    for row, where in zip(rows, packed.where_T.split(packed.lengths), strict=True):
        assert packed.ids_N[where].tolist() == row
        assert packed.positions_N[where].tolist() == list(range(len(row)))
        for position, token in enumerate(where.tolist()):
            assert seen[token] == set(where[: position + 1].tolist())
    assert set(packed.where_T.tolist()) == set(range(len(packed.ids_N)))


def distinct_tokens(rows: Rows) -> int:
    """A token is the same as another if all before it are, too."""
    return len({tuple(row[: end + 1]) for row in rows for end in range(len(row))})


def tokens_to_run(rows: Rows, done: int = 0) -> int:
    """By the definition: what all rows have in common runs once if it is long enough, else each branch has it again."""
    if len(rows) == 1:
        return len(rows[0]) - done
    alike = next((i for i, column in enumerate(zip(*rows, strict=False)) if len(set(column)) > 1), min(map(len, rows)))
    placed = alike if alike - done >= SHARED else done
    branches: dict[Any, Rows] = {}
    for index, row in enumerate(rows):  # a row that ends here has no branch in common with anyone
        branches.setdefault(row[alike] if len(row) > alike else (index,), []).append(row)
    return placed - done + sum(tokens_to_run(branch, placed) for branch in branches.values())


# ---- worked trees -------------------------------------------------------------------------------------------------


def test_rows_with_nothing_in_common_stand_end_to_end() -> None:
    rows = random_rows(30, 1, 17)
    packed = pack(rows)
    assert_holds(packed, rows)
    assert len(packed.ids_N) == 48 and not packed.stems and sorted(packed.pieces) == [1, 17, 30]


def test_without_sharing_repeats_stay() -> None:
    packed = PackedRows.from_rows([FIRST, FIRST])
    assert packed.ids_N.tolist() == FIRST + FIRST
    assert packed.where_T.tolist() == list(range(40)) and packed.pieces == (20, 20) and not packed.stems


def test_the_prompt_of_a_group_stands_there_once() -> None:
    rows = [FIRST + [token] * 3 for token in (5, 3, 4)]
    packed = pack(rows)
    assert_holds(packed, rows)
    assert packed.pieces == (20, 3, 3, 3) and stems(packed) == {(0, 20, 20, 29)}


def test_beginnings_are_shared_within_beginnings() -> None:
    rows = [[*FIRST, *SECOND, 1], [*FIRST, *THIRD], [*FIRST, *SECOND, 2, 2], [*SECOND, 3], [*SECOND, 4]]
    packed = pack(rows)
    assert_holds(packed, rows)
    assert len(packed.ids_N) == distinct_tokens(rows) == 20 + 20 + 1 + 20 + 2 + 20 + 2
    assert len(packed.stems) == 3
    below = {tuple(packed.ids_N[s.piece].tolist()): [] for s in packed.stems}
    for stem in packed.stems:
        below[tuple(packed.ids_N[stem.piece].tolist())].append(stem.below.stop - stem.below.start)
    assert below[tuple(FIRST)] == [43] and sorted(below[tuple(SECOND)]) == [2, 3]


def test_rows_that_are_the_same_run_once() -> None:
    packed = pack([FIRST, SECOND, FIRST, FIRST])
    assert_holds(packed, [FIRST, SECOND, FIRST, FIRST])
    assert packed.pieces == (20, 20) and not packed.stems  # nothing hangs on it


def test_a_row_may_be_the_beginning_of_another() -> None:
    rows = [[*FIRST, *SECOND], FIRST, [*FIRST, 5]]
    packed = pack(rows)
    assert_holds(packed, rows)
    assert len(packed.ids_N) == 41 and stems(packed) == {(0, 20, 20, 41)}


@pytest.mark.parametrize(("alike", "run"), [(SHARED - 1, 2 * (SHARED - 1) + 6), (SHARED, SHARED + 6)])
def test_a_short_beginning_is_not_shared(alike: int, run: int) -> None:
    rows = [[*FIRST[:alike], 1, 1, 1], [*FIRST[:alike], 2, 2, 2]]
    packed = pack(rows)
    assert_holds(packed, rows)
    assert len(packed.ids_N) == run and len(packed.stems) == (alike == SHARED)


def test_a_short_branch_belongs_to_each_of_its_rows() -> None:
    branch = SECOND[: SHARED - 1]
    rows = [[*FIRST, *branch, 1], [*FIRST, *branch, 2], [*FIRST, *THIRD]]
    packed = pack(rows)
    assert_holds(packed, rows)
    assert len(packed.ids_N) == 20 + 2 * SHARED + 20 and len(packed.stems) == 1


def test_a_short_beginning_of_all_counts_for_those_that_have_more_in_common() -> None:
    rows = [[*FIRST[:15], 1, 1], [*FIRST[:15], 1, 2], [*FIRST[:15], 2, 2]]
    packed = pack(rows)
    assert_holds(packed, rows)
    assert len(packed.ids_N) == 16 + 2 + 17


def test_short_rows_that_are_the_same_are_left_alone() -> None:
    rows = [[7] * 3] * 4
    packed = pack(rows)
    assert_holds(packed, rows)
    assert len(packed.ids_N) == 12 and not packed.stems


def test_a_single_row_is_itself() -> None:
    packed = pack([FIRST])
    assert packed.ids_N.tolist() == FIRST and packed.pieces == (20,) and not packed.stems


# ---- any rows -----------------------------------------------------------------------------------------------------


@st.composite
def trees(draw: Any) -> Rows:
    """Rows that go on from a place in an earlier one, or begin anew; few ids, so that they meet by chance as well."""
    rng = random.Random(draw(st.integers(0, 10**6)))
    rows: Rows = []
    for _ in range(draw(st.integers(1, 8))):
        begun = rng.choice([*rows, []])
        kept = begun[: rng.choice([len(begun), rng.randint(0, len(begun))])]
        grown = kept + [rng.randint(0, 1) for _ in range(rng.choice([0, 1, 5, 16, 40]))]
        rows.append(grown or [1])
    rng.shuffle(rows)
    return rows


@examples
@given(trees())
def test_any_rows_come_back_and_see_only_themselves(rows: Rows) -> None:
    packed = pack(rows)
    assert_holds(packed, rows)
    assert len(packed.ids_N) == tokens_to_run(rows)
    assert_holds(PackedRows.from_rows(rows), rows)


@examples
@given(trees())
def test_pieces_that_are_long_enough_leave_nothing_twice(rows: Rows) -> None:
    long = [[token for token in row for _ in range(SHARED)] for row in rows]
    assert len(pack(long).ids_N) == distinct_tokens(long)


@examples
@given(trees(), st.booleans())
def test_places_side_by_side_lose_no_token(rows: Rows, share: bool) -> None:
    packed = PackedRows.from_rows(rows, share)
    layout, x_N1 = packed.layout, torch.arange(len(packed.ids_N))[:, None]
    spread_P1 = layout.spread(x_N1)
    bins = layout.by_bin(spread_P1)
    assert torch.equal(layout.collect(bins), x_N1)
    assert sorted(spread_P1[layout.real_P].flatten().tolist()) == x_N1.flatten().tolist()
    found = []
    for part, real in zip(bins, layout.by_bin(layout.real_P), strict=True):
        assert bool((real.sum(1) > 0.59 * real.shape[1]).all())  # little is padded
        assert bool((real[:, :-1] >= real[:, 1:]).all())  # on the right only
        found += [place[held].flatten().tolist() for place, held in zip(part, real, strict=True)]
    starts = [sum(packed.pieces[:i]) for i in range(len(packed.pieces))]
    want = [list(range(start, start + length)) for start, length in zip(starts, packed.pieces, strict=True)]
    assert sorted(found) == want


def test_equal_pieces_need_no_moving() -> None:
    assert PackedRows.from_rows([FIRST, SECOND]).layout.plain
    assert not PackedRows.from_rows([FIRST, SECOND[:15]]).layout.plain
