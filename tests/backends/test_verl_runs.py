"""Runs on verl's workers, and the loss of one. Where verl is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp_cases import losses, steps
from headrace import UnifiedTrainer
from headrace.ledger import Ledger
from verl_cases import new_group, verl_config
from verl_pool import WHY, has_verl, verl_sections

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not has_verl(), reason=WHY)]

PPO = next(case for case in losses() if case.name == "ppo_clip")


def test_a_killed_worker_changes_nothing(tmp_path: Path) -> None:
    import ray

    calm, hit = new_group(verl_config(PPO)), new_group(verl_config(PPO))
    for group in (calm, hit):
        steps(group, PPO, [1])
        group.save(tmp_path / str(group is calm))
        group.saved(tmp_path / str(group is calm))
        steps(group, PPO, [2])
        group.forward_backward(PPO.batch(3), PPO.algorithm)
    ray.kill(hit.ranks._actors[1])  # type: ignore[attr-defined]
    for group in (calm, hit):
        group.forward_backward(PPO.batch(4), PPO.algorithm)  # from the checkpoint, with what came after it
        group.optim_step(1e-3, 0.01)
    assert (calm.restarts, hit.restarts) == (0, 1)
    ours, theirs = (group.together("weights")[0] for group in (calm, hit))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    calm.close()
    hit.close()


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_countdown_trains(tmp_path: Path, max_staleness: int) -> None:
    given = verl_sections(2, trainer={"steps": 3, "batch_size": 4, "max_staleness": max_staleness, "save_every": 2})
    config: dict[str, Any] = {
        **given,
        "run": {"dir": str(tmp_path), "name": "run"},
        "data": {"tasks": "countdown", "args": {"split": "train", "count": 50}},
        "workflow": {"name": "single_turn", "judger": "countdown"},
        "rollout": {"group_size": 4, "max_tokens": 24},
        "track": {"trackers": ["jsonl"], "plot": False},
    }
    result = UnifiedTrainer(config).fit()
    account = Ledger.read(result.run_dir).account()
    assert result.steps == 3 and account.trained + account.filtered >= 48
