"""Ranks on a Ray cluster: as many as are asked for, or with "auto" as many as its nodes hold."""

from __future__ import annotations

import logging

import ray

from headrace.backends.fsdp.launching import environment, rank_program, rank_threads
from headrace.backends.ranks.actors import RayRanks
from headrace.cluster.connection import connect
from headrace.cluster.placement import Placed, place
from headrace.config import RunConfig
from headrace.errors import ConfigError

_log = logging.getLogger("headrace")


def ray_ranks(config: RunConfig) -> RayRanks:
    """Ranks that are placed, and not started yet."""
    placed = _placed(config)
    threads = config.backend.threads or int(config.cluster.learner.get("CPU", 1)) or 1
    if config.run.deterministic:
        threads = rank_threads(config, placed.count)
    env = {name: value for name, value in environment(0, threads).items() if name != "CUDA_VISIBLE_DEVICES"}
    options = [{**placed.options(rank), "runtime_env": {"env_vars": env}} for rank in range(placed.count)]
    return RayRanks(rank_program(config, threads), options, config.backend.rank_timeout_s, placed.close)


def _placed(config: RunConfig) -> Placed:
    cluster, wanted = config.cluster, config.backend.ranks
    if wanted != "auto":
        return place("learner", wanted, cluster.learner, cluster)
    connect(cluster)
    for count in range(_room(config), 1, -1):
        try:
            return place("learner", count, cluster.learner, cluster)
        except ConfigError as error:
            _log.warning("%s; trying with %d ranks", error, count - 1)
    return place("learner", 1, cluster.learner, cluster)


def _room(config: RunConfig) -> int:
    """Ranks that the nodes which are alive now can hold, if nothing else were on them."""
    resources = config.cluster.learner
    rooms = [
        min((int(node["Resources"].get(name, 0) // amount) for name, amount in resources.items() if amount), default=1)
        for node in ray.nodes()
        if node["Alive"]
    ]
    shard = config.backend.shard or 1
    return max(1, sum(rooms) // shard * shard)
