"""A server on a node ends with its actor, however Ray or somebody else ends that, and with the node."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.slow

from ray.cluster_utils import Cluster  # noqa: E402  # pyright: ignore[reportMissingImports]

from headrace.engines.servers.on_ray import ServerActor  # noqa: E402
from stubborn_program import left, started, stubborn  # noqa: E402
from two_raylets import add_node, two_raylets  # noqa: E402


def stubborn_launch(pids: Path) -> Any:
    """Not a server: it ends by SIGKILL only, and has a child that does so, too."""
    given = stubborn(pids)

    class Launch:  # in here, so that it is sent whole: actors do not find this module
        def listening(self, host: str, token: str) -> Any:
            return self

        def command(self, port: int) -> list[str]:
            return given

        def environment(self) -> dict[str, str]:
            return {}

    return Launch()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with two_raylets() as nodes:
        ray.init(address=nodes.address)
        yield nodes


def new_actor(folder: Path, **options: Any) -> tuple[Any, int, list[int]]:
    """An actor, its process, and those of its program."""
    remote: Any = ray.remote
    actor = remote(num_cpus=0.1, max_restarts=0, **options)(ServerActor).remote()
    ray.get(actor.start.remote(stubborn_launch(folder / "pids"), "token", folder / "logs" / "log"))
    return actor, ray.get(actor.pid.remote()), started(folder / "pids")


WAYS: dict[str, Callable[[Any, int], object]] = {
    "SIGKILL": lambda actor, pid: os.kill(pid, signal.SIGKILL),
    "SIGTERM": lambda actor, pid: os.kill(pid, signal.SIGTERM),
    "ray.kill": lambda actor, pid: ray.kill(actor),
    "no more use": lambda actor, pid: actor.__ray_terminate__.remote(),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_server_ends_with_its_actor(cluster: Cluster, tmp_path: Path, way: str) -> None:
    actor, pid, program = new_actor(tmp_path)
    WAYS[way](actor, pid)
    assert left(program, 10.0) == []


@pytest.mark.parametrize("graceful", [False, True])
def test_a_server_ends_with_its_node(cluster: Cluster, tmp_path: Path, graceful: bool) -> None:
    node = add_node(cluster, 1, resources={"lost": 1})
    _, _, program = new_actor(tmp_path, resources={"lost": 1})
    cluster.remove_node(node, allow_graceful=graceful)
    assert left(program, 10.0) == []
