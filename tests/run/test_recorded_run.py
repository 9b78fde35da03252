"""Run folders of older programs resume.

`recorded_run.tar.xz` holds a run whose ledger has tables of version 2, without identity and checksums: a tiny model,
nine tasks, generation one step ahead, killed in its 5th step of 7. Its checkpoint is of step 4; its ledger has the
batch of step 5, without the end of its update, and two complete groups.
"""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any

import pytest

from crash_checks import check_account, metrics, rows
from headrace import UnifiedTrainer
from headrace.config.loading import build_config
from headrace.run.checkpoint import list_checkpoints
from headrace.trainer.replay import Replay

ARCHIVE = Path(__file__).parent / "recorded_run.tar.xz"
SECTIONS: dict[str, Any] = {
    "run": {"dir": ".", "name": "r", "deterministic": True},
    "model": {"name": "tiny"},
    "data": {"tasks": "tasks.jsonl"},
    "workflow": {"name": "agent.py:talk"},
    "rollout": {"group_size": 3, "max_tokens": 5},
    "optimizer": {"lr": 1e-3},
    "trainer": {
        "steps": 7, "batch_size": 2, "save_every": 2, "keep_last": 1, "max_staleness": 1, "staleness": "wait",
        "save_async": False,
    },
    "track": {"trackers": ["jsonl"], "plot": False},
}  # fmt: skip
MEMBERS = "SELECT step, group_id FROM batch_groups ORDER BY 1, place"


def test_a_run_of_an_older_program_resumes_and_finishes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path)
    run_dir = tmp_path / "r"
    recorded = rows(run_dir, MEMBERS)
    assert rows(run_dir, "PRAGMA user_version") == [(2,)] and recorded[-1][0] == 4
    UnifiedTrainer(build_config(SECTIONS)).fit()
    assert (run_dir / "finished").exists() and list_checkpoints(run_dir)[-1].name == "step_000007"
    assert rows(run_dir, MEMBERS)[: len(recorded)] == recorded
    assert [row["step"] for row in metrics(run_dir)] == list(range(1, 8))
    check_account(run_dir)
    said = (run_dir / "log.txt").read_text()
    assert "repeating 1 recorded steps, from step 5" in said
    assert said.count("warning") == 1 and "has no numerics.json" in said
    assert len(Replay(run_dir)) == 7
