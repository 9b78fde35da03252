"""The trained tokens of a micro-batch as flat tensors, row after row."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.data.sample import NO_VERSION, Sample
from headrace.models.device import CPU
from headrace.models.packed import PackedRows
from headrace.models.routing import RoutingReplay

_NUMPY = {torch.long: np.int64, torch.float32: np.float32, torch.float64: np.float64}


class TokenTensors:
    """Axis M runs over the targets that the loss masks keep; `where_M` finds them among all N inputs.

    `counts` holds how many each row has, `dtype` is what losses are computed in. `valued_K` are the targets that have
    a return, for the value head to learn; None if no row has. All of it reaches the device in one transfer.
    """

    def __init__(
        self, samples: Sequence[Sample], weights: Sequence[float], dtype: torch.dtype = torch.float32,
        share: bool = False, device: torch.device = CPU, routing: RoutingReplay | None = None,
    ) -> None:  # fmt: skip
        rows = PackedRows.from_rows([sample.tokens[:-1] for sample in samples], share)
        self.counts = [sum(sample.loss_mask) for sample in samples]
        self._targets, self._kind = sum(rows.lengths), _NUMPY[dtype]
        self._kept_T = self._array([sample.loss_mask for sample in samples], bool)
        returned = [sample.returns is not None for sample in samples]
        arrays = {
            "where": rows.where_T.numpy()[self._kept_T],
            "targets": self._select([sample.tokens[1:] for sample in samples], np.int64),
            "sampler": self._select([sample.logprobs for sample in samples]),
            "advantages": self._select([sample.advantages for sample in samples]),
            "sampled": self._select([sample.versions for sample in samples], np.int64) != NO_VERSION,
            "old": self._select_given([sample.old_logprobs for sample in samples]),
            "reference": self._select_given([sample.reference_logprobs for sample in samples]),
            "returns": self._select([sample.returns or (0.0,) * len(sample.loss_mask) for sample in samples]),
            "valued": np.flatnonzero(self._by_row(returned, bool)) if any(returned) else None,
            "row": self._by_row(range(len(samples)), np.int64),
            "temperatures": self._by_row([sample.temperature for sample in samples], self._kind),
            "weights": self._by_row(weights, self._kind),
            "routed": routing.packed([sample.routed_experts for sample in samples], rows.lengths) if routing else None,
        }
        given = {name: array for name, array in arrays.items() if array is not None}
        moved_rows, moved = rows.to(device, *given.values())
        tensors = dict(zip(given, moved, strict=True))
        self.rows = moved_rows.routed_to(tensors.get("routed"))
        self.where_M, self.targets_M, self.sampler_M = (tensors[name] for name in ("where", "targets", "sampler"))
        self.advantages_M, self.sampled_M, self.returns_M = (
            tensors[name] for name in ("advantages", "sampled", "returns")
        )
        self.row_M, self.temperatures_M, self.weights_M = (tensors[name] for name in ("row", "temperatures", "weights"))
        self.old_M, self.reference_M, self.valued_K = (tensors.get(name) for name in ("old", "reference", "valued"))

    def _select(self, rows: Sequence[Any], kind: Any = None) -> np.ndarray:
        """The entries that the loss masks keep."""
        return self._array(rows, kind or self._kind)[self._kept_T]

    def _select_given(self, rows: Sequence[Any]) -> np.ndarray | None:
        """As `_select`; None unless every row is given."""
        return None if any(row is None for row in rows) else self._select(rows)

    def _array(self, rows: Sequence[Any], kind: Any) -> np.ndarray:
        return np.fromiter(chain.from_iterable(rows), kind, self._targets)

    def _by_row(self, values: Sequence[Any], kind: Any) -> np.ndarray:
        return np.repeat(np.array(values, kind), self.counts)


class TokenValues:
    """What was computed of trained tokens, gathered micro-batch by micro-batch and given back by sample."""

    def __init__(self, samples: int) -> None:
        self._rows: list[tuple[tuple[Any, ...], ...]] = [((), (), ())] * samples

    def add(
        self, indices: Sequence[int], counts: Sequence[int], logprobs_M: Tensor, entropy_M: Tensor, clip_M: Tensor
    ) -> None:
        """The values of a micro-batch, on the host; `counts`: targets of each sample. `entropy_M` may be empty."""
        sizes = list(counts)
        columns = [one.split(sizes) for one in (logprobs_M, clip_M.long())]
        entropies = entropy_M.split(sizes) if entropy_M.numel() else [entropy_M] * len(sizes)
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
