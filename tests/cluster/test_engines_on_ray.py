"""Engine replicas as Ray actors on two raylets of this machine. `make test-slow` runs it where the extra ray is."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace import UnifiedTrainer
from headrace.trainer.callbacks import Callback

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.slow

from ray.cluster_utils import Cluster  # noqa: E402  # pyright: ignore[reportMissingImports]

from headrace.cluster.placement import open_placements  # noqa: E402
from headrace.cluster.status import cluster_status  # noqa: E402
from headrace.engines.process import on_ray, placed  # noqa: E402
from two_raylets import add_node, run_values, synced, two_raylets  # noqa: E402


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with two_raylets() as nodes:
        yield nodes


def on(nodes: Cluster, **more: Any) -> dict[str, Any]:
    section = {"address": nodes.address, "engine": {"CPU": 0.5}, "strategy": "SPREAD", "patience_s": 120, **more}
    return {"cluster": section, "engine": {"replicas": 2, "threads": 1}}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The same run with engine processes on this machine."""
    sections: dict[str, Any] = {"engine": {"replicas": 2, "threads": 1}}
    return synced(UnifiedTrainer(run_values(tmp_path_factory.mktemp("here"), **sections)).fit().run_dir)


class Hits(Callback):
    """Does something to the run's engines at the beginning of a step, and two steps later waits until all serve."""

    def __init__(self, step: int, hit: Callable[[Any], None]) -> None:
        self._step, self._hit = step, hit

    def on_train_start(self, trainer: Any) -> None:
        self.run = trainer._run

    async def on_batch_start(self, step: int) -> None:
        if step == self._step:
            self._hit(self.run)
        if step == self._step + 2:
            end = time.monotonic() + 200
            while not (self.restarts and all(one.state == "serving" for one in self.run.engine.health().replicas)):
                assert time.monotonic() < end
                await asyncio.sleep(0.05)

    @property
    def restarts(self) -> int:
        return self.run.engine.health().restarts


@pytest.mark.parametrize("shares", [True, False])
def test_replicas_on_nodes_give_the_bits_of_replicas_here(
    cluster: Cluster, expected: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shares: bool
) -> None:
    """Also where they have no memory in common with the learner, as on another machine."""
    monkeypatch.setattr(placed, "RayLaunch", lambda *given: on_ray.RayLaunch(*given, shares=shares))
    seen: list[Any] = []

    class Looks(Callback):
        def on_train_start(self, trainer: Any) -> None:
            (one,) = open_placements()
            seen.append((one.what, len(set(one.node_names()))))
            seen.append([shown.what for shown in cluster_status(str(cluster.address)).placements])

    result = UnifiedTrainer(run_values(tmp_path, **on(cluster)), callbacks=[Looks()]).fit()
    assert synced(result.run_dir) == expected
    assert open_placements() == []
    assert seen == [("engine", 2), ["engine"]]


@pytest.mark.parametrize("which", [0, 1])
def test_a_killed_engine_actor_changes_nothing(cluster: Cluster, expected: Any, tmp_path: Path, which: int) -> None:
    """The other serves meanwhile. It comes back after weight syncs that it has missed."""
    hits = Hits(1, lambda run: os.kill(run.engine.replicas[which].engine.pid, signal.SIGKILL))
    result = UnifiedTrainer(run_values(tmp_path, **on(cluster)), callbacks=[hits]).fit()
    assert synced(result.run_dir) == expected and hits.restarts == 1


def test_ranks_and_replicas_share_the_nodes(cluster: Cluster, tmp_path: Path) -> None:
    sections = on(cluster, learner={"CPU": 0.5})
    ranks: dict[str, Any] = {"backend": {"name": "fsdp", "ranks": 2, "threads": 1}}
    there = UnifiedTrainer(run_values(tmp_path / "there", **sections, **ranks)).fit()
    here = UnifiedTrainer(run_values(tmp_path / "here", engine={"replicas": 2, "threads": 1}, **ranks)).fit()
    assert synced(there.run_dir) == synced(here.run_dir)
    assert None not in synced(there.run_dir)[0]


def test_an_asynchronous_run_keeps_its_account(cluster: Cluster, tmp_path: Path) -> None:
    values = run_values(tmp_path, **on(cluster), run={"dir": str(tmp_path), "deterministic": False})
    values["trainer"]["max_staleness"] = 2
    _, account = synced(UnifiedTrainer(values).fit().run_dir)
    settled = account.trained + account.filtered + account.failed + account.stale + account.pending
    assert account.dispatched == settled and account.trained + account.filtered >= 96


def test_a_lost_node_takes_a_replica_which_comes_back_elsewhere(
    cluster: Cluster, expected: Any, tmp_path: Path
) -> None:
    """Last: it takes a node away."""
    _, lost = (add_node(cluster, 1, resources={"seat": 1}) for _ in range(2))
    hits = Hits(1, lambda run: cluster.remove_node(lost, allow_graceful=False))
    section = on(cluster, engine={"CPU": 0.5, "seat": 0.5})
    result = UnifiedTrainer(run_values(tmp_path, **section), callbacks=[hits]).fit()
    assert synced(result.run_dir) == expected and hits.restarts >= 1
