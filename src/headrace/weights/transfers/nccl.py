"""Transport "nccl": tensors broadcast from GPU to GPU, to vLLM's own receiving end.

The group meets by an id that NCCL makes here and that the server gets with the call that makes it join. So the
learner's side needs NCCL, which comes with torch, and nothing of vLLM. Built against the documented protocol; not run
on GPUs.
"""

from __future__ import annotations

import base64
import ctypes
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from headrace.errors import ConfigError, ServerLostError, WeightSyncError
from headrace.weights.base import Endpoint, TensorStream, described
from headrace.weights.control import control
from headrace.weights.transfers.torch_group import TorchGroup

_CHUNK = 1 << 30
_ID_BYTES = 128
_UINT8, _FLOAT32, _SUM = 1, 7, 0


class Communicator(Protocol):
    """The sender's end of a group."""

    def broadcast(self, tensor: Tensor) -> None: ...
    def synchronize(self) -> None: ...
    def destroy(self) -> None: ...


class NcclTransfer:
    """One group per server: rank 0 sends, the server's workers are 1 to its world size."""

    def __init__(self) -> None:
        self._groups: dict[Endpoint, Communicator] = {}

    def open(self, endpoints: Sequence[Endpoint], rank: int = 0) -> None:
        for endpoint in [*self._groups]:
            if endpoint not in endpoints:
                self._groups.pop(endpoint).destroy()
        for endpoint in endpoints:
            if rank == 0 and endpoint not in self._groups:
                self._groups[endpoint] = self._meet(endpoint)

    def send(self, source: TensorStream, version: int) -> str | None:
        update = described(source.infos())
        threads = ThreadPoolExecutor(max(1, len(self._groups)))
        asked = [threads.submit(control(endpoint).receive, update) for endpoint in self._groups]
        try:
            for chunk in source.chunks(_CHUNK):
                _raise_failed(asked)  # a server that has refused would leave the broadcast waiting for ever
                for _, tensor in chunk:
                    for group in self._groups.values():
                        group.broadcast(tensor.detach().contiguous())
            for group in self._groups.values():
                group.synchronize()
            for one in asked:
                one.result()
        except (ServerLostError, WeightSyncError):
            self._groups.clear()  # a group that has missed a broadcast is spent
            raise
        finally:
            threads.shutdown(wait=False)
        return None  # vLLM's receiving end reports nothing: the canary rows are the proof

    def close(self) -> None:
        while self._groups:
            self._groups.popitem()[1].destroy()

    def _meet(self, endpoint: Endpoint) -> Communicator:
        """All must come at the same time: the server joins in its call, we join meanwhile."""
        if endpoint.protocol == "sglang":
            return TorchGroup(endpoint)
        unique = self.new_id()
        size = 1 + endpoint.world_size
        shown = base64.b64encode(unique).decode()
        info = {"nccl_unique_id_b64": shown, "rank_offset": 1, "world_size": size, "packed": False}
        with ThreadPoolExecutor(1) as thread:
            joined = thread.submit(control(endpoint).join, info)
            group = self.join(unique, size)
            joined.result()
        return group

    def new_id(self) -> bytes:
        """128 bytes that name a new group."""
        return _nccl().new_id()

    def join(self, unique: bytes, size: int) -> Communicator:
        """The group as rank 0. The first collective is a sum over one number, which vLLM's workers make, too."""
        return _NcclGroup(_nccl(), unique, size)


def _raise_failed(asked: Sequence[Future[None]]) -> None:
    for one in asked:
        if one.done():
            one.result()


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_byte * _ID_BYTES),)


class _Nccl:
    """The few functions of the library that are needed."""

    def __init__(self, path: str) -> None:
        self._library = ctypes.CDLL(path)

    def new_id(self) -> bytes:
        made = _UniqueId()
        self.call("ncclGetUniqueId", ctypes.byref(made))
        return bytes(made)

    def call(self, function: str, *arguments: Any) -> None:
        if code := getattr(self._library, function)(*arguments):
            raise WeightSyncError(f"{function} failed with NCCL's error {code}; NCCL_DEBUG=INFO shows more")


class _NcclGroup:
    def __init__(self, nccl: _Nccl, unique: bytes, size: int) -> None:
        self._nccl, self._comm = nccl, ctypes.c_void_p()
        made = _UniqueId.from_buffer_copy(unique)
        nccl.call("ncclCommInitRank", ctypes.byref(self._comm), ctypes.c_int(size), made, ctypes.c_int(0))
        one = torch.zeros(1, device="cuda")
        self._run("ncclAllReduce", one, 1, _FLOAT32, ctypes.c_int(_SUM))
        self.synchronize()

    def broadcast(self, tensor: Tensor) -> None:
        self._run("ncclBroadcast", tensor, tensor.nbytes, _UINT8, ctypes.c_int(0))

    def synchronize(self) -> None:
        torch.cuda.current_stream().synchronize()

    def destroy(self) -> None:
        self._nccl.call("ncclCommDestroy", self._comm)

    def _run(self, function: str, tensor: Tensor, count: int, dtype: int, last: ctypes.c_int) -> None:
        address = ctypes.c_void_p(tensor.data_ptr())
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        tensor.record_stream(torch.cuda.current_stream())
        kind = ctypes.c_int(dtype)
        self._nccl.call(function, address, address, ctypes.c_size_t(count), kind, last, self._comm, stream)


def _nccl() -> _Nccl:
    if not torch.cuda.is_available():
        raise ConfigError('engine.transport = "nccl" needs GPUs; use "file" on one machine, "gloo" between machines')
    wheels = Path(torch.__file__).parents[1] / "nvidia" / "nccl" / "lib"
    found = next((str(path) for path in sorted(wheels.glob("libnccl.so*"))), "libnccl.so.2")
    try:
        return _Nccl(found)
    except OSError as error:
        raise ConfigError(f"cannot load NCCL ({error}); install the CUDA build of torch, which brings it") from None
