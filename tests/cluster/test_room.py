"""How many ranks "auto" takes on a cluster, and when it takes more. The cluster is a table of nodes."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.config import RunConfig
from headrace.config.loading import build_config

ray = pytest.importorskip("ray")

state = pytest.importorskip("ray._private.state")

from headrace.backends.fsdp import on_ray  # noqa: E402
from headrace.backends.fsdp.on_ray import RayLauncher  # noqa: E402


class Nodes:
    """What Ray says of nodes that have so much in all, and so much free; and bundles that were placed on them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **nodes: tuple[dict[str, float], dict[str, str]]) -> None:
        self.total = {name: resources for name, (resources, _) in nodes.items()}
        self.free = {name: dict(resources) for name, resources in self.total.items()}
        self.labels = {name: labels for name, (_, labels) in nodes.items()}
        self.asked: list[int] = []
        self.count = 0
        self.bundles: list[str] = []
        monkeypatch.setattr(ray, "nodes", self.nodes)
        monkeypatch.setattr(ray, "available_resources", self.available)
        monkeypatch.setattr(state, "available_resources_per_node", lambda: self.free)
        monkeypatch.setattr(on_ray, "connect", lambda cluster: None)
        monkeypatch.setattr(on_ray, "place", self.place)

    def nodes(self) -> list[dict[str, Any]]:
        return [
            {"NodeID": name, "Alive": True, "Resources": total, "Labels": self.labels[name]}
            for name, total in self.total.items()
        ]

    def available(self) -> dict[str, float]:
        names = {name for free in self.free.values() for name in free}
        return {name: sum(free.get(name, 0) for free in self.free.values()) for name in names}

    def place(self, what: str, count: int, resources: dict[str, float], cluster: Any) -> Nodes:
        """Bundles on the first nodes that hold them."""
        self.asked.append(count)
        self.count = count
        for _ in range(count):
            fits = (one for one, free in self.free.items() if all(free.get(k, 0) >= v for k, v in resources.items()))
            node = next(fits, None)
            assert node is not None, f"no room for {count} × {what}"
            for name, amount in resources.items():
                self.free[node][name] -= amount
            self.bundles.append(node)
        return self

    def options(self, index: int, share: float) -> dict[str, Any]:
        return {}

    def node_ids(self) -> list[str]:
        return self.bundles

    def close(self) -> None: ...


def config(engine: dict[str, float] | None = None, replicas: int = 1, shard: int = 0, **cluster: Any) -> RunConfig:
    return build_config(
        {
            "backend": {"name": "fsdp", "ranks": "auto", "shard": shard}, "trainer": {"placement": "separate"},
            "engine": {"replicas": replicas}, "workflow": {"judger": "countdown"},
            "cluster": {"address": "auto", "learner": {"CPU": 1}, "engine": engine or {}, **cluster},
        }
    )  # fmt: skip


def cpus(count: float, **labels: str) -> tuple[dict[str, float], dict[str, str]]:
    return {"CPU": count}, labels


def test_auto_takes_all_nodes_and_grows_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = Nodes(monkeypatch, a=cpus(2), b=cpus(1))
    launcher = RayLauncher(config())
    assert launcher.new().size == 3 and not launcher.has_more()
    nodes.total["c"], nodes.free["c"], nodes.labels["c"] = {"CPU": 2}, {"CPU": 2}, {}
    assert launcher.has_more() and launcher._size == 5


@pytest.mark.parametrize("selector", ["yes", "in(yes,perhaps)", "!no", "!in(no,never)"])
def test_nodes_with_other_labels_have_no_room(monkeypatch: pytest.MonkeyPatch, selector: str) -> None:
    Nodes(monkeypatch, a=cpus(2, pool="yes"), b=cpus(2, pool="no"))
    launcher = RayLauncher(config(labels={"pool": selector}))
    assert launcher.new().size == 2
    assert not launcher.has_more()  # or all ranks would be started again after every checkpoint, in vain


def test_parts_of_a_bundle_on_several_nodes_are_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    Nodes(monkeypatch, a=cpus(1.5), b=cpus(1.5))
    launcher = RayLauncher(config())
    assert launcher.new().size == 2 and not launcher.has_more()


def test_fractions_are_counted_as_ray_counts_them(monkeypatch: pytest.MonkeyPatch) -> None:
    Nodes(monkeypatch, a=cpus(1))
    assert RayLauncher(config(learner={"CPU": 0.25, "memory": 0}))._room() == 4
    assert RayLauncher(config(learner={"CPU": 0.1}))._room() == 10


@pytest.mark.parametrize(("strategy", "size"), [("STRICT_PACK", 3), ("STRICT_SPREAD", 2)])
def test_a_strict_strategy_limits_the_room(monkeypatch: pytest.MonkeyPatch, strategy: str, size: int) -> None:
    Nodes(monkeypatch, a=cpus(3), b=cpus(2))
    assert RayLauncher(config(strategy=strategy))._room() == size


def test_a_node_that_is_full_of_ranks_is_no_reason_to_move_them(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = Nodes(monkeypatch, a=cpus(3))
    launcher = RayLauncher(config(strategy="STRICT_PACK"))
    assert launcher.new().size == 3
    nodes.total["b"], nodes.free["b"], nodes.labels["b"] = {"CPU": 2}, {"CPU": 2}, {}
    assert not launcher.has_more()
    nodes.free["b"] = {"CPU": 4}
    assert launcher.has_more() and launcher._size == 4


def test_ranks_leave_room_for_the_engines_that_are_placed_after_them(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = Nodes(monkeypatch, a=cpus(4), b=cpus(2))
    launcher = RayLauncher(config(engine={"CPU": 1}, replicas=2))
    assert launcher.new().size == 4
    nodes.place("engine", 2, {"CPU": 1}, None)
    del nodes.bundles[4:]
    assert not launcher.has_more()


def test_engines_are_expected_where_no_rank_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    Nodes(monkeypatch, a=({"CPU": 8, "GPU": 2}, {}), b=({"CPU": 8}, {}))
    launcher = RayLauncher(config(engine={"CPU": 4}, replicas=2, learner={"CPU": 4, "GPU": 1}))
    assert launcher.new().size == 2


def test_ranks_are_a_multiple_of_a_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    Nodes(monkeypatch, a=cpus(5))
    launcher = RayLauncher(config(shard=2))
    assert launcher.new().size == 4 and not launcher.has_more()
