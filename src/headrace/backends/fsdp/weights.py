"""Weights out of the ranks: full tensors under their Hugging Face names, gathered one after the other."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.backends.fsdp.sharding import full
from headrace.weights.digest import StreamedFingerprint
from headrace.weights.shared_memory import Layout


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of what is sent."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * int(np.prod(self.shape, dtype=np.int64))


class GatheredWeights:
    """Trained tensors, sharded or not. Every rank must iterate to the end: gathering is collective."""

    def __init__(self, tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> None:
        self._tensors, self._dtype = tensors, dtype

    def infos(self) -> list[TensorInfo]:
        """What will come, in order. Gathers nothing."""
        return [
            TensorInfo(name, self._dtype or tensor.dtype, tuple(tensor.shape)) for name, tensor in self._tensors.items()
        ]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._tensors.items():
            yield name, full(tensor).to(device="cpu", dtype=self._dtype or tensor.dtype)


def write_weights(weights: GatheredWeights, layout: Layout | None, path: str, writers: Sequence[int], rank: int) -> str:
    """Gather all, and write them to a file that is mapped elsewhere, too; the fingerprint of them, on rank 0.

    Tensor i is written by one of the ranks that can reach the file. Without a layout they are only digested.
    """
    digest = StreamedFingerprint(sum(info.nbytes for info in weights.infos()))
    buffer = _opened(path, layout) if layout is not None and rank in writers else None
    starts = {slot.name: slot.start for slot in layout.slots} if layout is not None else {}
    for number, (name, tensor) in enumerate(weights):
        if rank == 0:
            digest.update(tensor)
        if buffer is not None and writers[number % len(writers)] == rank:
            content = tensor.contiguous().flatten().view(torch.uint8).numpy()
            np.copyto(buffer[starts[name] : starts[name] + len(content)], content)
    return digest.hexdigest() if rank == 0 else ""


def read_weights(weights: GatheredWeights, rank: int) -> tuple[str, list[tuple[str, Any]]]:
    """For a rank 0 on another machine than the engine: fingerprint, and the bytes of every tensor."""
    digest = StreamedFingerprint(sum(info.nbytes for info in weights.infos()))
    contents: list[tuple[str, Any]] = []
    for name, tensor in weights:
        if rank == 0:
            digest.update(tensor)
            contents.append((name, tensor.contiguous().flatten().view(torch.uint8).numpy()))
    return (digest.hexdigest() if rank == 0 else "", contents)


def _opened(path: str, layout: Layout) -> np.ndarray:
    file = os.open(path, os.O_RDWR)
    try:
        return np.frombuffer(mmap.mmap(file, layout.size), dtype=np.uint8)
    finally:
        os.close(file)
