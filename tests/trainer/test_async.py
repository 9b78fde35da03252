"""Schedules on the real engine and learner: what asynchronous training must not change, and what it must survive."""

from __future__ import annotations

import json
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from headrace import Callback, Model, Task, UnifiedTrainer
from headrace.config.loading import build_config
from headrace.engines.request import Request
from headrace.errors import WeightSyncError
from headrace.ledger import Ledger
from headrace.run.checkpoint import list_checkpoints
from headrace.trainer.trainer import RunResult


def train(run_dir: Path, workflow: Any = None, callbacks: Any = (), **sections: Any) -> RunResult:
    torch.set_num_threads(1)
    small: dict[str, Any] = {
        "run": {"dir": str(run_dir)},
        "workflow": {} if workflow else {"judger": "countdown"},
        "rollout": {"group_size": 4, "max_tokens": 24},
        "trainer": {"steps": 3, "batch_size": 3},
        "optimizer": {"lr": 1e-4},
        "data": {"args": {"count": 64}},
        "track": {"trackers": ["jsonl"], "plot": False},
    }
    laid = {key: {**small.get(key, {}), **sections.get(key, {})} for key in {*small, *sections}}
    return UnifiedTrainer(build_config(laid), workflow, callbacks=callbacks).fit()


def weights(result: RunResult) -> dict[str, Any]:
    return load_file(list_checkpoints(result.run_dir)[-1] / "weights.safetensors")


def rows(result: RunResult) -> list[dict[str, float]]:
    return [json.loads(line) for line in (result.run_dir / "metrics.jsonl").read_text().splitlines()]


async def varied(task: Task, model: Model) -> float:
    """Rewards that differ within a group, so that there is something to learn."""
    reply = await model.chat(task.messages)
    return float(sum(reply.completion_ids) % 5)


def test_at_bound_zero_the_separate_engine_gives_the_bits_of_synchronous_training(tmp_path: Path) -> None:
    same: dict[str, Any] = {"run": {"dir": str(tmp_path), "deterministic": True}}
    ten = {"steps": 10, "batch_size": 3}
    in_step = train(tmp_path, varied, **{"run": {**same["run"], "name": "a"}, "trainer": ten})
    apart = train(tmp_path, varied, run={**same["run"], "name": "b"}, trainer={**ten, "placement": "separate"})
    one, two = weights(in_step), weights(apart)
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
    assert [row["reward/mean"] for row in rows(in_step)] == [row["reward/mean"] for row in rows(apart)]
    assert {row["staleness/max"] for row in rows(apart)} == {0.0}


@pytest.mark.parametrize("deterministic", [True, False])
def test_learning_piece_by_piece_equals_learning_all_at_once(tmp_path: Path, deterministic: bool) -> None:
    found = []
    for stream in (False, True):
        run = {"dir": str(tmp_path), "name": str(stream), "deterministic": deterministic}
        # one step, so that what was sampled is the same; a second would sample from weights that differ by rounding
        result = train(tmp_path, varied, run=run, trainer={"steps": 1, "batch_size": 6, "stream": stream})
        found.append((weights(result), rows(result)[-1]["policy/grad_norm"]))
    (one, norm_1), (two, norm_2) = found
    if deterministic:
        assert all(torch.equal(one[name], two[name]) for name in one)
    # Adam's first step is lr times the sign of the gradient, so the gradients are compared by their norm too
    assert norm_1 == pytest.approx(norm_2, rel=1e-5)
    assert max(float((one[name] - two[name]).abs().max()) for name in one) <= (0.0 if deterministic else 2e-4)


@pytest.mark.parametrize("placement", ["colocate", "separate"])
def test_generation_runs_ahead_and_every_token_knows_its_version(tmp_path: Path, placement: str) -> None:
    result = train(tmp_path, varied, trainer={"steps": 5, "batch_size": 2, "placement": placement, "max_staleness": 2})
    steps = rows(result)
    assert max(row["staleness/max"] for row in steps) >= 1
    assert steps[-1]["episodes/trained"] == 5 * 2 * 4
    dispatched, *settled = (
        steps[-1][f"episodes/{name}"] for name in ("dispatched", "trained", "filtered", "failed", "stale", "pending")
    )
    assert dispatched == sum(settled)


class KillEngine(Callback):
    """SIGKILLs the engine's process once, while it decodes."""

    def on_train_start(self, trainer: Any) -> None:
        self.engine = trainer.engine

    def on_batch_start(self, step: int) -> None:
        if step == 1:
            os.kill(self.engine.pid, signal.SIGKILL)


def test_an_engine_that_is_killed_is_started_again_and_nothing_is_lost(tmp_path: Path) -> None:
    placed = {"steps": 4, "batch_size": 2, "placement": "separate", "max_staleness": 1}
    result = train(tmp_path, varied, [KillEngine()], trainer=placed)
    last = rows(result)[-1]
    assert result.steps == 4
    assert (last["episodes/trained"], last["episodes/failed"]) == (4 * 2 * 4, 0)


class KillReplicas(Callback):
    """SIGKILLs one replica of a pool after the other, while they decode."""

    def on_train_start(self, trainer: Any) -> None:
        self.replicas = trainer.engine.replicas

    def on_batch_start(self, step: int) -> None:
        with suppress(ProcessLookupError):  # it is just being started again
            os.kill(self.replicas[step % len(self.replicas)].engine.pid, signal.SIGKILL)


def test_replicas_that_are_killed_come_back_and_nothing_is_lost_or_trained_twice(tmp_path: Path) -> None:
    placed = {"steps": 4, "batch_size": 2, "placement": "separate", "max_staleness": 1}
    result = train(tmp_path, varied, [KillReplicas()], trainer=placed, engine={"replicas": 2})
    last = rows(result)[-1]
    assert result.steps == 4
    assert (last["episodes/trained"], last["episodes/failed"]) == (4 * 2 * 4, 0)
    assert last["episodes/dispatched"] == sum(
        last[f"episodes/{name}"] for name in ("trained", "filtered", "failed", "stale", "pending")
    )
    assert last["engine/restarts"] >= 1 and {"engine/reissued", "engine/replica/1/tokens"} <= last.keys()
    with Ledger.read(result.run_dir) as ledger:
        trained = [group for batch in ledger.batches_from(0) for group in batch.group_ids]
    assert len(trained) == len({*trained}) == 8


def test_an_evaluation_beside_asynchronous_training_is_of_the_version_it_began_with(tmp_path: Path) -> None:
    seen: list[tuple[str, int]] = []

    class Watch(Callback):
        def on_validation_start(self, step: int) -> None:
            seen.append(("start", step))

        def on_validation_end(self, step: int, metrics: Any) -> None:
            seen.append(("end", step))

    sets = {"countdown": {"tasks": "countdown", "args": {"split": "test", "count": 6}}}
    result = train(
        tmp_path,
        None,
        [Watch()],
        trainer={"steps": 5, "batch_size": 2, "max_staleness": 2},
        eval={"every": 2, "sets": sets},
    )
    assert seen[:2] == [("start", 0), ("end", 0)] and seen[-1] == ("end", 5)
    found = [row["eval/step"] for row in rows(result) if "eval/step" in row]
    assert found == [0.0, 2.0, 4.0, 5.0] or found == [0.0, 2.0, 5.0]  # the one of step 4 may end with step 5


def test_weights_that_do_not_arrive_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace.engines.torch.engine import TorchEngine

    end_update = TorchEngine.end_update

    async def other_weights(self: TorchEngine, version: int) -> str:
        await end_update(self, version)
        return "0" * 16

    monkeypatch.setattr(TorchEngine, "end_update", other_weights)
    with pytest.raises(WeightSyncError, match="digest"):
        train(tmp_path, varied)


def test_a_sampler_that_differs_from_the_learner_at_the_same_version_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = Request.take

    def skewed(request: Request, tokens: Any, logprobs: Any, *others: Any) -> None:
        take(request, tokens, [value - 1.0 for value in logprobs], *others)

    monkeypatch.setattr(Request, "take", skewed)
    with pytest.raises(WeightSyncError, match=r"differ by 1 on average .* alarm\.stop_drift 0\.5"):
        train(tmp_path, varied)


def test_the_phases_take_turns_and_report_their_peaks(tmp_path: Path) -> None:
    last = rows(train(tmp_path, varied))[-1]
    assert last["memory/generate_peak_mb"] > 50 and last["memory/train_peak_mb"] > 50
