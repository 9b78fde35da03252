"""A digest of weights, which proves that a weight sync arrived."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import xxhash
from torch import Tensor

from headrace.utils.bulk_copy import bulk_map

_PARTS = 8


def fingerprint(given: Iterable[Tensor]) -> str:
    """A digest that a change of any of the weights changes: of the digests of parts that are about equally long."""
    weights = list(given)
    total = sum(weight.nbytes for weight in weights)
    parts: list[list[Tensor]] = [[] for _ in range(_PARTS)]
    before = 0
    for weight in weights:
        parts[min(_PARTS * before // max(total, 1), _PARTS - 1)].append(weight)
        before += weight.nbytes
    return xxhash.xxh3_64(b"".join(bulk_map(_digest, parts, total))).hexdigest()


def _digest(weights: Sequence[Tensor]) -> bytes:
    digest = xxhash.xxh3_64()
    for weight in weights:
        # on the host: what a device holds is read back, which proves that it is there
        digest.update(weight.detach().contiguous().flatten().view(torch.uint8).cpu().numpy().data)
    return digest.digest()
