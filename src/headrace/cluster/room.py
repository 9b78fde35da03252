"""What a cluster has room for, node by node: for ranks whose number follows from it."""

from __future__ import annotations

import re
from collections.abc import Mapping

import ray

from headrace.config import ClusterSection

Free = dict[str, dict[str, float]]
"""By node: what is neither taken nor reserved."""
_STEP = 1e-4
"""Ray counts no finer."""


def available_by_node() -> Free:
    """Of all nodes that are alive."""
    from ray._private.state import available_resources_per_node  # no public name gives it by node

    return available_resources_per_node()


def free_nodes(cluster: ClusterSection) -> Free:
    """Of the nodes with the labels that the run asks for."""
    free = available_by_node()
    fitting = [node["NodeID"] for node in ray.nodes() if node["Alive"] and _has(node.get("Labels", {}), cluster.labels)]
    return {one: dict(free.get(one, {})) for one in fitting}


def count_fitting(free: Mapping[str, float], resources: Mapping[str, float]) -> int:
    """How many such bundles fit into what is free on one node."""
    return min(int((free.get(name, 0.0) + _STEP / 2) / amount) for name, amount in resources.items() if amount)


def room(nodes: Free, resources: Mapping[str, float], strategy: str) -> int:
    """How many such bundles the nodes hold together, as the strategy lays them."""
    counts = [count_fitting(free, resources) for free in nodes.values()]
    if strategy == "STRICT_PACK":
        return max(counts, default=0)
    return sum(min(count, 1) if strategy == "STRICT_SPREAD" else count for count in counts)


def give(nodes: Free, node: str, resources: Mapping[str, float], count: int) -> None:
    """Add so many bundles to what is free on a node; below 0: take them."""
    for name, amount in resources.items():
        nodes[node][name] = nodes[node].get(name, 0.0) + count * amount


def take(nodes: Free, count: int, resources: Mapping[str, float], beside: Mapping[str, float]) -> None:
    """Take so many bundles, each where the fewest bundles of another kind fit (`beside`), as far as there is room."""
    for _ in range(count):
        able = [one for one, free in nodes.items() if count_fitting(free, resources)]
        if not able:
            return
        give(nodes, min(able, key=lambda one: count_fitting(nodes[one], beside)), resources, -1)


def _has(labels: Mapping[str, str], wanted: Mapping[str, str]) -> bool:
    """Whether a node's labels are those that a label selector of Ray asks for: "a", "!a", "in(a,b)", "!in(a,b)"."""
    for key, selector in wanted.items():
        text = selector.removeprefix("!")
        several = re.fullmatch(r"in\((.*)\)", text)
        values = [one.strip() for one in several[1].split(",")] if several else [text]
        if (labels.get(key) in values) is selector.startswith("!"):
            return False
    return True
