"""Transport "ipc": servers read the learner's tensors in the memory of the GPU that they share.

Nothing is copied on the way. Built against vLLM's documented protocol; not run on GPUs.
"""

from __future__ import annotations

import base64
import pickle
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from headrace.errors import ConfigError
from headrace.weights.base import Endpoint, TensorStream
from headrace.weights.control import control

_CHUNK = 1 << 30


class IpcTransfer:
    """Sends handles of GPU memory, some tensors at a time; the server has read them when its call returns."""

    def __init__(self) -> None:
        self._endpoints: list[Endpoint] = []
        self._joined: set[Endpoint] = set()

    def open(self, endpoints: Sequence[Endpoint], rank: int = 0) -> None:
        for endpoint in endpoints:
            if endpoint.world_size != 1:
                raise ConfigError(
                    f'engine.transport = "ipc" shares one GPU with one worker, and {endpoint.url} has '
                    f'{endpoint.world_size}; set engine.transport = "nccl"'
                )
            if endpoint not in self._joined:
                control(endpoint).join({"packed": False})
        self._endpoints, self._joined = list(endpoints), set(endpoints)

    def send(self, source: TensorStream, version: int) -> str | None:
        for chunk in source.chunks(_CHUNK):
            kept = [(name, tensor.detach().contiguous()) for name, tensor in chunk]  # until the servers have read it
            self.synchronize()
            update = {
                "names": [name for name, _ in kept],
                "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in kept],
                "shapes": [list(tensor.shape) for _, tensor in kept],
                "ipc_handles_pickled": base64.b64encode(pickle.dumps([self.handle(one) for _, one in kept])).decode(),
            }
            for endpoint in self._endpoints:
                control(endpoint).receive(update)
        return None

    def close(self) -> None: ...

    def handle(self, tensor: Tensor) -> dict[str, tuple[Any, ...]]:
        """What rebuilds the tensor in another process, by the GPU that has it."""
        if tensor.device.type != "cuda":
            raise ConfigError('engine.transport = "ipc" needs the learner on a GPU; use "file" without one')
        return {str(torch.cuda.get_device_properties(tensor.device).uuid): reduce_tensor(tensor)[1]}

    def synchronize(self) -> None:
        """What was computed is in memory before anybody else reads it."""
        torch.cuda.synchronize()
