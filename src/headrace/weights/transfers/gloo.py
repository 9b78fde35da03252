"""Transport "gloo": tensors broadcast over TCP, one transfer group per server. Works between machines without GPUs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import torch

from headrace.errors import ServerLostError, WeightSyncError
from headrace.weights.base import Endpoint, TensorStream, described
from headrace.weights.control import control
from headrace.weights.transfers.receipts import compare_receipts
from headrace.weights.vllm_plugin.headrace_vllm.checksum import checksum
from headrace.weights.vllm_plugin.headrace_vllm.group import broadcast, join_group, local_address, new_store

_CHUNK = 1 << 28


@dataclass(frozen=True, slots=True)
class _Group:
    """The group with one server. The store must live as long as the group."""

    process_group: Any
    store: Any


class GlooTransfer:
    """Every server has a group of its own: one that is lost spoils no other's."""

    def __init__(self) -> None:
        self._groups: dict[Endpoint, _Group] = {}

    def open(self, endpoints: Sequence[Endpoint], rank: int = 0) -> None:
        kept = {endpoint: group for endpoint, group in self._groups.items() if endpoint in endpoints}
        self._groups = kept
        for endpoint in endpoints:
            if rank == 0 and endpoint not in kept:
                self._groups[endpoint] = _meet(endpoint)

    def send(self, source: TensorStream, version: int) -> str | None:
        infos = source.infos()
        update = described(infos)
        threads = ThreadPoolExecutor(max(1, len(self._groups)))
        asked = {endpoint: threads.submit(control(endpoint).receive, update) for endpoint in self._groups}
        try:
            sums = self._broadcast(source, asked)
            digest = None
            for endpoint, group in self._groups.items():
                for worker in range(1, endpoint.world_size + 1):
                    receipt = torch.zeros(len(infos), dtype=torch.int64, device="cpu")
                    _complete(endpoint, broadcast(group.process_group, receipt, worker), asked[endpoint])
                    digest = compare_receipts(update["names"], sums, receipt.tolist(), endpoint.url)
                asked[endpoint].result()
            return digest
        except (ServerLostError, WeightSyncError):
            self._groups.clear()  # a group that has missed a broadcast is spent
            raise
        finally:
            threads.shutdown(wait=False)

    def close(self) -> None:
        self._groups.clear()

    def _broadcast(self, source: TensorStream, asked: dict[Endpoint, Future[None]]) -> list[int]:
        sums: list[int] = []
        for chunk in source.chunks(_CHUNK):
            for _, tensor in chunk:
                sent = tensor.detach().contiguous().cpu()
                works = [(e, broadcast(group.process_group, sent, 0)) for e, group in self._groups.items()]
                sums.append(checksum(sent))  # while it travels
                for endpoint, work in works:
                    _complete(endpoint, work, asked[endpoint])
        return sums


def _meet(endpoint: Endpoint) -> _Group:
    """Make the group of a server. The server waits in its call until all have come, as we do here."""
    here = local_address(urlsplit(endpoint.url).hostname or "127.0.0.1")
    size = 1 + endpoint.world_size
    store = new_store(here, 0, master=True)
    info = {"master_address": here, "master_port": store.port, "world_size": size}
    with ThreadPoolExecutor(1) as thread:
        joined = thread.submit(control(endpoint).join, info)
        met = thread_of(lambda: join_group(store, here, 0, size))
        while not met.done():
            if joined.done():
                joined.result()  # a server that refuses would leave us waiting for it
            time.sleep(0.005)
        joined.result()
        return _Group(met.result(), store)


def thread_of(function: Any) -> Future[Any]:
    """Run it on a thread that nobody waits for at exit."""
    import threading

    done: Future[Any] = Future()

    def run() -> None:
        try:
            done.set_result(function())
        except BaseException as error:  # handed to who waits
            done.set_exception(error)

    threading.Thread(target=run, name="headrace-join", daemon=True).start()
    return done


def _complete(endpoint: Endpoint, work: Any, asked: Future[None]) -> None:
    """Wait for a broadcast, and hear of it if the server has given up meanwhile."""
    pause_s = 0.0
    while not work.is_completed():
        if asked.done() and asked.exception() is not None:
            asked.result()
        time.sleep(pause_s)
        pause_s = min(0.005, pause_s + 0.0001)
    try:
        work.wait()
    except RuntimeError as error:
        if asked.done() and asked.exception() is not None:
            asked.result()
        raise ServerLostError(f"the transfer to {endpoint.url} broke: {error}", endpoint.url) from None
