"""A second copy of the weights for decoding, laid out as the matrix library wants them for a certain number of rows.

A product of a few rows spends much of its time on bringing the weights into that layout. To do it beforehand costs
about as much as two steps of decoding, and it must be done again when the weights change: so it waits until some steps
with about as many sequences have passed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from headrace.models.linear import FusedLinear

_GRAIN = 32
_SMALL = 16
_PATIENCE = 4  # steps
_WASTE = 1.35  # rows of a layout, as a multiple of those that are needed


class Prepacked:
    """Of all linear layers of one model; used by the thread that decodes."""

    def __init__(self, linears: Sequence[FusedLinear]) -> None:
        weight = linears[0].weight
        usable = torch.backends.mkl.is_available() and weight.device.type == "cpu" and weight.dtype == torch.float32
        self._linears = list(linears) if usable and hasattr(torch.ops.mkl, "_mkl_linear") else []
        self.rows = 0
        self._waited = 0

    def rows_for(self, count: int) -> int:
        """How many rows to decode `count` sequences with; 0: as many as there are, by the plain weights."""
        if count == 1 or not self._linears:  # a single row is read, not multiplied
            return 0
        if rows := self.fitting(count):
            self._waited = 0
            return rows
        self._waited += 1
        if self._waited <= _PATIENCE:
            return 0
        self.rows, self._waited = _needed(count), 0
        for linear in self._linears:
            linear.pack(self.rows)
        return self.rows

    def fitting(self, count: int) -> int:
        """The rows of the layout that there is, if it serves so many sequences; else 0."""
        needed = _needed(count)
        return self.rows if count > 1 and needed <= self.rows <= max(_WASTE * needed, _SMALL) else 0

    def drop(self) -> None:
        """The weights have changed."""
        for linear in self._linears:
            linear.pack(0)
        self.rows = self._waited = 0


def _needed(count: int) -> int:
    return _SMALL if count <= _SMALL else -(-count // _GRAIN) * _GRAIN
