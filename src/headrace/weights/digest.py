"""A digest of weights, which proves that a weight sync arrived."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import xxhash
from torch import Tensor

from headrace.utils.bulk_copy import bulk_map

_PARTS = 8


def weight_digest(given: Iterable[Tensor]) -> str:
    """A digest that a change of any of the weights changes: of the digests of parts that are about equally long."""
    weights = list(given)
    total = sum(weight.nbytes for weight in weights)
    parts: list[list[Tensor]] = [[] for _ in range(_PARTS)]
    before = 0
    for weight in weights:
        parts[_part(before, total)].append(weight)
        before += weight.nbytes
    return _joined(bulk_map(_digest, parts, total))


class StreamedDigest:
    """The same digest of tensors that come one after the other; `total` is how many bytes they have together."""

    def __init__(self, total: int) -> None:
        self._total, self._before = total, 0
        self._parts = [xxhash.xxh3_64() for _ in range(_PARTS)]

    def update(self, weight: Tensor) -> None:
        """The next tensor."""
        self._parts[_part(self._before, self._total)].update(_content(weight))
        self._before += weight.nbytes

    def hexdigest(self) -> str:
        """Of all that came."""
        return _joined([part.digest() for part in self._parts])


def _part(before: int, total: int) -> int:
    return min(_PARTS * before // max(total, 1), _PARTS - 1)


def _joined(digests: Iterable[bytes]) -> str:
    return xxhash.xxh3_64(b"".join(digests)).hexdigest()


def _digest(weights: Sequence[Tensor]) -> bytes:
    digest = xxhash.xxh3_64()
    for weight in weights:
        digest.update(_content(weight))
    return digest.digest()


def _content(weight: Tensor) -> memoryview:
    # on the host: what a device holds is read back, which proves that it is there
    return weight.detach().contiguous().flatten().view(torch.uint8).cpu().numpy().data
