"""Real vLLM servers that are killed, ten times in one run: nothing is lost, nothing is trained twice, and it ends."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm_servers import vllm_python

from crash_checks import check_account, check_batches, check_metrics, check_tasks, check_tokens, metrics, rows
from headrace import Callback, Model, Task, UnifiedTrainer
from headrace.config.loading import build_config
from headrace.engines.pool import EnginePool, Replica
from headrace.evaluation.evaluate import config_of
from headrace.weights.transfers.file import FileTransfer

pytestmark = pytest.mark.slow
GROUPS, SIZE, TASKS = 3, 4, 500  # of a batch, of a group, of the run
KILLS = (
    ("API server", 0), ("engine core", 1), ("API servers of all replicas", None), ("API server, in a sync", 0),
    ("engine core, in a sync", 1), ("engine cores of all replicas, in a sync", None), ("worker", 0), ("engine core", 1),
)  # fmt: skip
VICTIMS = sum(2 if number is None else 1 for _, number in KILLS)  # ten
STEPS = 8 * len(KILLS)  # more than the kills need
TITLES = {"engine core": "VLLM::EngineCore", "worker": "VLLM::Worker"}


def victim(replica: Replica, what: str) -> int:
    """The process of a replica's server that a kill is about."""
    child = replica.engine.server.child  # type: ignore[attr-defined]
    assert child is not None
    first, *others = child.descendants()
    title = next((title for name, title in TITLES.items() if what.startswith(name)), None)
    if title is None:
        return first
    return next(pid for pid in others if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(title.encode()))


def has_served(replica: Replica) -> bool:
    """Since it was started: one that dies four times without it is given up."""
    return replica.engine.server._deaths == 0  # type: ignore[attr-defined]


def until(what: str, holds: Callable[[], bool], limit_s: float = 600.0) -> None:
    end = time.monotonic() + limit_s
    while not holds():
        if time.monotonic() > end:
            raise AssertionError(f"waited {limit_s:g} s until {what}")
        time.sleep(0.002)


class Killer(Callback):
    """Kills from a thread of its own, each time when all replicas serve and those that it kills are decoding.

    Tasks wait at a gate, which opens for some more before each kill: so the run lasts as long as the kills.
    """

    def __init__(self) -> None:
        self.allowed = 0
        self.killed: list[tuple[str, str]] = []
        self.errors: list[BaseException] = []
        self._in_sync: Callable[[], None] | None = None
        self._thread = threading.Thread(target=self._work, daemon=True)

    def on_train_start(self, trainer: Any) -> None:
        self.pool: EnginePool = trainer.engine
        self._thread.start()

    def sending(self) -> None:
        """Weights are about to be sent."""
        kill, self._in_sync = self._in_sync, None
        if kill is not None:
            kill()

    async def at_the_gate(self, number: int) -> None:
        while number >= self.allowed:  # noqa: ASYNC110  (another thread opens it)
            await asyncio.sleep(0.02)

    def _work(self) -> None:
        try:
            for what, number in KILLS:
                self._one_kill(what, self.pool.replicas if number is None else [self.pool.replicas[number]])
        except BaseException as error:
            self.errors.append(error)
        finally:
            self.allowed = TASKS

    def _let_in_until(self, what: str, holds: Callable[[], bool]) -> None:
        """Open the gate for two batches, and for more if those do not bring it about."""
        for _ in range(20):
            self.allowed += 2 * GROUPS
            with suppress(AssertionError):
                return until(what, holds, 15.0)
        raise AssertionError(f"no task brings it about that {what}")

    def _one_kill(self, what: str, replicas: list[Replica]) -> None:
        until(f"all replicas serve, before {what}", lambda: all(one.serves for one in self.pool.replicas))
        self._let_in_until(f"all have served, before {what}", lambda: all(map(has_served, self.pool.replicas)))
        restarts = [one.engine.health().restarts for one in replicas]

        def kill() -> None:
            for one in replicas:
                with suppress(ProcessLookupError):
                    os.kill(victim(one, what), signal.SIGKILL)
                self.killed.append((what, f"replica {one.number}, {one.in_flight} requests in flight"))

        in_sync = what.endswith("in a sync")
        if in_sync:
            self._in_sync = kill
        if in_sync:
            self._let_in_until(f"there is a sync for {what}", lambda: self._in_sync is None)
        else:
            self._let_in_until(f"replicas decode for {what}", lambda: any(one.in_flight for one in replicas))
            time.sleep(0.1)
            kill()
        for one, before in zip(replicas, restarts, strict=True):
            until(f"{what} is noticed", lambda: one.engine.health().restarts > before)  # noqa: B023


@pytest.fixture
def killer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Killer]:
    one, send = Killer(), FileTransfer.send

    def watched(self: FileTransfer, *given: Any) -> Any:
        one.sending()
        return send(self, *given)

    monkeypatch.setattr(FileTransfer, "send", watched)
    yield one


def settings(folder: Path) -> dict[str, Any]:
    return {
        "run": {"dir": str(folder), "name": "killed"},
        "rollout": {"group_size": SIZE, "max_tokens": 100},
        "trainer": {"steps": STEPS, "batch_size": GROUPS, "placement": "separate", "max_staleness": 2},
        "optimizer": {"lr": 1e-4},
        "data": {"shuffle": False},
        "engine": {
            "name": "vllm", "python": vllm_python(), "replicas": 2, "threads": 1, "max_model_length": 256,
            "health_every_s": 0.5, "server_env": {"VLLM_CPU_KVCACHE_SPACE": "1"},
        },
        "track": {"trackers": ["jsonl", "tensorboard"], "plot": False},
    }  # fmt: skip


def test_a_run_outlives_ten_kills_of_its_servers(tmp_path: Path, killer: Killer) -> None:
    torch.set_num_threads(1)

    async def answer(task: Task, model: Model) -> float:
        await killer.at_the_gate(int(task.id))
        reply = await model.chat(task.messages, ignore_eos=True)
        return float(sum(reply.completion_ids) % 5)

    tasks = [Task(id=str(number), instruction=f"Make {number} of 3 and 8.") for number in range(TASKS)]
    result = UnifiedTrainer(build_config(settings(tmp_path)), answer, tasks=tasks, callbacks=[killer]).fit()
    for what, where in killer.killed:
        print(f"killed: {what} ({where})")
    assert not killer.errors, killer.errors
    assert result.steps == STEPS and len(killer.killed) == VICTIMS == 10
    last = metrics(result.run_dir)[-1]
    print(f"restarts {last['engine/restarts']:.0f}, requests issued again {last['engine/reissued']:.0f}")
    assert last["engine/restarts"] >= len(killer.killed)  # a machine that stalls loses more of them
    assert last["engine/reissued"] > 0 and last["episodes/failed"] == 0
    config = config_of(result.run_dir)
    check_account(result.run_dir)
    check_tasks(result.run_dir, config, TASKS)
    check_batches(result.run_dir, config)
    check_tokens(result.run_dir, config)
    check_metrics(result.run_dir, config)
    trained = rows(result.run_dir, "SELECT count(*) FROM batch_groups")
    assert trained == [(STEPS * GROUPS,)]
