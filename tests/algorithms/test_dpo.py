"""Preference pairs through the real model, backend and trainer: on-policy, from a file, and when there are none."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from contracts.backend_contract import IMITATE, random_samples
from headrace import Task, registry
from headrace.algorithms.batching import grad_scale, pack
from headrace.algorithms.preference import SKIP_REASONS
from headrace.config import AlgorithmSection
from headrace.errors import DataError
from headrace.rollout.model_client import Model
from headrace.tracking.base import RunInfo
from recording_backend import (
    FLOAT64,
    assert_same_gradient,
    logged,
    make_backend,
    plain_logprobs,
    plain_model,
    scattered_reward,
    take_gradient,
    trained,
    watched_run,
)

DPO = {"objective": "dpo"}
TWO_STEPS = {"steps": 2, "batch_size": 2, "save_last": False}


class Heard:
    """A tracker that keeps what the run said."""

    def __init__(self) -> None:
        self.messages: list[str] = []

    def start(self, info: RunInfo) -> None: ...
    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...
    def close(self) -> None: ...

    def message(self, text: str) -> None:
        self.messages.append(text)


def test_on_policy_pairs_are_the_best_against_the_worst(tmp_path: Path) -> None:
    result, backend = watched_run(
        tmp_path, scattered_reward, algorithm=DPO, dpo={"beta": 0.5}, trainer=TWO_STEPS, optimizer={"lr": 1e-3}
    )
    first, second = logged(result.run_dir)
    for row in (first, second):
        assert {f"dpo/skipped/{reason}" for reason in SKIP_REASONS} <= row.keys()
        assert row["dpo/pairs"] + sum(row[f"dpo/skipped/{reason}"] for reason in SKIP_REASONS) == 2
    # at first the policy is its own reference
    assert first["dpo/margin"] == pytest.approx(0.0, abs=1e-4)
    assert first["dpo/loss"] == pytest.approx(0.6931, abs=1e-4)
    assert abs(second["dpo/margin"]) > 1e-4 and 0 <= second["dpo/accuracy"] <= 1
    for batch, algorithm in backend.batches:
        assert algorithm.loss == "dpo" and batch.sequences == len(batch.samples) // 2
        for chosen, rejected in zip(batch.samples[::2], batch.samples[1::2], strict=True):
            assert chosen.task_id == rejected.task_id and (chosen.reward or 0) > (rejected.reward or 0)
            assert not any(chosen.advantages)  # the advantage path is not run


def write_pairs(path: Path, count: int = 4) -> str:
    rows = [
        {
            "messages": [{"role": "user", "content": f"{n}+1?"}],
            "metadata": {"chosen": f"<answer>{n + 1}</answer>", "rejected": "No é idea."},
        }
        for n in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_pairs_of_a_file_are_scored_by_the_reference_once(tmp_path: Path) -> None:
    result, backend = watched_run(
        tmp_path / "runs",
        data={"tasks": write_pairs(tmp_path / "pairs.jsonl"), "args": {}},
        workflow={"name": "preference"},
        algorithm=DPO,
        optimizer={"lr": 3e-4},
        trainer={"steps": 6, "batch_size": 2, "save_last": False},
    )
    rows = logged(result.run_dir)
    assert len(rows) == 6 and all(row["dpo/pairs"] == 2 for row in rows)  # three epochs
    assert [len(samples) for samples in backend.referenced] == [4, 4]  # all in the first epoch
    assert len({sample.tokens for samples in backend.referenced for sample in samples}) == 8
    assert rows[-1]["dpo/margin"] > rows[2]["dpo/margin"] > rows[0]["dpo/margin"] == pytest.approx(0.0, abs=1e-4)
    assert rows[-1]["dpo/accuracy"] == 1.0
    initial = plain_model()
    for sample in backend.samples:  # in later epochs, too
        assert sample.reference_logprobs == pytest.approx(plain_logprobs(initial, sample.tokens).tolist(), abs=1e-4)
    said = {
        backend.tokenizer.decode([t for t, kept in zip(s.tokens[1:], s.loss_mask, strict=True) if kept])
        for s in backend.samples
    }
    assert said == {"No é idea.<|im_end|>", *(f"<answer>{n}</answer><|im_end|>" for n in range(1, 5))}


def test_several_updates_on_a_batch_keep_pairs_together(tmp_path: Path) -> None:
    result, backend = watched_run(
        tmp_path / "runs",
        data={"tasks": write_pairs(tmp_path / "pairs.jsonl"), "args": {}},
        workflow={"name": "preference"},
        algorithm=DPO,
        trainer={"steps": 4, "batch_size": 4, "updates_per_batch": 2, "save_last": False},
    )
    assert result.steps == 4 and [len(batch.samples) for batch, _ in backend.batches] == [4] * 4
    for batch, _ in backend.batches:
        assert [sample.reward for sample in batch.samples] == [1.0, 0.0] * 2
        assert [s.task_id for s in batch.samples[::2]] == [s.task_id for s in batch.samples[1::2]]
    assert [len(samples) for samples in backend.referenced] == [8]


def test_a_run_on_given_pairs_is_evaluated_by_asking_the_model(tmp_path: Path) -> None:
    sets = {"countdown": {"tasks": "countdown", "args": {"split": "test", "count": 3}, "max_tokens": 4}}
    result, _ = watched_run(
        tmp_path / "runs",
        data={"tasks": write_pairs(tmp_path / "pairs.jsonl"), "args": {}},
        workflow={"name": "preference", "judger": "countdown"},
        algorithm=DPO,
        eval={"before": False, "after": True, "sets": sets},
    )
    assert result.last_evaluation["eval/countdown/failed"] == 0
    assert result.last_evaluation["eval/countdown/response_tokens"] == 4


def test_a_batch_without_a_pair_is_skipped_said_and_no_step(tmp_path: Path) -> None:
    asked: list[str] = []

    async def tied_at_first(task: Task, model: Model) -> float:
        asked.append(task.id)
        number = len(asked)
        await model.chat(task.messages)
        return float(number) if number > 16 else 1.0  # two batches of two groups of four

    heard = Heard()
    registry.register("tracker", "heard", lambda: heard)
    result, backend = watched_run(
        tmp_path, tied_at_first, algorithm=DPO, trainer=TWO_STEPS, track={"trackers": ["jsonl", "heard"]}
    )
    assert result.steps == 2 and [row["step"] for row in logged(result.run_dir)] == [1, 2]
    assert len(backend.batches) == 2 and len(asked) == 32
    assert [text for text in heard.messages if "no update" in text] == [
        "no update: the batch holds nothing to train {'dpo/skipped/tie': 2.0}"
    ] * 2
    assert result.metrics["episodes/filtered"] == 16 and result.metrics["episodes/trained"] == 16
    assert {version for sample in backend.batches[0][0].samples for version in sample.versions} == {-1, 0}


def test_data_that_is_always_tied_ends_the_run_with_its_cause(tmp_path: Path) -> None:
    async def tied(task: Task, model: Model) -> float:
        await model.chat(task.messages, max_tokens=1)
        return 1.0

    with pytest.raises(DataError, match=r"3 batches in a row held nothing to train.*tie"):
        watched_run(tmp_path, tied, algorithm=DPO, filters={"most_replacements": 3})


async def test_the_gradient_of_a_step_is_that_of_the_formula() -> None:
    """Against transformers and autograd in float64, at a policy that has left the reference."""
    beta = 0.3
    backend = make_backend(**FLOAT64, algorithm=DPO, dpo={"beta": beta}, optimizer={"grad_clip": 0.0})
    rows = random_samples(6, 90, seed=1)
    samples = [replace(s, temperature=0.7 if i < 2 else 1.0) for i, s in enumerate(rows)]
    imitated = pack(samples[::2], IMITATE, 512)
    await backend.forward_backward(imitated, IMITATE)
    await backend.optim_step(1e-3, grad_scale([imitated], IMITATE))
    told = await backend.compute_logprobs(pack(samples, IMITATE, 512), of="reference")
    samples = [replace(s, reference_logprobs=tuple(row)) for s, row in zip(samples, told, strict=True)]
    algorithm = AlgorithmSection(loss="dpo", aggregation="sequence_mean_token_sum")
    batch = pack(samples, algorithm, 40, together=2)
    assert len(batch.micro_batches) > 1
    await backend.forward_backward(batch, algorithm)
    got = {name: g * grad_scale([batch], algorithm) for name, g in take_gradient(backend).items()}

    reference, policy = plain_model(dtype=torch.float64), plain_model(dtype=torch.float64)
    policy.load_state_dict(backend.learner.hf_model.state_dict())
    ahead = []
    for sample in samples:
        mask = torch.tensor(sample.loss_mask, dtype=torch.bool)
        with torch.no_grad():
            theirs = plain_logprobs(reference, sample.tokens, sample.temperature)
        assert trained(sample, sample.reference_logprobs or ()) == pytest.approx(theirs[mask].tolist(), abs=1e-10)
        ahead.append((plain_logprobs(policy, sample.tokens, sample.temperature) - theirs)[mask].sum())
    pairs = list(zip(ahead[::2], ahead[1::2], strict=True))
    loss = -sum(functional.logsigmoid(beta * (chosen - rejected)) for chosen, rejected in pairs) / len(pairs)
    assert isinstance(loss, torch.Tensor)
    loss.backward()
    want = {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}
    assert_same_gradient(got, want)
    await backend.close()
