"""A group of torch.distributed with the workers of one SGLang server, which joins by address and port.

SGLang makes its end with torch's own functions, so this end does, too. Built against its source; not run on GPUs.
"""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from headrace.utils.loopback import is_loopback
from headrace.weights.base import Endpoint
from headrace.weights.control import SGLANG_GROUP, control

_TIMEOUT = timedelta(minutes=10)


class TorchGroup:
    """The sender's end: rank 0."""

    def __init__(self, endpoint: Endpoint, backend: str = "nccl") -> None:
        size, (address, port) = 1 + endpoint.world_size, _own_address(endpoint.url)
        info = {
            "master_address": address, "master_port": port, "rank_offset": 1, "world_size": size,
            "group_name": SGLANG_GROUP, "backend": backend,
        }  # fmt: skip
        with ThreadPoolExecutor(1) as thread:  # all must come at the same time: the server joins in its call
            joined = thread.submit(control(endpoint).join, info)
            self._group = join_group(f"tcp://{address}:{port}", 0, size, SGLANG_GROUP, backend)
            joined.result()

    def broadcast(self, tensor: Tensor) -> None:
        c10d.broadcast(tensor, src=0, group=self._group)

    def synchronize(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()

    def destroy(self) -> None:
        c10d.destroy_process_group(self._group)


def join_group(where: str, rank: int, size: int, name: str, backend: str) -> c10d.ProcessGroup:
    """A group beside the default one, which may have other members."""
    store, _, _ = next(c10d.rendezvous(where, rank, size, timeout=_TIMEOUT))
    store.set_timeout(_TIMEOUT)
    helper: Any = c10d._new_process_group_helper
    prefixed = c10d.PrefixStore(name, store)
    group, _ = helper(size, rank, [], c10d.Backend(backend), prefixed, group_name=name, timeout=_TIMEOUT)
    c10d._world.pg_group_ranks[group] = {number: number for number in range(size)}
    return group


def _own_address(url: str) -> tuple[str, int]:
    """The address by which the server reaches this machine, and a free port."""
    host = urlsplit(url).hostname or "127.0.0.1"
    if is_loopback(host):
        address = "127.0.0.1"
    else:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))  # sends nothing: it only picks the interface
            address = probe.getsockname()[0]
    with socket.socket() as free:
        free.bind((address, 0))
        return address, free.getsockname()[1]
