"""Rows of different lengths in one pass: their tokens laid end to end, shared prefixes only once.

The tokens make a tree of pieces: what several rows have in common, then what is theirs alone. A token sees its own
piece up to itself, and all of the pieces that its piece hangs on. Below a piece, its descendants are contiguous.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.errors import DataError
from headrace.models.transfer import upload

_SHARED = 16  # tokens that rows must have in common before it pays to run them once
_FILLED = 0.6  # a piece shorter than this share of its bin's longest goes into the next bin


@dataclass(frozen=True, slots=True)
class Stem:
    """A piece that several rows have in common, and the tokens below it, all of which see all of it."""

    piece: slice
    below: slice


@dataclass(frozen=True)
class PackedRows:
    """Ids and positions of the N distinct tokens, and where each row's own are among them (`where_T`, row by row)."""

    ids_N: Tensor
    positions_N: Tensor
    lengths: tuple[int, ...]
    where_T: Tensor
    pieces: tuple[int, ...]
    """Lengths of the pieces, which stand end to end."""
    stems: tuple[Stem, ...] = ()
    routed_NS: Tensor | None = None
    """Experts that the tokens are routed to, of a model that replays routing (`RoutingReplay`)."""

    @classmethod
    def from_rows(
        cls, rows: Sequence[Sequence[Any]], share: bool = False, device: torch.device | str = "cpu",
        begin: Sequence[int] | None = None,
    ) -> PackedRows:  # fmt: skip
        """Pack rows of integer ids; anything else among them cannot be read by a text model.

        `begin` has each row's first position, for rows that continue a cached prefix (and share nothing).
        """
        require_text(rows)
        if share and len(rows) > 1:
            return _without_repeats([np.asarray(row, dtype=np.int64) for row in rows], device)
        flat = [token for row in rows for token in row]
        firsts = begin or [0] * len(rows)
        positions = [first + i for row, first in zip(rows, firsts, strict=True) for i in range(len(row))]
        lengths = tuple(len(row) for row in rows)
        return cls(
            torch.tensor(flat, dtype=torch.long, device=device),
            torch.tensor(positions, dtype=torch.long, device=device),
            lengths,
            torch.arange(len(flat), device=device),
            lengths,
        )

    def to(self, device: torch.device, *more: np.ndarray) -> tuple[PackedRows, list[Tensor]]:
        """These rows and more arrays on a device, in one transfer. The rows must be on the CPU."""
        if device.type == "cpu":
            return self, [torch.from_numpy(array) for array in more]
        own = [tensor.numpy() for tensor in (self.ids_N, self.positions_N, self.where_T, *self.attention.tensors)]
        moved = upload([*own, *more], device)
        ids_N, positions_N, where_T = moved[:3]
        there = replace(self, ids_N=ids_N, positions_N=positions_N, where_T=where_T)
        there.__dict__["attention"] = AttentionBins(self.attention.shapes, *moved[3 : len(own)])
        return there, moved[len(own) :]

    def routed_to(self, routed_NS: Tensor | None) -> PackedRows:
        """These rows, routed to experts; they must share no prefixes."""
        if routed_NS is None:
            return self
        there = replace(self, routed_NS=routed_NS)
        there.__dict__["attention"] = self.attention  # on their device already
        return there

    @cached_property
    def attention(self) -> AttentionBins:
        """How complete rows stand side by side for attention."""
        return AttentionBins.of(self)

    @cached_property
    def tree(self) -> Tree:
        """Which pieces hang on which."""
        return Tree(self)

    @cached_property
    def layout(self) -> Layout:
        """How the pieces stand side by side for attention."""
        return Layout(self)


@dataclass(frozen=True, slots=True)
class AttentionBins:
    """Complete rows, right-padded in bins [rows, longest] of similar length; and end to end.

    `source_P` says which distinct token stands at a place of the bins (any, where there is padding), `place_N` where
    one of a distinct token's places is. End to end, `first_N` is one of its places, and row r ends at `ends_R[r + 1]`.
    """

    shapes: tuple[tuple[int, int], ...]
    source_P: Tensor
    place_N: Tensor
    first_N: Tensor
    ends_R: Tensor

    @classmethod
    def of(cls, rows: PackedRows) -> AttentionBins:
        where_T = rows.where_T.numpy()
        starts = np.concatenate(([0], np.cumsum(rows.lengths)))
        shapes, sources, reals = [], [], []
        for chosen in _bins(rows.lengths):
            held = np.array([rows.lengths[row] for row in chosen])
            real = np.arange(held.max())[None] < held[:, None]
            shapes.append(real.shape)
            sources.append(where_T[((starts[chosen][:, None] + np.arange(held.max())[None]) * real).reshape(-1)])
            reals.append(real.reshape(-1))
        source_P, filled = np.concatenate(sources), np.flatnonzero(np.concatenate(reals))
        place_N, first_N = (np.empty(len(rows.ids_N), dtype=np.int64) for _ in range(2))
        place_N[source_P[filled]] = filled
        first_N[where_T] = np.arange(len(where_T))
        arrays = (source_P, place_N, first_N, starts.astype(np.int32))
        return cls(tuple(shapes), *map(torch.from_numpy, arrays))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.source_P, self.place_N, self.first_N, self.ends_R

    @property
    def plain(self) -> bool:
        """Whether there is one row alone, and nothing to move."""
        return len(self.shapes) == 1 and self.shapes[0][0] == 1


def require_text(rows: Iterable[Sequence[Any]]) -> None:
    """Raise DataError for tokens that are no integer ids."""
    for row in rows:
        if set(map(type, row)) <= {int}:
            continue
        odd = next((token for token in row if not isinstance(token, int)), None)
        if odd is not None:
            raise DataError(f"a text model reads integer token ids, got {type(odd).__name__} {str(odd)[:60]!r}")


class Tree:
    """For each piece: where it starts, its length, where what is below it ends, and the pieces that it hangs on.

    Those of piece p are `above[first_above[p] : first_above[p + 1]]`. `longest`: the tokens of the longest way down.
    """

    def __init__(self, rows: PackedRows) -> None:
        self.lengths = np.array(rows.pieces, dtype=np.int64)
        self.starts = np.cumsum(self.lengths) - self.lengths
        self.ends = self.starts + self.lengths
        above: list[list[int]] = [[] for _ in rows.pieces]
        for stem in rows.stems:
            piece = int(np.searchsorted(self.starts, stem.piece.start))
            self.ends[piece] = stem.below.stop
            for under in range(piece + 1, int(np.searchsorted(self.starts, stem.below.stop))):
                above[under].append(piece)
        self.first_above = np.cumsum([0, *map(len, above)])
        self.above = np.array([piece for pieces in above for piece in pieces], dtype=np.int64)
        ways = (self.lengths[pieces].sum() for pieces in above)
        self.longest = max((int(length + way) for length, way in zip(self.lengths, ways, strict=True)), default=0)


class Layout:
    """The pieces, right-padded in bins of similar length: causality alone keeps padding from what comes before it.

    `source_P` says which token stands at a place (any, where there is padding), `real_P` where there is no padding, and
    `place_N` where a token stands. `plain`: token i stands at place i, and there is nothing to move.
    """

    def __init__(self, rows: PackedRows) -> None:
        self.stems = rows.stems
        starts = np.concatenate(([0], np.cumsum(rows.pieces)))
        self._shapes: list[tuple[int, int]] = []
        sources, reals = [], []
        for pieces in _bins(rows.pieces):
            held = np.array([rows.pieces[piece] for piece in pieces])
            real = np.arange(held.max())[None] < held[:, None]
            self._shapes.append(real.shape)
            sources.append(((starts[pieces][:, None] + np.arange(held.max())[None]) * real).reshape(-1))
            reals.append(real.reshape(-1))
        source_P, real_P = np.concatenate(sources), np.concatenate(reals)
        place_N = np.empty(len(rows.ids_N), dtype=np.int64)
        filled = np.flatnonzero(real_P)
        place_N[source_P[filled]] = filled
        self.plain = len(place_N) == len(source_P) and bool((place_N == np.arange(len(place_N))).all())
        self._source_P, self.real_P, self._place_N = (
            torch.from_numpy(array).to(rows.ids_N.device) for array in (source_P, real_P, place_N)
        )

    def spread(self, x_N: Tensor) -> Tensor:
        """From the tokens to their places."""
        return x_N if self.plain else x_N.index_select(0, self._source_P)

    def collect(self, parts: Sequence[Tensor]) -> Tensor:
        """From the places, bin by bin [pieces, longest, ...], back to the tokens."""
        flat = [part.flatten(0, 1) for part in parts]
        x_P = flat[0] if len(flat) == 1 else torch.cat(flat)
        return x_P if self.plain else x_P.index_select(0, self._place_N)

    def by_bin(self, x_P: Tensor) -> list[Tensor]:
        """Views [pieces, longest, ...] of a padded tensor."""
        sizes = [pieces * longest for pieces, longest in self._shapes]
        return [part.unflatten(0, shape) for part, shape in zip(x_P.split(sizes), self._shapes, strict=True)]


def _bins(lengths: Sequence[int]) -> list[list[int]]:
    """Pieces of similar length together, in their order."""
    chosen: list[list[int]] = []
    for piece in sorted(range(len(lengths)), key=lambda piece: -lengths[piece]):
        if not chosen or lengths[piece] < _FILLED * lengths[chosen[-1][0]]:
            chosen.append([])
        chosen[-1].append(piece)
    return [sorted(pieces) for pieces in chosen]


def _without_repeats(rows: Sequence[np.ndarray], device: torch.device | str) -> PackedRows:
    """Walk down the tree of common beginnings; a branch shorter than `_SHARED` is left to each of its rows."""
    order = sorted(range(len(rows)), key=lambda i: rows[i].tolist())
    common = [_common(rows[one], rows[two]) for one, two in pairwise(order)]
    where = [np.empty(len(row), dtype=np.int64) for row in rows]
    ids: list[np.ndarray] = []
    positions: list[np.ndarray] = []
    shared: list[tuple[int, int, list[int]]] = []
    count = 0
    todo = [(0, len(order), 0)]  # rows order[low:high], whose first `done` tokens are placed
    while todo:
        low, high, done = todo.pop()
        one = rows[order[low]]
        shared_to = len(one) if high - low == 1 else min(common[low : high - 1])
        if shared_to > done and (high - low == 1 or shared_to - done >= _SHARED):
            for row in order[low:high]:
                where[row][done:shared_to] = np.arange(count, count + shared_to - done)
            ids.append(one[done:shared_to])
            positions.append(np.arange(done, shared_to))
            if high - low > 1:
                shared.append((count, count + shared_to - done, order[low:high]))
            count += shared_to - done
            done = shared_to
        if high - low > 1:
            forks = [i + 1 for i in range(low, high - 1) if common[i] == shared_to]
            todo += zip((low, *forks), (*forks, high), (done,) * (len(forks) + 1), strict=True)
    stems = []
    for start, end, below in shared:
        last = max(int(where[row][-1]) + 1 for row in below)
        if last > end:  # else all its rows are the same
            stems.append(Stem(slice(start, end), slice(end, last)))
    return PackedRows(
        torch.from_numpy(np.concatenate(ids)).to(device),
        torch.from_numpy(np.concatenate(positions)).to(device),
        tuple(len(row) for row in rows),
        torch.from_numpy(np.concatenate(where)).to(device),
        tuple(len(piece) for piece in ids),
        tuple(stems),
    )


def _common(one: np.ndarray, two: np.ndarray) -> int:
    size = min(len(one), len(two))
    differ = np.flatnonzero(one[:size] != two[:size])
    return int(differ[0]) if len(differ) else size
