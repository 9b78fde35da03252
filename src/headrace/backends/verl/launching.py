# pyright: reportMissingImports=false
"""From a run configuration to verl's worker group, in a placement of Headrace's own."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from verl.single_controller.ray import RayClassWithInitArgs, RayWorkerGroup
from verl.single_controller.ray.base import SubRayResourcePool

from headrace.backends.fsdp.launching import environment
from headrace.backends.fsdp.on_ray import RayLauncher
from headrace.backends.ranks.actors import RayRanks
from headrace.backends.ranks.base import Program
from headrace.backends.verl.platform import on_gpus, platform_variables
from headrace.backends.verl.worker import VerlWorker
from headrace.cluster.placement import Placed
from headrace.config import RunConfig


class VerlLauncher(RayLauncher):
    """Makes groups of verl's workers, one after the other."""

    def new(self) -> RayRanks:
        """Workers that are placed, and not started yet."""
        placed = self._placed()
        self._size = placed.count
        return VerlRanks(self._config, placed)


class VerlRanks(RayRanks):
    """A worker group of verl's as Headrace's ranks. How they are called, watched and ended is Headrace's."""

    def __init__(self, config: RunConfig, placed: Placed) -> None:
        super().__init__(Program(""), [{}] * placed.count, config.backend.rank_timeout_s, placed.close)
        self._config, self._placed = config, placed
        self._workers: Any = None

    def start(self) -> None:
        self._workers = self._new_group()
        self._actors = list(self._workers.workers)
        self._nodes = self._get([a.where.options(concurrency_group="watch").remote() for a in self._actors], "start")

    def call(self, method: str, *per_rank: Sequence[Any]) -> list[Any]:
        self._require_started(method)
        arguments = [tuple(given[rank] for given in per_rank) for rank in range(self.size)]
        asked = self._workers.execute_all_async("call", [method] * self.size, arguments)
        found = self._collect(method, dict(enumerate(asked)), self._timeout_s)
        return [found[rank] for rank in range(self.size)]

    def _new_group(self) -> Any:
        config, placed = self._config, self._placed
        threads = config.backend.threads or max(1, int(config.cluster.learner.get("CPU", 1)))
        remote: Any = ray.remote  # whose types do not know all that it takes
        kind = remote(concurrency_groups={"watch": 1}, max_restarts=0)(VerlWorker)
        worker = RayClassWithInitArgs(kind, config=config, threads=threads)
        options = {name: value for name, value in placed.options(0).items() if name != "scheduling_strategy"}
        worker.update_options(options)
        pool = SubRayResourcePool(
            placement_groups=[placed.group],
            start_bundle_index=0,
            subgroup_world_size=placed.count,
            process_on_nodes=[placed.count],
            use_gpu=on_gpus(config),
            max_colocate_count=1,
        )
        env = {name: value for name, value in environment(0, threads).items() if name != "CUDA_VISIBLE_DEVICES"}
        device = "cuda" if on_gpus(config) else "cpu"
        return _WorkerGroup(pool, worker, device_name=device, worker_env={**env, **platform_variables(config)})


class _WorkerGroup(RayWorkerGroup):
    """verl's own asks where rank 0 can listen with a task that takes a whole CPU, which a bundle may not have."""

    def _get_master_addr_port(self, pg: Any, bundle_index: int = 0, master_port_range: Any = None) -> None:
        remote: Any = ray.remote
        ask = remote(num_cpus=0)(_free_address)
        where = PlacementGroupSchedulingStrategy(pg, bundle_index)
        self._master_addr, self._master_port = ray.get(ask.options(scheduling_strategy=where).remote())


def _free_address() -> tuple[str, str]:
    """An address of this node, with a port that nobody has."""
    with socket.socket() as listening:
        listening.bind(("", 0))
        return ray.util.get_node_ip_address(), str(listening.getsockname()[1])
