"""`headrace cluster`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

if TYPE_CHECKING:
    from rich.table import Table

    from headrace.cluster.status import NodeStatus, PlacementStatus

cluster_app = App(name="cluster", help="Look at a Ray cluster; needs the extra ray.", help_format="plaintext")


@cluster_app.command
def status(
    address: Annotated[
        str, Parameter(help='"auto", or the address of a cluster: HOST:6379, ray://HOST:10001.')
    ] = "auto",
    *,
    timeout_s: Annotated[float, Parameter(help="How long a node may take to answer.")] = 20.0,
) -> int:
    """Show the cluster's nodes, what runs have placed on them, versions and health. Exit code 1 if something is wrong.

    Versions are compared with those of this machine: learners and trainer must have the same.
    """
    from headrace.registry import load_object
    from headrace.tracking.terminal import Console

    found = load_object("headrace.cluster.status:cluster_status")(address, timeout_s)
    console = Console(highlight=False)
    console.print(_nodes(found.nodes))
    if found.placements:
        console.print()
        console.print(_placements(found.placements))
    for line in found.problems or ["all nodes answer, and all placements are complete"]:
        console.print(line, soft_wrap=True)
    return 1 if found.problems else 0


def _nodes(nodes: list[NodeStatus]) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("node", "health", "free / total", "labels", "versions"):
        table.add_column(column)
    for node in nodes:
        amounts = [f"{name} {node.free.get(name, 0):g}/{total:g}" for name, total in _shown(node.total).items()]
        labels = ", ".join(f"{name}={value}" for name, value in node.labels.items())
        versions = ", ".join(f"{name} {value}" for name, value in node.versions.items())
        table.add_row(node.name, node.health, ", ".join(amounts), labels or "–", versions or "–")
    return table


def _shown(total: dict[str, float]) -> dict[str, float]:
    """Without the memory, which Ray counts in bytes."""
    return {name: value for name, value in sorted(total.items()) if name not in ("memory", "object_store_memory")}


def _placements(placements: list[PlacementStatus]) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("placement", "state", "bundles", "nodes"):
        table.add_column(column)
    for one in placements:
        each = ", ".join(f"{name} {value:g}" for name, value in one.bundles[0].items()) if one.bundles else ""
        nodes = ", ".join(f"{node or 'nowhere'} ({one.nodes.count(node)})" for node in dict.fromkeys(one.nodes))
        table.add_row(one.what, one.state.lower(), f"{len(one.bundles)} × {each}", nodes)
    return table
