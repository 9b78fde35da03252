"""vLLM servers in bundles of a Ray cluster: two raylets of this machine, and the environment of `make vllm`."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx2
import pytest
from vllm_servers import vllm_python

from headrace import UnifiedTrainer
from headrace.trainer.callbacks import Callback

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.slow

from ray.cluster_utils import Cluster  # noqa: E402  # pyright: ignore[reportMissingImports]
from ray.exceptions import RayError  # noqa: E402

from headrace.cluster.placement import open_placements  # noqa: E402
from headrace.utils.reaper import descendants  # noqa: E402
from stubborn_program import left  # noqa: E402
from two_raylets import run_values, synced, two_raylets  # noqa: E402


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    vllm_python()
    with two_raylets() as nodes:
        yield nodes


def values(folder: Path, nodes: Cluster, placement: str, staleness: int = 0) -> dict[str, Any]:
    own = {"engine": {"CPU": 0.5}} if placement == "separate" else {}
    cluster = {"address": nodes.address, "learner": {"CPU": 0.5}, "strategy": "SPREAD", "patience_s": 300, **own}
    found = run_values(
        folder, 4, backend={"name": "fsdp", "ranks": 2, "threads": 1}, cluster=cluster,
        run={"dir": str(folder), "name": "run"},
        engine={"name": "vllm", "replicas": 2, "python": vllm_python(), "max_batch": 16, "threads": 1,
            "server_env": {"VLLM_CPU_KVCACHE_SPACE": "1"}},
    )  # fmt: skip
    del found["run"]["deterministic"]
    found["trainer"] |= {"placement": placement, "max_staleness": staleness}
    return found


class Looks(Callback):
    """Where things are; and a server that is killed in the middle."""

    def __init__(self, kills: bool = False) -> None:
        self._kills = kills
        self.refused: list[int] = []
        self.processes: list[int] = []  # of all servers, also of the one that is killed

    def on_train_start(self, trainer: Any) -> None:
        self.engine = trainer._run.engine
        self.placed = {one.what: len(set(one.node_names())) for one in open_placements()}
        for replica in self.engine.replicas:
            self.refused.append(httpx2.get(f"{replica.engine.server.url}/health", trust_env=False).status_code)
            self.processes += descendants(self.actor(replica))

    def actor(self, replica: Any) -> int:
        return ray.get(replica.engine.server._actor.pid.options(concurrency_group="watch").remote())

    def on_batch_start(self, step: int) -> None:
        if step == 1 and self._kills:
            os.kill(self.actor(self.engine.replicas[0]), signal.SIGKILL)
        if step == 3:
            for replica in self.engine.replicas:
                with suppress(RayError, AttributeError):  # it is being started again
                    self.processes += descendants(self.actor(replica))


def test_servers_on_two_nodes_train_and_a_killed_one_comes_back(cluster: Cluster, tmp_path: Path) -> None:
    looks = Looks(kills=True)
    result = UnifiedTrainer(values(tmp_path, cluster, "separate", 1), callbacks=[looks]).fit()
    _, account = synced(result.run_dir, 4)
    assert looks.placed == {"learner": 2, "engine": 2} and looks.refused == [401, 401]
    assert account.trained + account.filtered >= 64 and looks.engine.health().restarts >= 1
    assert open_placements() == [] and len(looks.processes) >= 8 and left(looks.processes, 10.0) == []


def test_colocated_servers_share_the_bundles_of_the_ranks(cluster: Cluster, tmp_path: Path) -> None:
    looks = Looks()
    result = UnifiedTrainer(values(tmp_path, cluster, "colocate"), callbacks=[looks]).fit()
    _, account = synced(result.run_dir, 4)
    assert looks.placed == {"learner": 2} and account.trained == 64 and account.failed == 0
    assert len(looks.processes) >= 8 and left(looks.processes, 10.0) == []
