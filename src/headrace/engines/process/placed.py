"""Replicas of engine "torch" on a cluster, each in its bundle."""

from __future__ import annotations

from headrace.cluster.placement import place
from headrace.config import RunConfig
from headrace.engines.pool import EnginePool
from headrace.engines.process.engine import ProcessEngine
from headrace.engines.process.on_ray import Copies, RayLaunch
from headrace.engines.process.wire import EngineOptions
from headrace.weights.shared_memory import SharedBuffers


def placed_engines(config: RunConfig, weights: SharedBuffers, options: EngineOptions) -> EnginePool:
    """A pool, even of one: its requests wait while another node is found for it."""
    cluster, count = config.cluster, config.engine.replicas
    placed = place("engine", count, cluster.engine, cluster)
    copies = Copies(weights)
    launches = [RayLaunch(placed, index, weights, copies, cluster.patience_s) for index in range(count)]
    return EnginePool([ProcessEngine(weights, options, one, waits=False) for one in launches], release=placed.close)
