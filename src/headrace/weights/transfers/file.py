"""Transport "file": tensors in a file in memory that learner and servers have mapped. For one machine."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import BinaryIO

import numpy as np
import torch

from headrace.utils.bulk_copy import bulk_map
from headrace.weights.base import Endpoint, TensorInfo, TensorStream, described
from headrace.weights.control import control
from headrace.weights.transfers.receipts import compare_receipts
from headrace.weights.vllm_plugin.headrace_vllm.checksum import checksum

_ALIGNMENT = 64
_CHUNK = 1 << 28
_NOTHING = 0


class FileTransfer:
    """Writes the tensors once, whatever the number of servers. A restarted server takes them from the same file."""

    def __init__(self) -> None:
        self._file: BinaryIO | None = None
        self._path = ""
        self._map: mmap.mmap | None = None
        self._endpoints: list[Endpoint] = []
        self._joined: set[Endpoint] = set()

    def open(self, endpoints: Sequence[Endpoint], rank: int = 0) -> None:
        self._endpoints = list(endpoints)
        for endpoint in self._endpoints:
            if rank == 0 and endpoint not in self._joined:
                control(endpoint).join({})
        self._joined = set(self._endpoints)

    def send(self, source: TensorStream, version: int) -> str | None:
        infos = source.infos()
        starts, size = _layout(infos)
        workers = [endpoint.world_size for endpoint in self._endpoints]
        content = self._content(size + sum(workers) * len(infos) * 8)
        sums = _write(content, source, starts)
        receipts = content[size:].view(np.int64).reshape(sum(workers), len(infos))
        receipts[:] = _NOTHING
        update = {
            "path": self._path,
            "size": len(content),
            **described(infos),
            "starts": starts,
        }
        before = np.cumsum([0, *workers])
        with ThreadPoolExecutor(max(1, len(self._endpoints))) as threads:
            asked = [
                threads.submit(control(endpoint).receive, {**update, "receipts": int(size + first * len(infos) * 8)})
                for endpoint, first in zip(self._endpoints, before, strict=False)
            ]
        for one in asked:
            one.result()
        digest = None
        for number, endpoint in enumerate(self._endpoints):
            for row in receipts[before[number] : before[number + 1]]:
                digest = compare_receipts(update["names"], sums, row.tolist(), endpoint.url)
        return digest

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = self._map = None

    def _content(self, size: int) -> np.ndarray:
        if self._map is None or len(self._map) != size:
            self.close()
            self._file, self._path = _new_file()
            os.ftruncate(self._file.fileno(), size)
            self._map = mmap.mmap(self._file.fileno(), size)
        return np.frombuffer(self._map, dtype=np.uint8)


def _new_file() -> tuple[BinaryIO, str]:
    """A file in memory and where servers find it. It has no name that a killed process could leave behind."""
    if hasattr(os, "memfd_create"):
        file = os.memfd_create("headrace-weights")
        return os.fdopen(file, "r+b", buffering=0), f"/proc/{os.getpid()}/fd/{file}"
    named = tempfile.NamedTemporaryFile(prefix="headrace-weights-")  # noqa: SIM115  (it is held until close)
    return named, named.name  # type: ignore[return-value]


def _layout(infos: Sequence[TensorInfo]) -> tuple[list[int], int]:
    starts, end = [], 0
    for info in infos:
        starts.append(end)
        end += -(-info.nbytes // _ALIGNMENT) * _ALIGNMENT
    return starts, end


def _write(content: np.ndarray, source: TensorStream, starts: Sequence[int]) -> list[int]:
    """Copy every tensor to its place; the checksums of the tensors, not of the copies."""
    done = 0
    sums: list[int] = []
    for chunk in source.chunks(_CHUNK):
        flat = [tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8) for _, tensor in chunk]
        targets = [content[start : start + len(one)] for start, one in zip(starts[done:], flat, strict=False)]
        pairs = [(target, one.numpy()) for target, one in zip(targets, flat, strict=True)]
        bulk_map(lambda pair: np.copyto(*pair), pairs, sum(len(one) for one in flat))
        sums += bulk_map(checksum, flat, sum(len(one) for one in flat))
        done += len(chunk)
    return sums
