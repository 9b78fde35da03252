"""A deterministic run on two raylets loses something at a seeded moment, and ends with the same bits."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from headrace import UnifiedTrainer
from headrace.trainer.callbacks import Callback

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.slow

from ray.cluster_utils import Cluster  # noqa: E402  # pyright: ignore[reportMissingImports]
from ray.util.placement_group import placement_group_table  # noqa: E402

from headrace.cluster.placement import open_placements  # noqa: E402
from two_raylets import add_node, new_cluster, run_values, synced  # noqa: E402

KINDS = ("RankActor", "EngineActor", "JudgerActor", "node")
STEPS = 4


class Nodes:
    """A head, and two nodes of which one can be lost at a time."""

    def __init__(self) -> None:
        self.cluster: Cluster = new_cluster()
        self.complete()

    def complete(self) -> None:
        """In the place of those that were lost. On the main thread: Ray wants it so."""
        while len(self.cluster.list_all_nodes()) < 3:
            add_node(self.cluster)

    def lose(self, rng: random.Random) -> None:
        """One that has something of the run."""
        tables: list[Any] = [placement_group_table(placed.group) for placed in open_placements()]
        used = {node for table in tables for node in table["bundles_to_node_id"].values()}
        others = [node for node in self.cluster.list_all_nodes() if node is not self.cluster.head_node]
        self.cluster.remove_node(rng.choice([node for node in others if node.node_id in used]), allow_graceful=False)


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    found = Nodes()
    yield found
    ray.shutdown()
    found.cluster.shutdown()


def values(folder: Path, nodes: Nodes) -> dict[str, Any]:
    each = {"learner": {"CPU": 0.4}, "engine": {"CPU": 0.4}, "judger": {"CPU": 0.2}}
    return run_values(
        folder, STEPS, backend={"name": "fsdp", "ranks": 2, "threads": 1}, engine={"replicas": 2, "threads": 1},
        judge={"placement": "ray", "actors": 2},
        cluster={"address": nodes.cluster.address, "strategy": "SPREAD", "patience_s": 120, **each},
    )  # fmt: skip


@pytest.fixture(scope="module")
def expected(nodes: Nodes, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return synced(UnifiedTrainer(values(tmp_path_factory.mktemp("calm"), nodes)).fit().run_dir, STEPS)


class Loses(Callback):
    """Kills a process of a kind, or a node, some time after the beginning of a step. The run does not end before."""

    def __init__(self, seed: int, kind: str, nodes: Nodes) -> None:
        rng = random.Random(seed)
        self._at, self._after_s, self._kind, self._nodes = rng.randrange(STEPS - 1), rng.uniform(0, 0.15), kind, nodes
        self._rng, self.done = rng, threading.Event()

    async def on_batch_start(self, step: int) -> None:
        if step == self._at:
            threading.Timer(self._after_s, self._hit).start()
        if step == STEPS - 1:
            await asyncio.to_thread(self.done.wait, 120)

    def _hit(self) -> None:
        if self._kind == "node":
            self._nodes.lose(self._rng)
        else:
            with suppress(ProcessLookupError):
                os.kill(self._rng.choice(actors(self._kind)), signal.SIGKILL)
        self.done.set()


def actors(kind: str) -> list[int]:
    """Processes of this kind, whose parents are raylets that this process has started."""
    found = []
    for folder in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            title = (folder / "cmdline").read_bytes().decode(errors="replace")
            if title.startswith(f"ray::{kind}") and parent(parent(int(folder.name))) == os.getpid():
                found.append(int(folder.name))
    return sorted(found)


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.parametrize("seed", range(32))
def test_a_loss_at_any_moment_changes_nothing(seed: int, nodes: Nodes, expected: Any, tmp_path: Path) -> None:
    nodes.complete()
    loses = Loses(seed, KINDS[seed % len(KINDS)], nodes)
    result = UnifiedTrainer(values(tmp_path, nodes), callbacks=[loses]).fit()
    assert loses.done.is_set() and synced(result.run_dir, STEPS) == expected
