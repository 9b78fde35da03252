"""Ranks as Ray actors on two raylets of this machine. `make test-slow` runs it where the extra ray is installed."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import sleepy_rank
from contracts.backend_contract import BackendContract
from fsdp_cases import Case, losses, new_group, steps
from headrace import UnifiedTrainer
from headrace.backends.fsdp.backend import FsdpBackend
from headrace.config import RunConfig
from headrace.ledger import Ledger

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.slow

from ray.cluster_utils import Cluster  # noqa: E402  # pyright: ignore[reportMissingImports]

PPO = next(case for case in losses() if case.name == "ppo_clip")
_SMALL: dict[str, Any] = {"object_store_memory": 100 * 2**20}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A head and a second node."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False, **_SMALL})
    nodes.add_node(num_cpus=2, **_SMALL)
    nodes.wait_for_nodes()
    yield nodes
    ray.shutdown()
    nodes.shutdown()


def on(nodes: Cluster, **more: Any) -> dict[str, Any]:
    return {"address": nodes.address, "learner": {"CPU": 1}, "strategy": "SPREAD", "patience_s": 60, **more}


def ray_config(case: Case, nodes: Cluster, ranks: int | str = 2, **more: Any) -> RunConfig:
    config = case.config(2)
    backend = config.backend.model_copy(update={"ranks": ranks})
    section = config.cluster.model_validate(on(nodes, **more))
    return config.model_copy(update={"backend": backend, "cluster": section})


@pytest.mark.usefixtures("cluster")
class TestRayActors(BackendContract):
    tolerance = 1e-10
    settings: ClassVar[dict[str, Any]] = {}

    @pytest.fixture(autouse=True)
    def _on_the_cluster(self, cluster: Cluster) -> None:
        type(self).settings = {
            "model": {"dtype": "float64"},
            "backend": {"name": "fsdp", "ranks": 2},
            "trainer": {"placement": "separate"},
            "cluster": on(cluster, learner={"CPU": 0.2}),  # it has several backends side by side
        }

    def make_backend(self, config: RunConfig) -> FsdpBackend:
        torch.set_num_threads(1)
        # the contract asks for several backends side by side
        return FsdpBackend(
            config.model_copy(update={"cluster": config.cluster.model_copy(update={"learner": {"CPU": 0.2}})})
        )


def test_a_killed_actor_changes_nothing(cluster: Cluster, tmp_path: Path) -> None:
    calm, hit = new_group(PPO.config(2)), new_group(ray_config(PPO, cluster))
    for group in (calm, hit):
        steps(group, PPO, [1])
        group.save(tmp_path / str(group is calm))
        group.saved(tmp_path / str(group is calm))
        steps(group, PPO, [2])
    ray.kill(hit.ranks._actors[1])  # type: ignore[attr-defined]
    for group in (calm, hit):
        steps(group, PPO, [3])
    assert hit.restarts == 1
    ours, theirs = (group.together("weights")[0] for group in (calm, hit))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)  # to the bit, over pipes or over Ray
    calm.close()
    hit.close()


def test_ranks_that_hang_are_ended_with_their_stacks_in_the_log(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    from headrace.backends.ranks.actors import RayRanks
    from headrace.backends.ranks.base import Program, RanksLostError

    ranks = RayRanks(Program(f"{Path(sleepy_rank.__file__)}:Sleepy"), [{"num_cpus": 0.1}] * 2, 3.0)
    ranks.start()
    assert ranks.call("wait", [0.0, 0.0]) == [0, 1]
    with pytest.raises(RanksLostError, match="rank 1 did not answer in wait"):
        ranks.call("wait", [0.0, 60.0])
    assert "rank 1 hangs in wait" in caplog.text and "in wait" in caplog.text


def test_with_a_lost_node_auto_ranks_go_on_with_fewer_and_grow_back(cluster: Cluster, tmp_path: Path) -> None:
    node = cluster.add_node(num_cpus=1, resources={"seat": 1}, **_SMALL)
    other = cluster.add_node(num_cpus=1, resources={"seat": 1}, **_SMALL)
    cluster.wait_for_nodes()
    config = ray_config(PPO, cluster, "auto", learner={"CPU": 1, "seat": 1}, patience_s=20)
    hit, calm = new_group(config), new_group(PPO.config(2))
    assert hit.ranks.size == 2
    for group in (hit, calm):
        steps(group, PPO, [1, 2])
    threading.Thread(target=lambda: (time.sleep(0.2), cluster.remove_node(other, allow_graceful=False))).start()
    for seed in range(3, 8):
        for group in (hit, calm):
            steps(group, PPO, [seed])
        time.sleep(1.0)
    assert hit.restarts >= 1 and hit.ranks.size == 1
    cluster.add_node(num_cpus=1, resources={"seat": 1}, **_SMALL)
    cluster.wait_for_nodes()
    hit.save(tmp_path / "saved")
    hit.saved(tmp_path / "saved")
    assert hit.ranks.size == 2  # it has grown back
    ours, theirs = (group.together("weights")[0] for group in (calm, hit))
    assert all(torch.allclose(ours[name], theirs[name], rtol=1e-8, atol=1e-12) for name in ours)
    calm.close()
    hit.close()
    cluster.remove_node(node)


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_a_run_trains_with_ranks_on_two_raylets(cluster: Cluster, tmp_path: Path, max_staleness: int) -> None:
    config: dict[str, Any] = {
        "run": {"dir": str(tmp_path), "name": "run"},
        "backend": {"name": "fsdp", "ranks": 2},
        "cluster": on(cluster),
        "data": {"tasks": "countdown", "args": {"split": "train", "count": 50}},
        "workflow": {"name": "single_turn", "judger": "countdown"},
        "rollout": {"group_size": 4, "max_tokens": 24},
        "trainer": {"steps": 3, "batch_size": 4, "placement": "separate", "max_staleness": max_staleness},
        "track": {"trackers": ["jsonl"], "plot": False},
    }
    result = UnifiedTrainer(config).fit()
    account = Ledger.read(result.run_dir).account()
    assert result.steps == 3 and account.trained + account.filtered >= 48
