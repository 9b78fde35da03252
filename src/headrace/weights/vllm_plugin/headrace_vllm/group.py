"""A process group between one sender and the workers that receive, apart from all others of these processes."""

import socket
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

_TIMEOUT = timedelta(seconds=300)


def local_address(peer: str) -> str:
    """The address of this machine that reaches the peer."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((peer, 9))  # sends nothing
        return probe.getsockname()[0]


def new_store(host: str, port: int, master: bool) -> TCPStore:
    """The store at which the group meets; the master picks a free port for 0."""
    return TCPStore(host, port, is_master=master, timeout=_TIMEOUT, wait_for_workers=False)


def join_group(store: TCPStore, peer: str, rank: int, size: int) -> Any:
    """Returns when all have come. Rank 0 is the sender."""
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # torch's stubs lack it
    options._timeout = _TIMEOUT
    options._devices = [ProcessGroupGloo.create_device(hostname=local_address(peer))]
    return ProcessGroupGloo(PrefixStore("headrace", store), rank, size, options)


def broadcast(group: Any, tensor: torch.Tensor, root: int) -> Any:
    """Start to send or receive a tensor; `.wait()` for it."""
    options = torch.distributed.BroadcastOptions()
    options.rootRank, options.rootTensor = root, 0
    return group.broadcast([tensor], options)  # type: ignore[attr-defined]
