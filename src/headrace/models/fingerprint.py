"""A digest of weights, by which a publication proves that it arrived."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
import xxhash
from torch import Tensor

_PARTS = 8
_THREADS = 2  # one does not read as fast as memory can
_WORTH_THREADS = 2**24  # bytes


def fingerprint(given: Iterable[Tensor]) -> str:
    """A digest that a change of any of the weights changes: of the digests of parts that are about equally long."""
    weights = list(given)
    total = sum(weight.nbytes for weight in weights)
    parts: list[list[Tensor]] = [[] for _ in range(_PARTS)]
    before = 0
    for weight in weights:
        parts[min(_PARTS * before // max(total, 1), _PARTS - 1)].append(weight)
        before += weight.nbytes
    if total < _WORTH_THREADS:
        digests = list(map(_digest, parts))
    else:
        with ThreadPoolExecutor(_THREADS) as pool:
            digests = list(pool.map(_digest, parts))
    return xxhash.xxh3_64(b"".join(digests)).hexdigest()


def _digest(weights: Sequence[Tensor]) -> bytes:
    digest = xxhash.xxh3_64()
    for weight in weights:
        digest.update(weight.detach().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.digest()
