"""TRL with its vLLM server on a machine without GPUs, for _trl_side.py. Nothing of Headrace is imported here.

TRL's server mode sends weights by NCCL and refuses any device but CUDA. Here its client is given another way to send
them: a file in memory, which Headrace's plugin in the server reads. All else is TRL's own: its requests, its importance
sampling correction, its order of calls.
"""
# pyright: reportMissingImports=false

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterator
from math import prod
from typing import Any

_ALIGNMENT = 64


class FileSender:
    """Writes tensors to a file in memory, and has the server load them."""

    def __init__(self, folder: str = "/dev/shm") -> None:
        self._folder = folder
        self._map: mmap.mmap | None = None
        self._path = ""
        self.instead_of = ""
        """What TRL's client says of its own way."""

    def send(self, client: Any, metadata: list[tuple[str, str, list[int]]], named: Iterator[tuple[str, Any]]) -> None:
        import torch

        starts, end = [], 0
        for _, dtype, shape in metadata:
            starts.append(end)
            end += -(-prod(shape) * getattr(torch, dtype).itemsize // _ALIGNMENT) * _ALIGNMENT
        content = self._content(end + 8 * len(metadata))
        for start, (_, tensor) in zip(starts, named, strict=True):
            flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
            content[start : start + len(flat)].copy_(flat)
        names, dtypes, shapes = (list(column) for column in zip(*metadata, strict=True))
        update = {"names": names, "dtype_names": dtypes, "shapes": shapes, "starts": starts, "receipts": end}
        info = {**update, "path": self._path, "size": len(content)}
        client._post(f"{client.base_url}/update_weights", json={"update_info": info})

    def close(self) -> None:
        if self._path:
            os.unlink(self._path)
        self._path = ""

    def _content(self, size: int) -> Any:
        import torch

        if self._map is None:
            file, self._path = tempfile.mkstemp(prefix="trl-weights-", dir=self._folder)
            os.ftruncate(file, size)
            self._map = mmap.mmap(file, size)
            os.close(file)
        return torch.frombuffer(self._map, dtype=torch.uint8)


def send_by_file() -> FileSender:
    """From now on TRL's client sends weights by file."""
    from trl.generation.vllm_client import VLLMClient

    sender = FileSender()
    by_nccl = VLLMClient.init_communicator

    def join(client: Any, device: Any = 0) -> None:
        try:
            by_nccl(client, device)
        except NotImplementedError as error:
            sender.instead_of = str(error)
        else:
            raise SystemExit("TRL can send weights by its own way here; this comparison is for machines without GPUs")
        client._post(f"{client.base_url}/init_weight_transfer_engine", json={"init_info": {}})

    def update(client: Any, metadata: Any, named_params: Any) -> None:
        client._start_weight_update()
        sender.send(client, metadata, named_params)
        client._finish_weight_update()

    VLLMClient.init_communicator = join
    VLLMClient.update_named_params = update
    return sender
