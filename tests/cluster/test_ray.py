"""Real Ray: two raylets on this machine. `make test-slow` runs it where the extra ray is installed."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.cli.main import run
from headrace.config import ClusterSection, JudgeSection, RunConfig
from headrace.config.loading import build_config
from headrace.data.episode import Episode, Step, Trajectory
from headrace.data.task import Task
from headrace.errors import ConfigError, DataError
from headrace.judge.base import JudgeError, Judger, Verdict
from headrace.judge.router import GuardedJudger, configured_judger

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.slow

from ray.cluster_utils import Cluster  # noqa: E402  # pyright: ignore[reportMissingImports]

from headrace.cluster.placement import open_placements, place  # noqa: E402
from headrace.cluster.status import cluster_status  # noqa: E402
from headrace.judge.actors import RayJudger, serialisable  # noqa: E402


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A head and a second node, which has the label "pool"."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    # workers must find the judgers of this module
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    small: dict[str, Any] = {"object_store_memory": 100 * 2**20}
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False, **small})
    nodes.add_node(num_cpus=2, labels={"pool": "second"}, **small)
    nodes.wait_for_nodes()
    yield nodes
    ray.shutdown()
    nodes.shutdown()


@pytest.fixture
def section(cluster: Cluster) -> ClusterSection:
    return ClusterSection(address=str(cluster.address), judger={"CPU": 0.2}, patience_s=30, strategy="SPREAD")


def episode(text: str) -> Episode:
    step = Step((1,), (2,), (-0.5,), (0,), messages=({"role": "user", "content": "?"},), text=text)
    return Episode("t", (Trajectory((step,)),))


TASK = Task("t", ({"role": "user", "content": "?"},), answer="yes")


class Slow(Judger):
    """Says which process judged, after a while."""

    def __init__(self, seconds: float = 0.0) -> None:
        self._seconds = seconds

    async def judge(self, task: Task, episode: Episode) -> Verdict:
        await asyncio.sleep(self._seconds)
        return Verdict(float(episode.text == task.answer), metrics={"pid": float(os.getpid())})


class Fails(Judger):
    async def judge(self, task: Task, episode: Episode) -> Verdict:
        raise DataError("no such column; add one")


class Holds(Judger):
    def __init__(self) -> None:
        self.lock = threading.Lock()

    async def judge(self, task: Task, episode: Episode) -> Verdict:
        return Verdict(1.0)


async def judged(judger: Judger, *texts: str) -> list[Verdict]:
    try:
        return await asyncio.gather(*(judger.judge(TASK, episode(text)) for text in texts))
    finally:
        await judger.close()  # type: ignore[attr-defined]


def test_verdicts_are_those_of_a_local_judger(cluster: Cluster) -> None:
    values = {
        "workflow": {"judger": "exact"}, "judge": {"placement": "ray"},
        "cluster": {"address": cluster.address, "judger": {"CPU": 0.2}},
    }  # fmt: skip
    there, here = build_config(values), build_config({"workflow": {"judger": "exact"}})
    texts = ("yes", "no", "Yes.", "")

    async def both(config: RunConfig) -> list[Verdict]:
        judger = configured_judger(config)
        assert judger is not None
        return await judged(judger, *texts)

    assert asyncio.run(both(there)) == asyncio.run(both(here))


def test_actors_spread_over_nodes_and_share_the_work(section: ClusterSection) -> None:
    judger = RayJudger(lambda: Slow(0.2), 2, 8, section)
    (placed,) = open_placements()
    assert len(set(placed.node_names())) == 2 and placed.describe().startswith("placed 2 × judger {CPU: 0.2} on ")
    found = asyncio.run(judged(judger, *["yes"] * 8))
    assert [one.reward for one in found] == [1.0] * 8
    pids = [one.metrics["pid"] for one in found]
    assert len(set(pids)) == 2 and os.getpid() not in pids and pids.count(pids[0]) == 4
    assert open_placements() == []


def test_calls_of_an_actor_that_is_killed_are_made_again(section: ClusterSection) -> None:
    judger = GuardedJudger(RayJudger(lambda: Slow(1.5), 2, 8, section), JudgeSection(retries=0))

    async def killed() -> list[Verdict]:
        first = await asyncio.gather(*(judger.judge(TASK, episode("yes")) for _ in range(2)))
        pids = sorted({int(one.metrics["pid"]) for one in first})
        waiting = [asyncio.ensure_future(judger.judge(TASK, episode("yes"))) for _ in range(6)]
        await asyncio.sleep(0.3)
        os.kill(pids[0], signal.SIGKILL)
        found = await asyncio.gather(*waiting)
        await judger.close()
        return found

    found = asyncio.run(killed())
    assert [one.reward for one in found] == [1.0] * 6
    assert judger.failed == 0 and judger.judger.lost >= 3  # type: ignore[attr-defined]


def test_a_judgers_own_error_arrives_as_it_was_raised(section: ClusterSection) -> None:
    judger = RayJudger(Fails, 1, 1, section)
    with pytest.raises(DataError, match="no such column; add one"):
        asyncio.run(judged(judger, "yes"))


def test_the_time_limit_of_judging_holds(section: ClusterSection) -> None:
    judger = GuardedJudger(RayJudger(lambda: Slow(60.0), 1, 1, section), JudgeSection(timeout_s=0.5, retries=0))
    with pytest.raises(JudgeError, match=r"longer than 0\.5 s"):
        asyncio.run(judged(judger, "yes"))


def test_what_cannot_be_sent_is_refused_or_left_out(section: ClusterSection) -> None:
    held = Holds()
    with pytest.raises(ConfigError, match=r'"Holds" cannot be sent to an actor .* judge\.placement = "local"'):
        RayJudger(lambda: held, 1, 1, section)
    whole = Task("t", ({"role": "user", "content": "?"},), metadata={"lock": threading.Lock(), "n": 1})
    assert serialisable(whole).metadata == {"lock": None, "n": 1}
    assert serialisable(TASK) is TASK


def test_a_judger_that_its_actor_cannot_build_is_an_error_at_once(section: ClusterSection) -> None:
    here = os.getpid()

    def recipe() -> Judger:
        if os.getpid() != here:
            raise ModuleNotFoundError("No module named 'mine'")
        return Slow()

    with pytest.raises(ConfigError, match=r"cannot be built in an actor: .*No module named 'mine'"):
        RayJudger(recipe, 1, 1, section)
    assert open_placements() == []


def test_labels_choose_nodes_and_what_does_not_fit_is_an_error(cluster: Cluster, section: ClusterSection) -> None:
    placed = place("judger", 2, {"CPU": 0.5}, section.model_copy(update={"labels": {"pool": "second"}}))
    assert len(set(placed.node_names())) == 1
    placed.close()
    with pytest.raises(ConfigError, match=r"cannot hold 1 × judger {'GPU': 8\.0}.*add nodes, ask for less"):
        place("judger", 1, {"GPU": 8.0}, section.model_copy(update={"patience_s": 2.0}))


def test_no_cluster_at_an_address_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    ray.shutdown()
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(ConfigError, match=r"there is no Ray cluster at cluster\.address"):
        place("judger", 1, {"CPU": 1}, ClusterSection(address="127.0.0.1:1"))
    with pytest.raises(ConfigError, match=r"or give the address of one: headrace cluster status HOST:6379"):
        cluster_status("127.0.0.1:1")


def test_ray_that_does_not_start_here_is_an_error_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def times_out(**_: object) -> None:
        raise Exception("The current node timed out during startup.")  # as Ray does

    ray.shutdown()
    monkeypatch.setattr(ray, "init", times_out)
    with pytest.raises(ConfigError, match=r"does not start on this machine \(The current node timed out.*try again"):
        place("judger", 1, {"CPU": 1}, ClusterSection(address="local"))


def test_status_shows_nodes_placements_and_versions(
    cluster: Cluster, section: ClusterSection, capsys: pytest.CaptureFixture[str]
) -> None:
    placed = place("judger", 2, {"CPU": 0.5}, section)
    found = cluster_status(str(cluster.address))
    assert [node.health for node in found.nodes if node.health != "dead"] == ["ok", "ok"]
    assert all(node.versions["ray"] == ray.__version__ for node in found.nodes if node.health == "ok")
    (shown,) = found.placements
    assert shown.what == "judger" and shown.state == "CREATED" and len(set(shown.nodes)) == 2
    assert run(["cluster", "status", str(cluster.address)]) in (0, 1)
    out = capsys.readouterr().out
    assert "judger" in out and "pool=second" in out and "CPU 1.5/2" in out
    placed.close()


def test_training_with_judgers_on_the_cluster_is_as_with_local_ones(
    cluster: Cluster, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    file = tmp_path / "run.toml"
    file.write_text(
        "[data]\ntasks = 'countdown'\nargs = { split = 'train', count = 20 }\n[workflow]\njudger = 'countdown'\n"
        "[rollout]\ngroup_size = 4\nmax_tokens = 24\n[trainer]\nsteps = 2\nbatch_size = 2\n"
        "[run]\ndeterministic = true\n"
        "[track]\nplot = false\n"
    )
    on_ray = [
        "--judge.placement=ray", f"--cluster.address={cluster.address}", "--cluster.judger", "{ CPU = 0.2 }",
        "--cluster.strategy=SPREAD",
    ]  # fmt: skip
    assert run(["train", str(file), "--run-dir", str(tmp_path / "ray"), *on_ray]) == 0
    assert "placed 2 × judger {CPU: 0.2} on " in " ".join(capfd.readouterr().out.split())
    assert run(["train", str(file), "--run-dir", str(tmp_path / "here")]) == 0
    rewards = [_rewards(tmp_path / name / "metrics.jsonl") for name in ("ray", "here")]
    assert rewards[0] == rewards[1] and len(rewards[0]) == 2
    assert signal.getsignal(signal.SIGTERM) == before
    assert open_placements() == []


def _rewards(path: Path) -> list[tuple[float, float]]:
    import json

    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [(row["reward/before_filters/mean"], row["loss/total"]) for row in rows if "loss/total" in row] or [
        (row["reward/before_filters/mean"], row["step"]) for row in rows if "reward/before_filters/mean" in row
    ]


def test_a_node_that_is_killed_takes_its_judgers_and_their_calls_are_made_again(
    cluster: Cluster, section: ClusterSection
) -> None:
    """Last: it takes the second node away."""
    extra = cluster.add_node(num_cpus=1, resources={"spare": 1}, object_store_memory=100 * 2**20)
    cluster.wait_for_nodes()
    judger = RayJudger(lambda: Slow(0.5), 3, 12, section.model_copy(update={"strategy": "STRICT_SPREAD"}))

    async def lost() -> list[Verdict]:
        await asyncio.gather(*(judger.judge(TASK, episode("yes")) for _ in range(3)))
        waiting = [asyncio.ensure_future(judger.judge(TASK, episode("yes"))) for _ in range(9)]
        await asyncio.sleep(0.1)
        await asyncio.to_thread(cluster.remove_node, extra, allow_graceful=False)
        found = await asyncio.gather(*waiting)
        await judger.close()
        return found

    assert [one.reward for one in asyncio.run(lost())] == [1.0] * 9
