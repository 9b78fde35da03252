"""A Ray cluster of two nodes on this machine, and a run that is spread over it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster  # pyright: ignore[reportMissingImports]

from headrace.ledger import Ledger

_SMALL: dict[str, Any] = {"object_store_memory": 100 * 2**20}


def new_cluster(cpus: int = 4) -> Cluster:
    """A head and a second node."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    # what else runs on this machine must not end the actors of a test
    os.environ["RAY_memory_monitor_refresh_ms"] = "0"  # noqa: SIM112
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": cpus, "include_dashboard": False, **_SMALL})
    add_node(nodes, cpus)
    return nodes


def add_node(nodes: Cluster, cpus: int = 4, **more: Any) -> Any:
    node = nodes.add_node(num_cpus=cpus, **_SMALL, **more)
    nodes.wait_for_nodes()
    return node


@contextmanager
def two_raylets() -> Iterator[Cluster]:
    nodes = new_cluster()
    yield nodes
    ray.shutdown()
    nodes.shutdown()


def run_values(folder: Path, steps: int = 6, **sections: dict[str, Any]) -> dict[str, Any]:
    """A small deterministic run; sections are merged into it."""
    values: dict[str, Any] = {
        "run": {"dir": str(folder), "name": "run", "deterministic": True},
        "backend": {"threads": 1},
        "data": {"tasks": "countdown", "args": {"split": "train", "count": 50}},
        "workflow": {"name": "single_turn", "judger": "countdown"},
        "rollout": {"group_size": 4, "max_tokens": 24},
        "optimizer": {"lr": 1e-3},
        "trainer": {"steps": steps, "batch_size": 4, "placement": "separate"},
        "track": {"trackers": ["jsonl"], "plot": False},
    }
    return {name: {**values.get(name, {}), **sections.get(name, {})} for name in {*values, *sections}}


def synced(folder: Path, steps: int = 6) -> tuple[list[str | None], Any]:
    """Digests of the weights of all versions, and the account."""
    ledger = Ledger.read(folder)
    found = [ledger.weight_sync(version) for version in range(1, steps + 1)]
    account = ledger.account()
    ledger.close()
    return [one.digest if one else None for one in found], account
