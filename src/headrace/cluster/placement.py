"""What is placed where: a placement group for each part of a run (its learners, its engines, its judgers).

A bundle is what one actor takes (`{"GPU": 1, "CPU": 4}`). Ray reserves all bundles of a group, or none.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from headrace.cluster.connection import connect
from headrace.config import ClusterSection
from headrace.errors import ConfigError

PREFIX = "headrace:"
SHARE = 0.5
"""Of a bundle that a rank of the learner and a colocated server have between them."""
_open: dict[str, Placed] = {}
"""By the ids of their groups. Of this process, as its connection is."""


@dataclass(frozen=True, slots=True)
class Placed:
    """The placement of one part: `what` ("learner", "engine", "judger"), and the nodes of its bundles."""

    what: str
    group: PlacementGroup
    resources: Mapping[str, float]
    count: int

    def options(self, index: int, share: float = 1.0) -> dict[str, Any]:
        """For `Actor.options(**...)`: the bundle with this index, and all that is in it, or a share of it. Who shares a
        bundle with one GPU is given the same GPU."""
        taken = {name: value * share for name, value in self.resources.items()}
        amounts = {name: value for name, value in taken.items() if name not in ("CPU", "GPU", "memory")}
        found: dict[str, Any] = {
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self.group, index % self.count),
            "num_cpus": taken.get("CPU", 0),
            "num_gpus": taken.get("GPU", 0),
        }
        found |= {"memory": taken["memory"]} if taken.get("memory") else {}
        return found | ({"resources": amounts} if amounts else {})

    def nodes(self) -> list[str]:
        """The address of the node of every bundle; "" while it is not placed."""
        addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
        table: Any = placement_group_table(self.group)
        return [addresses.get(table["bundles_to_node_id"].get(index, ""), "") for index in range(self.count)]

    def node_ids(self) -> list[str]:
        """The id of the node of every bundle that is placed."""
        table: Any = placement_group_table(self.group)
        return [node for node in table["bundles_to_node_id"].values() if node]

    def describe(self) -> str:
        """One line for people: "placed 2 × judger {CPU: 1} on 10.0.0.1 (1), 10.0.0.2 (1)"."""
        return described(self.what, self.resources, self.node_names())

    def node_names(self) -> list[str]:
        """As `nodes`, with the name of the node where two share an address (as on one machine)."""
        names = node_names()
        table: Any = placement_group_table(self.group)
        return [names.get(table["bundles_to_node_id"].get(index, ""), "nowhere yet") for index in range(self.count)]

    def close(self) -> None:
        """Give the resources back; actors in them end."""
        _open.pop(self.group.id.hex(), None)
        if ray.is_initialized():
            remove_placement_group(self.group)


def place(what: str, count: int, resources: Mapping[str, float], cluster: ClusterSection) -> Placed:
    """Reserve `count` bundles. ConfigError if no nodes can hold them within `cluster.patience_s`."""
    connect(cluster)
    selectors: Any = [dict(cluster.labels)] * count if cluster.labels else None
    # names are unique in a cluster, which may hold several runs
    name = f"{PREFIX}{what}:{uuid.uuid4().hex[:8]}"
    group = placement_group([dict(resources)] * count, cluster.strategy, name, bundle_label_selector=selectors)
    if not group.wait(cluster.patience_s):
        remove_placement_group(group)
        raise ConfigError(_no_room(what, count, resources, cluster))
    placed = Placed(what, group, dict(resources), count)
    _open[group.id.hex()] = placed
    return placed


def open_placements() -> list[Placed]:
    """All of this process, in the order in which they were made."""
    return list(_open.values())


def node_names() -> dict[str, str]:
    """Node id to address, with the beginning of the id where nodes share an address."""
    alive = [node for node in ray.nodes() if node["Alive"]]
    addresses = [node["NodeManagerAddress"] for node in alive]
    return {
        node["NodeID"]: f"{address}#{node['NodeID'][:4]}" if addresses.count(address) > 1 else address
        for node, address in zip(alive, addresses, strict=True)
    }


def described(what: str, resources: Mapping[str, float], nodes: list[str]) -> str:
    each = ", ".join(f"{name}: {value:g}" for name, value in resources.items())
    where = ", ".join(f"{node} ({nodes.count(node)})" for node in dict.fromkeys(nodes))
    return f"placed {len(nodes)} × {what} {{{each}}} on {where}"


def _no_room(what: str, count: int, resources: Mapping[str, float], cluster: ClusterSection) -> str:
    free: Mapping[str, float] = ray.available_resources()
    shown = ", ".join(f"{name} {free.get(name, 0):g}" for name in resources)
    labels = f" with labels {cluster.labels}" if cluster.labels else ""
    return (
        f"the cluster cannot hold {count} × {what} {dict(resources)}{labels} by strategy {cluster.strategy}: after "
        f"{cluster.patience_s:g} s there were free: {shown}, on {sum(node['Alive'] for node in ray.nodes())} nodes; "
        f"add nodes, ask for less ([cluster] {what}), or use another cluster.strategy"
    )
