"""Ranks on a Ray cluster: as many as are asked for, or with "auto" as many as its nodes hold."""

from __future__ import annotations

import logging
from collections import Counter

from headrace.backends.fsdp.launching import environment, least_ranks, rank_program, rank_threads
from headrace.backends.ranks.actors import RayRanks
from headrace.cluster.connection import connect
from headrace.cluster.placement import SHARE, Placed, place
from headrace.cluster.room import free_nodes, give, room, take
from headrace.config import RunConfig
from headrace.config.derived import places_engines, shares_bundles
from headrace.errors import ConfigError

_log = logging.getLogger("headrace")


class RayLauncher:
    """Makes groups of actors, one after the other. With "auto" they may differ in size."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._size = 0
        self._last: Placed | None = None

    def new(self) -> RayRanks:
        """Ranks that are placed, and not started yet."""
        config, placed = self._config, self._placed()
        self._size, self._last = placed.count, placed
        threads = config.backend.threads or max(1, int(config.cluster.learner.get("CPU", 1)))
        if config.run.deterministic:
            threads = rank_threads(config, placed.count)
        env = {name: value for name, value in environment(0, threads).items() if name != "CUDA_VISIBLE_DEVICES"}
        share = SHARE if shares_bundles(config) else 1.0
        options = [{**placed.options(rank, share), "runtime_env": {"env_vars": env}} for rank in range(placed.count)]
        return RayRanks(rank_program(config, threads), options, config.backend.rank_timeout_s, placed.close)

    def has_more(self) -> bool:
        """Whether the cluster has room for more ranks than there are. The next group then has them."""
        if self._config.backend.ranks != "auto":
            return False
        before, self._size = self._size, max(self._room(), self._size)
        return self._size > before

    def _placed(self) -> Placed:
        cluster, wanted = self._config.cluster, self._config.backend.ranks
        if wanted != "auto":
            return place("learner", wanted, cluster.learner, cluster)
        connect(cluster)
        group = least_ranks(self._config)
        # as many as before, for which it waits; with fewer if there is no room
        for count in range(self._size or max(group, self._room()), 0, -group):
            try:
                return place("learner", count, cluster.learner, cluster)
            except ConfigError as error:
                if count <= group:
                    raise
                _log.warning("%s; trying with %d ranks", error, count - group)
        raise AssertionError("unreachable")

    def _room(self) -> int:
        """Ranks for which there is room, with those that run: a multiple of what holds the model together."""
        config = self._config
        cluster, group = config.cluster, least_ranks(config)
        nodes = free_nodes(cluster)
        if self._last is not None:
            for node, count in Counter(self._last.node_ids()).items():
                if node in nodes:
                    give(nodes, node, cluster.learner, count)
        elif places_engines(config):  # they are placed after the ranks
            take(nodes, config.engine.replicas, cluster.engine, beside=cluster.learner)
        return room(nodes, cluster.learner, cluster.strategy) // group * group
