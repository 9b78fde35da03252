"""What a cluster looks like: nodes, what is placed on them, versions, health."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import placement_group_table
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from headrace.cluster.connection import connect
from headrace.cluster.placement import PREFIX, node_names
from headrace.cluster.room import available_by_node
from headrace.config import ClusterSection

_PACKAGES = ("headrace", "ray", "torch")


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """One node. `health` is "ok", "dead" or what is wrong; `versions` is empty if the node did not answer."""

    name: str
    health: str
    free: dict[str, float]
    total: dict[str, float]
    labels: dict[str, str]
    versions: dict[str, str]


@dataclass(frozen=True, slots=True)
class PlacementStatus:
    """One placement group of a run: its state as Ray has it, and the nodes of its bundles."""

    what: str
    state: str
    bundles: list[dict[str, float]]
    nodes: list[str]


@dataclass(frozen=True, slots=True)
class ClusterStatus:
    nodes: list[NodeStatus]
    placements: list[PlacementStatus]
    problems: list[str]


def cluster_status(address: str = "auto", timeout_s: float = 20.0) -> ClusterStatus:
    """Ask every node; a node that does not answer in time is reported, not waited for."""
    connect(ClusterSection(address=address), remedy="give the address of one: headrace cluster status HOST:6379")
    names, here = node_names(), _versions()
    alive = [node for node in ray.nodes() if node["Alive"]]
    asked = _ask_all([node["NodeID"] for node in alive], timeout_s)
    nodes = [_node(node, names, asked, here) for node in ray.nodes()]
    placements = [_placement(row, names) for row in _table() if row["name"].startswith(PREFIX)]
    return ClusterStatus(nodes, [one for one in placements if one.state != "REMOVED"], _problems(nodes, placements))


def _ask_all(ids: list[str], timeout_s: float) -> dict[str, dict[str, str]]:
    ask: Any = ray.remote(num_cpus=0)(_versions)
    asked = {
        one: ask.options(scheduling_strategy=NodeAffinitySchedulingStrategy(one, soft=False)).remote() for one in ids
    }
    ray.wait(list(asked.values()), num_returns=len(asked), timeout=timeout_s)
    return {one: answer for one, reference in asked.items() if (answer := _answer(reference)) is not None}


def _answer(reference: Any) -> dict[str, str] | None:
    try:
        return ray.get(reference, timeout=0.1)
    except (GetTimeoutError, RayError):
        return None


def _node(
    node: dict[str, Any], names: dict[str, str], asked: dict[str, dict[str, str]], here: dict[str, str]
) -> NodeStatus:
    one, versions = node["NodeID"], asked.get(node["NodeID"], {})
    other = [f"{name} {found}, here {here[name]}" for name, found in versions.items() if found != here[name]]
    if not node["Alive"]:
        health = "dead"
    elif not versions:
        health = "does not answer"
    else:
        health = f"other versions: {'; '.join(other)}" if other else "ok"
    total = {key: value for key, value in node.get("Resources", {}).items() if not key.startswith("node:")}
    labels = {key: value for key, value in node.get("Labels", {}).items() if key != "ray.io/node-id"}
    free = available_by_node().get(one, {})
    return NodeStatus(str(names.get(one) or node["NodeManagerAddress"]), health, free, total, labels, versions)


def _placement(row: dict[str, Any], names: dict[str, str]) -> PlacementStatus:
    nodes = [names.get(row["bundles_to_node_id"].get(index, ""), "") for index in row["bundles"]]
    bundles = [dict(bundle) for bundle in row["bundles"].values()]
    return PlacementStatus(row["name"].removeprefix(PREFIX).partition(":")[0], row["state"], bundles, nodes)


def _table() -> list[dict[str, Any]]:
    found: Any = placement_group_table()
    return list(found.values())


def _problems(nodes: list[NodeStatus], placements: list[PlacementStatus]) -> list[str]:
    return [
        *(f"{node.name}: {node.health}" for node in nodes if node.health != "ok"),
        *(
            f"placement {one.what}: {one.state.lower()}"
            for one in placements
            if one.state in ("PENDING", "RESCHEDULING")
        ),
    ]


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "none"
    return found
