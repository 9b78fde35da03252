"""Runs whose ranks are killed at seeded moments: the same weights, the same account as without."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from fork_server import ForkServer
from headrace import UnifiedTrainer
from headrace.backends.ranks import pipes
from headrace.ledger import Ledger
from headrace.trainer.callbacks import Callback

STEPS = 4


@pytest.fixture(autouse=True, scope="module")
def forked_ranks() -> Iterator[None]:
    """Ranks by fork: importing what they need takes seconds each time."""
    server = ForkServer("rank")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipes, "launch_rank", server.launch_rank)
        yield
    server.close()


class Kills(Callback):
    """Kills a rank at a seeded moment after the beginning of a step."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        self._at, self._after_s, self._which = rng.randrange(STEPS), rng.uniform(0.0, 2.5), rng.randrange(2)
        self.killed: list[int] = []

    def on_train_start(self, trainer: Any) -> None:
        self._group = trainer._run.backend.group

    def on_batch_start(self, step: int) -> None:
        if step == self._at and not self.killed:
            threading.Thread(target=self._kill, daemon=True).start()

    def _kill(self) -> None:
        time.sleep(self._after_s)
        self.killed.append(self._group.ranks.pids[self._which])
        with suppress(ProcessLookupError):
            os.kill(self.killed[-1], signal.SIGKILL)


def fit(folder: Path, *callbacks: Callback, **trainer: Any) -> tuple[list[str | None], Any, int]:
    """Fingerprints of all versions, the account, and how often ranks were started again."""
    config: dict[str, Any] = {
        "run": {"dir": str(folder), "name": "run", "deterministic": True},
        "backend": {"name": "fsdp", "ranks": 2, "threads": 1},
        "data": {"tasks": "countdown", "args": {"split": "train", "count": 50}},
        "workflow": {"name": "single_turn", "judger": "countdown"},
        "rollout": {"group_size": 4, "max_tokens": 24},
        "optimizer": {"lr": 1e-3},
        "trainer": {"steps": STEPS, "batch_size": 4, "placement": "separate", "save_every": 2, **trainer},
        "track": {"trackers": ["jsonl"], "plot": False},
    }
    groups: list[Any] = []

    class Looks(Callback):
        def on_train_start(self, trainer: Any) -> None:
            groups.append(trainer._run.backend.group)

    result = UnifiedTrainer(config, callbacks=[Looks(), *callbacks]).fit()
    assert result.steps == STEPS
    ledger = Ledger.read(result.run_dir)
    synced = [ledger.weight_sync(version) for version in range(STEPS + 1)]
    account = ledger.account()
    ledger.close()
    return [one.fingerprint if one else None for one in synced], account, groups[0].restarts


@pytest.mark.slow
def test_a_deterministic_run_whose_ranks_are_killed_ends_with_the_same_weights(tmp_path: Path) -> None:
    expected, account, restarts = fit(tmp_path / "calm")
    assert restarts == 0 and None not in expected and len(set(expected)) == STEPS + 1
    for seed in range(10):
        kills = Kills(seed)
        found, counted, restarts = fit(tmp_path / str(seed), kills)
        assert kills.killed, f"seed {seed}: nothing was killed"
        assert found == expected and counted == account, f"seed {seed}, ranks were started again {restarts} times"


@pytest.mark.slow
def test_an_asynchronous_run_survives_the_loss_of_a_rank(tmp_path: Path) -> None:
    for seed in range(3):
        kills = Kills(seed)
        _, account, _ = fit(tmp_path / str(seed), kills, max_staleness=2)
        trained = account.trained + account.filtered + account.failed + account.stale + account.pending
        assert kills.killed and account.dispatched == trained
