"""Rows of different lengths in one pass: their tokens laid end to end, what they begin alike with only once.

Linear layers see the N distinct tokens. Attention sees whole rows, right-padded in bins of similar length: right
padding comes after every real query, so causality alone keeps rows and padding apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.errors import DataError

_SHARED = 16  # tokens that rows must have in common before it pays to run them once
_FILLED = 0.6  # a row shorter than this share of its bin's longest goes into the next bin


@dataclass(frozen=True, slots=True)
class Stretch:
    """Tokens that several rows have in common: where they are among the N, and in which rows, from which position."""

    start: int
    length: int
    position: int
    rows: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Bin:
    """Rows that attend together, in the order of their tokens: rows with a common stretch are neighbours."""

    rows: tuple[int, ...]
    longest: int


@dataclass(frozen=True)
class PackedRows:
    """Ids and positions of the N distinct tokens, and where each row's own are among them (`where_T`, row by row)."""

    ids_N: Tensor
    positions_N: Tensor
    lengths: tuple[int, ...]
    where_T: Tensor
    shared: tuple[Stretch, ...] = ()
    order: tuple[int, ...] = ()
    """The rows sorted by their tokens, where they share any."""

    @classmethod
    def from_rows(
        cls, rows: Sequence[Sequence[Any]], share: bool = False, device: torch.device | str = "cpu"
    ) -> PackedRows:
        """Pack rows of integer ids; anything else among them cannot be read by a text model."""
        for row in rows:
            odd = next((token for token in row if not isinstance(token, int)), None)
            if odd is not None:
                raise DataError(f"a text model reads integer token ids, got {type(odd).__name__} {str(odd)[:60]!r}")
        if share and len(rows) > 1:
            return _without_repeats([np.asarray(row, dtype=np.int64) for row in rows], device)
        flat = [token for row in rows for token in row]
        positions = [position for row in rows for position in range(len(row))]
        return cls(
            torch.tensor(flat, dtype=torch.long, device=device),
            torch.tensor(positions, dtype=torch.long, device=device),
            tuple(len(row) for row in rows),
            torch.arange(len(flat), device=device),
        )

    @cached_property
    def layout(self) -> Layout:
        """How the rows stand side by side for attention."""
        return Layout(self)


class Layout:
    """The padded places of the rows, bin after bin.

    `source_P` says which token stands at a place (any, where there is padding) and `place_N` where a token's first
    copy stands. `plain`: every token has one place, in the order of the tokens, and there is nothing to move.
    """

    def __init__(self, rows: PackedRows) -> None:
        self.bins = _bins(rows.lengths, rows.order or range(len(rows.lengths)))
        device = rows.ids_N.device
        starts = np.concatenate(([0], np.cumsum(rows.lengths)))
        where_T = rows.where_T.cpu().numpy()
        sources = []
        for group in self.bins:
            places = np.zeros((len(group.rows), group.longest), dtype=np.int64)
            for place, row in zip(places, group.rows, strict=True):
                place[: rows.lengths[row]] = where_T[starts[row] : starts[row + 1]]
            sources.append(places.reshape(-1))
        source_P = np.concatenate(sources)
        real_P = np.concatenate([_real(group, rows.lengths) for group in self.bins])
        place_N = np.full(len(rows.ids_N), -1, dtype=np.int64)
        filled = np.flatnonzero(real_P)[::-1]  # the first copy is written last
        place_N[source_P[filled]] = filled
        self.count = len(source_P)
        self.plain = len(rows.ids_N) == self.count and bool((place_N == np.arange(self.count)).all())
        self.source_P = torch.from_numpy(source_P).to(device)
        self.place_N = torch.from_numpy(place_N).to(device)
        first_P = np.zeros(self.count, dtype=bool)
        first_P[place_N] = True
        self.first_P = torch.from_numpy(first_P).to(device)
        self.repeats = [repeat for stretch in rows.shared for repeat in self._repeats(stretch)]

    def _repeats(self, stretch: Stretch) -> list[tuple[slice, int, slice, slice, bool]]:
        """(its tokens, the bin, the rows of the bin, the positions, whether it is the first bin), per bin."""
        members = set(stretch.rows)
        tokens = slice(stretch.start, stretch.start + stretch.length)
        positions = slice(stretch.position, stretch.position + stretch.length)
        found: list[tuple[slice, int, slice, slice, bool]] = []
        for index, group in enumerate(self.bins):
            inside = [i for i, row in enumerate(group.rows) if row in members]
            if inside:
                found.append((tokens, index, slice(inside[0], inside[-1] + 1), positions, not found))
        return found

    def by_bin(self, x_P: Tensor) -> list[Tensor]:
        """Views [rows, longest, ...] of a padded tensor."""
        sizes = [len(group.rows) * group.longest for group in self.bins]
        return [
            part.unflatten(0, (len(group.rows), group.longest))
            for part, group in zip(x_P.split(sizes), self.bins, strict=True)
        ]

    def spread(self, x_N: Tensor) -> Tensor:
        """From the tokens to their places [P, ...]."""
        return x_N.index_select(0, self.source_P)

    def spread_backward(self, grad_P: Tensor) -> Tensor:
        """The gradient of `spread`: a token has that of all its copies."""
        grad_N = grad_P.index_select(0, self.place_N)
        parts = self.by_bin(grad_P) if self.repeats else []
        for tokens, index, rows, positions, first in self.repeats:
            total = parts[index][rows, positions].sum(0)
            if first:
                grad_N[tokens] = total
            else:
                grad_N[tokens] += total
        return grad_N

    def collect(self, x_P: Tensor) -> Tensor:
        """From the places back to the tokens: of several copies, which are alike, the first."""
        return x_P.index_select(0, self.place_N)

    def collect_backward(self, grad_N: Tensor) -> Tensor:
        """The gradient of `collect`."""
        return grad_N.index_select(0, self.source_P).mul_(self.first_P[:, None])


def _real(group: Bin, lengths: Sequence[int]) -> np.ndarray:
    held = np.array([lengths[row] for row in group.rows])
    return (np.arange(group.longest)[None] < held[:, None]).reshape(-1)


def _bins(lengths: Sequence[int], order: Sequence[int]) -> list[Bin]:
    """Rows of similar length together; within a bin they keep the order."""
    chosen: list[list[int]] = []
    for row in sorted(order, key=lambda row: -lengths[row]):
        if not chosen or lengths[row] < _FILLED * lengths[chosen[-1][0]]:
            chosen.append([])
        chosen[-1].append(row)
    rank = {row: i for i, row in enumerate(order)}
    return [Bin(tuple(sorted(rows, key=rank.__getitem__)), lengths[rows[0]]) for rows in chosen]


def _without_repeats(rows: Sequence[np.ndarray], device: torch.device | str) -> PackedRows:
    """Walk down the tree of common beginnings; a branch shorter than `_SHARED` is left to each of its rows."""
    order = sorted(range(len(rows)), key=lambda i: rows[i].tolist())
    common = [_common(rows[one], rows[two]) for one, two in pairwise(order)]
    where = [np.empty(len(row), dtype=np.int64) for row in rows]
    ids: list[np.ndarray] = []
    positions: list[np.ndarray] = []
    shared: list[Stretch] = []
    count = 0
    todo = [(0, len(order), 0)]  # rows order[low:high], whose first `done` tokens are placed
    while todo:
        low, high, done = todo.pop()
        one = rows[order[low]]
        alike = len(one) if high - low == 1 else min(common[low : high - 1])
        if high - low == 1 or alike - done >= _SHARED:
            for row in order[low:high]:
                where[row][done:alike] = np.arange(count, count + alike - done)
            ids.append(one[done:alike])
            positions.append(np.arange(done, alike))
            if high - low > 1:
                shared.append(Stretch(count, alike - done, done, tuple(order[low:high])))
            count += alike - done
            done = alike
        if high - low > 1:
            forks = [i + 1 for i in range(low, high - 1) if common[i] == alike]
            todo += zip((low, *forks), (*forks, high), (done,) * (len(forks) + 1), strict=True)
    return PackedRows(
        torch.from_numpy(np.concatenate(ids)).to(device),
        torch.from_numpy(np.concatenate(positions)).to(device),
        tuple(len(row) for row in rows),
        torch.from_numpy(np.concatenate(where)).to(device),
        tuple(shared),
        tuple(order) if shared else (),
    )


def _common(one: np.ndarray, two: np.ndarray) -> int:
    size = min(len(one), len(two))
    differ = np.flatnonzero(one[:size] != two[:size])
    return int(differ[0]) if len(differ) else size
