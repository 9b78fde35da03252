"""Runs whose ranks are killed at seeded moments: the same weights, the same account as without."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from headrace import UnifiedTrainer
from headrace.evaluation.evaluate import export_run
from headrace.ledger import Ledger
from headrace.trainer.callbacks import Callback
from headrace.trainer.replay import Replay

STEPS = 4


pytestmark = pytest.mark.usefixtures("forked_ranks")


class Kills(Callback):
    """Kills a rank at a seeded moment after the beginning of a step."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        self._at, self._after_s, self._which = rng.randrange(STEPS - 1), rng.uniform(0.0, 0.6), rng.randrange(2)
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


def run_values(folder: Path, deterministic: bool = True, ranks: int = 2, **trainer: Any) -> dict[str, Any]:
    return {
        "run": {"dir": str(folder), "name": "run", "deterministic": deterministic},
        "backend": {"name": "fsdp", "ranks": ranks, "threads": 1},
        "data": {"tasks": "countdown", "args": {"split": "train", "count": 50}},
        "workflow": {"name": "single_turn", "judger": "countdown"},
        "rollout": {"group_size": 4, "max_tokens": 24},
        "optimizer": {"lr": 1e-3},
        "trainer": {"steps": STEPS, "batch_size": 4, "placement": "separate", "save_every": 2, **trainer},
        "track": {"trackers": ["jsonl"], "plot": False},
    }


def fit(folder: Path, *callbacks: Callback, **trainer: Any) -> tuple[list[str | None], Any, int]:
    """Digests of all versions, the account, and how often ranks were started again."""
    groups: list[Any] = []

    class Looks(Callback):
        def on_train_start(self, trainer: Any) -> None:
            groups.append(trainer._run.backend.group)

    result = UnifiedTrainer(run_values(folder, **trainer), callbacks=[Looks(), *callbacks]).fit()
    assert result.steps == STEPS
    ledger = Ledger.read(result.run_dir)
    synced = [ledger.weight_sync(version) for version in range(1, STEPS + 1)]
    account = ledger.account()
    ledger.close()
    return [one.digest if one else None for one in synced], account, groups[0].restarts


@pytest.mark.slow
def test_a_deterministic_run_whose_ranks_are_killed_ends_with_the_same_weights(tmp_path: Path) -> None:
    expected, account, restarts = fit(tmp_path / "calm")
    assert restarts == 0 and None not in expected and len(set(expected)) == STEPS
    for seed in range(30):
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


@pytest.mark.slow
def test_a_run_is_resumed_with_another_number_of_ranks_evaluated_and_exported(tmp_path: Path) -> None:
    assert UnifiedTrainer(run_values(tmp_path, deterministic=False, steps=2)).fit().steps == 2
    resumed = UnifiedTrainer(run_values(tmp_path, deterministic=False, ranks=1, steps=4)).fit()
    assert resumed.steps == 4
    folder = export_run(resumed.run_dir, tmp_path / "model")  # by the local backend
    assert (folder / "model.safetensors").is_file()
    replayed = list(Replay(resumed.run_dir, until=1))  # up to rounding
    assert [step.step for step in replayed] == [1]


@pytest.mark.slow
def test_ranks_feed_several_engine_replicas_to_the_same_bits(tmp_path: Path) -> None:
    found = []
    for replicas in (1, 2):
        values = run_values(tmp_path / str(replicas)) | {"engine": {"replicas": replicas, "threads": 1}}
        ledger = Ledger.read(UnifiedTrainer(values).fit().run_dir)
        found.append([ledger.weight_sync(version) for version in range(1, STEPS + 1)])
        ledger.close()
    one, two = ([synced and synced.digest for synced in each] for each in found)
    assert one == two and None not in one
