"""Weights out of the ranks: full tensors under their Hugging Face names, gathered one after the other."""

from __future__ import annotations

import mmap
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.backends.fsdp.sharding import full
from headrace.weights.base import Endpoint, TensorInfo, Transfer
from headrace.weights.digest import StreamedDigest
from headrace.weights.sender import new_transfer
from headrace.weights.shared_memory import Layout
from headrace.weights.source import in_chunks


class GatheredWeights:
    """Trained tensors, sharded or not, as a stream. Every rank must read it to its end: gathering is collective."""

    def __init__(self, tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> None:
        self._tensors, self._dtype = tensors, dtype
        self._gathering = self._gather()

    def infos(self) -> list[TensorInfo]:
        """What will come, in order. Gathers nothing."""
        return [
            TensorInfo(
                name,
                str(self._dtype or tensor.dtype).removeprefix("torch."),
                tuple(tensor.shape),
                tensor.numel() * (self._dtype or tensor.dtype).itemsize,
            )
            for name, tensor in self._tensors.items()
        ]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self._gathering

    def chunks(self, max_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
        """Some at a time: as many as fit, and at least one."""
        return in_chunks(self, max_bytes)

    def drain(self) -> None:
        """Gather what is left, for the other ranks' sake."""
        for _ in self:
            pass

    def _gather(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._tensors.items():
            yield name, full(tensor).to(self._dtype or tensor.dtype)


class SendsWeights(ABC):
    """What a rank does with its trained weights. Every method is called on all ranks at once."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._transfers: dict[str, Transfer] = {}

    @abstractmethod
    def gathered(self) -> GatheredWeights:
        """The trained weights as a weight sync sends them; gathering them is collective."""

    @abstractmethod
    def adapter_config(self) -> dict[str, Any]:
        """What PEFT would write beside adapters."""

    def write_weights(self, layout: Layout | None, path: str, writers: Sequence[int]) -> str:
        """Gather the trained weights and write them to a mapped file; their digest, on rank 0."""
        return write_weights(self.gathered(), layout, path, writers, self.rank)

    def read_weights(self) -> tuple[str, list[tuple[str, Any]]]:
        """For an engine that is on no rank's machine: digest and bytes, on rank 0."""
        return read_weights(self.gathered(), self.rank)

    def send_weights(self, transport: str, endpoints: Sequence[Endpoint], version: int) -> str | None:
        """Send the trained weights to servers: rank 0 sends, all gather. What arrived, by whom rank 0 has asked."""
        stream = self.gathered()
        try:
            if self.rank == 0:
                if transport not in self._transfers:
                    arguments = (self.adapter_config(),) if transport == "adapter" else ()
                    self._transfers[transport] = new_transfer(transport, *arguments)
                transfer = self._transfers[transport]
                transfer.open(endpoints, self.rank)
                return transfer.send(stream, version)
            return None
        finally:  # also if a server was lost: the other ranks are gathering
            stream.drain()

    def close_transfers(self) -> None:
        """Give back what senders to servers hold."""
        for transfer in self._transfers.values():
            transfer.close()
        self._transfers.clear()


def write_weights(weights: GatheredWeights, layout: Layout | None, path: str, writers: Sequence[int], rank: int) -> str:
    """Gather all, and write them to a file that is mapped elsewhere, too; the digest of them, on rank 0.

    Tensor i is written by one of the ranks that can reach the file. Without a layout they are only digested.
    """
    digest = StreamedDigest(sum(info.nbytes for info in weights.infos()))
    buffer = _opened(path, layout) if layout is not None and rank in writers else None
    starts = {slot.name: slot.start for slot in layout.slots} if layout is not None else {}
    for number, (name, there) in enumerate(weights):
        tensor = there.cpu()
        if rank == 0:
            digest.update(tensor)
        if buffer is not None and writers[number % len(writers)] == rank:
            content = tensor.contiguous().flatten().view(torch.uint8).numpy()
            np.copyto(buffer[starts[name] : starts[name] + len(content)], content)
    return digest.hexdigest() if rank == 0 else ""


def read_weights(weights: GatheredWeights, rank: int) -> tuple[str, list[tuple[str, Any]]]:
    """For a rank 0 on another machine than the engine: digest, and the bytes of every tensor."""
    digest = StreamedDigest(sum(info.nbytes for info in weights.infos()))
    contents: list[tuple[str, Any]] = []
    for name, there in weights:
        if rank == 0:
            tensor = there.cpu()
            digest.update(tensor)
            contents.append((name, tensor.contiguous().flatten().view(torch.uint8).numpy()))
    return (digest.hexdigest() if rank == 0 else "", contents)


def _opened(path: str, layout: Layout) -> np.ndarray:
    file = os.open(path, os.O_RDWR)
    try:
        return np.frombuffer(mmap.mmap(file, layout.size), dtype=np.uint8)
    finally:
        os.close(file)
