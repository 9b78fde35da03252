"""Ranks on a Ray cluster: as many as are asked for, or with "auto" as many as its nodes hold."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import ray

from headrace.backends.fsdp.launching import environment, rank_program, rank_threads
from headrace.backends.ranks.actors import RayRanks
from headrace.cluster.connection import connect
from headrace.cluster.placement import SHARE, Placed, place
from headrace.config import RunConfig
from headrace.config.derived import shares_bundles
from headrace.errors import ConfigError

_log = logging.getLogger("headrace")


class RayLauncher:
    """Makes groups of actors, one after the other. With "auto" they may differ in size."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._size = 0

    def new(self) -> RayRanks:
        """Ranks that are placed, and not started yet."""
        config, placed = self._config, self._placed()
        self._size = placed.count
        threads = config.backend.threads or max(1, int(config.cluster.learner.get("CPU", 1)))
        if config.run.deterministic:
            threads = rank_threads(config, placed.count)
        env = {name: value for name, value in environment(0, threads).items() if name != "CUDA_VISIBLE_DEVICES"}
        share = SHARE if shares_bundles(config) else 1.0
        options = [{**placed.options(rank, share), "runtime_env": {"env_vars": env}} for rank in range(placed.count)]
        return RayRanks(rank_program(config, threads), options, config.backend.rank_timeout_s, placed.close)

    def has_more(self) -> bool:
        """Whether the cluster has room for more ranks than there are. The next group then has them."""
        group = max(1, self._config.backend.shard)
        more = self._free() // group * group if self._config.backend.ranks == "auto" else 0
        self._size += more
        return more > 0

    def _placed(self) -> Placed:
        cluster, wanted = self._config.cluster, self._config.backend.ranks
        if wanted != "auto":
            return place("learner", wanted, cluster.learner, cluster)
        connect(cluster)
        group = max(1, self._config.backend.shard)
        # as many as before, for which it waits; with fewer if there is no room
        for count in range(self._size or max(group, self._free() // group * group), 0, -group):
            try:
                return place("learner", count, cluster.learner, cluster)
            except ConfigError as error:
                if count <= group:
                    raise
                _log.warning("%s; trying with %d ranks", error, count - group)
        raise AssertionError("unreachable")

    def _free(self) -> int:
        """Ranks for which there is room now, beside all that runs."""
        resources = {name: amount for name, amount in self._config.cluster.learner.items() if amount}
        free: Mapping[str, float] = ray.available_resources()
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        on_nodes = sum(min(int(node.get(name, 0) // amount) for name, amount in resources.items()) for node in nodes)
        return min(on_nodes, *(int(free.get(name, 0) // amount) for name, amount in resources.items()))
