"""The trained tokens of a micro-batch as flat tensors, row after row."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.data.sample import NO_VERSION, Sample
from headrace.models.packed import PackedRows

_NUMPY = {torch.long: np.int64, torch.float32: np.float32, torch.float64: np.float64}


class TokenTensors:
    """Axis M runs over the targets that the loss masks keep; `where_M` finds them among all N inputs.

    `counts` holds how many each row has, `dtype` is what losses are computed in. `valued_M` says which targets have a
    return, for the value head to learn.
    """

    def __init__(
        self, samples: Sequence[Sample], weights: Sequence[float], dtype: torch.dtype = torch.float32,
        share: bool = False,
    ) -> None:  # fmt: skip
        self._dtype = dtype
        self.rows = PackedRows.from_rows([sample.tokens[:-1] for sample in samples], share)
        self.counts = [sum(sample.loss_mask) for sample in samples]
        self._targets = sum(self.rows.lengths)
        self._kept_T = self._array([sample.loss_mask for sample in samples], bool)
        self.where_M = self.rows.where_T[torch.from_numpy(self._kept_T)]
        self.targets_M = self.select([sample.tokens[1:] for sample in samples], torch.long)
        self.sampler_M = self.select([sample.logprobs for sample in samples])
        self.advantages_M = self.select([sample.advantages for sample in samples])
        self.sampled_M = self.select([sample.versions for sample in samples], torch.long) != NO_VERSION
        self.old_M = self.select_given([sample.old_logprobs for sample in samples])
        self.reference_M = self.select_given([sample.reference_logprobs for sample in samples])
        self.returns_M = self.select([sample.returns or (0.0,) * len(sample.loss_mask) for sample in samples])
        self.valued_M = self._by_row([sample.returns is not None for sample in samples], bool)
        self.row_M = self._by_row(range(len(samples)), np.int64)
        self.temperatures_M = self._by_row([sample.temperature for sample in samples], _NUMPY[dtype])
        self.weights_M = self._by_row(weights, _NUMPY[dtype])

    def select(self, rows: Sequence[Any], dtype: torch.dtype | None = None) -> Tensor:
        """One tensor of the entries that the loss masks keep."""
        return torch.from_numpy(self._array(rows, _NUMPY[dtype or self._dtype])[self._kept_T])

    def select_given(self, rows: Sequence[Any]) -> Tensor | None:
        """As `select`; None unless every row is given."""
        return None if any(row is None for row in rows) else self.select(rows)

    def _array(self, rows: Sequence[Any], dtype: type) -> np.ndarray:
        return np.fromiter(chain.from_iterable(rows), dtype, self._targets)

    def _by_row(self, values: Sequence[Any], dtype: type) -> Tensor:
        return torch.from_numpy(np.repeat(np.array(values, dtype), self.counts))


class TokenValues:
    """What was computed of trained tokens, gathered micro-batch by micro-batch and given back by sample."""

    def __init__(self, samples: int) -> None:
        self._rows: list[tuple[tuple[Any, ...], ...]] = [((), (), ())] * samples

    def add(
        self, indices: Sequence[int], counts: Sequence[int], logprobs_M: Tensor, entropy_M: Tensor, clip_M: Tensor
    ) -> None:
        """The values of a micro-batch: its samples, and how many targets each has. `entropy_M` may be empty."""
        sizes = list(counts)
        columns = [one.detach().split(sizes) for one in (logprobs_M, clip_M)]
        entropies = entropy_M.detach().split(sizes) if entropy_M.numel() else [entropy_M] * len(sizes)
        for index, logprobs, clip, entropy in zip(indices, *columns, entropies, strict=True):
            self._rows[index] = (tuple(logprobs.tolist()), tuple(entropy.tolist()), tuple(clip.tolist()))

    @property
    def logprobs(self) -> tuple[tuple[float, ...], ...]:
        """Per sample."""
        return tuple(row[0] for row in self._rows)

    @property
    def entropies(self) -> tuple[tuple[float, ...], ...]:
        """Per sample; empty where they are not known."""
        known = all(len(row[1]) == len(row[0]) for row in self._rows)
        return tuple(row[1] for row in self._rows) if known else ()

    @property
    def clip_states(self) -> tuple[tuple[int, ...], ...]:
        """Per sample."""
        return tuple(row[2] for row in self._rows)
