"""Supervised training through the real model, backend and trainer: alone, from a file, and beside RL."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from contracts.backend_contract import IMITATE
from headrace.algorithms.objectives import AdvantageObjective
from headrace.cli.main import run as run_command
from headrace.config.loading import build_config
from headrace.errors import ConfigError
from headrace.rollout.chat import ChatTemplate
from recording_backend import (
    FLOAT64,
    WatchedBackend,
    assert_same_gradient,
    gradient,
    logged,
    make_backend,
    plain_logprobs,
    plain_model,
    sampled_groups,
    scattered_reward,
    take_gradient,
    trained,
    watched_run,
)

DEMONSTRATIONS = [
    {
        "messages": [
            {"role": "system", "content": "You add."},
            {"role": "user", "content": f"{n}+1?"},
            {"role": "assistant", "content": f"{n + 1}"},
            {"role": "user", "content": "And once more?"},
            {"role": "assistant", "content": f"That is {n + 2}, é!"},
        ]
    }
    for n in range(6)
]


def written(folder: Path) -> Path:
    path = folder / "demonstrations.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in DEMONSTRATIONS))
    return path


async def test_the_supervised_term_adds_coef_times_the_mean_cross_entropy(tmp_path: Path) -> None:
    sft = {"coef": 0.3, "tasks": str(written(tmp_path)), "batch_size": 2}
    backend = make_backend(**FLOAT64, sft=sft, algorithm={"estimator": "reinforce", "aggregation": "token_mean"})
    groups = await sampled_groups(backend)
    chat = ChatTemplate(backend.tokenizer)
    objective = AdvantageObjective(backend.learner.config, backend, chat)
    rollouts = (await objective.prepare(groups, version=0)).part
    assert rollouts is not None
    completion = objective.complete([rollouts], step=1)
    (beside,) = completion.parts
    for part in (rollouts, beside):
        await backend.forward_backward(part.batch, part.algorithm)
    got = {name: g * completion.grad_scale for name, g in take_gradient(backend).items()}
    policy, given = rollouts.batch.samples, beside.batch.samples
    rl = await gradient(backend, policy, backend.learner.config.algorithm)
    imitation = await gradient(backend, given, IMITATE)
    tokens, demonstrated = (sum(s.trained_tokens for s in rows) for rows in (policy, given))
    assert_same_gradient(got, {name: rl[name] / tokens + 0.3 * imitation[name] / demonstrated for name in rl})
    assert len(given) == 2 and demonstrated
    again = AdvantageObjective(backend.learner.config, backend, chat).complete([rollouts], step=1)
    assert again.parts[0].batch == beside.batch  # a function of the step alone
    await backend.close()


def test_a_run_reports_the_supervised_term_apart(tmp_path: Path) -> None:
    sft = {"coef": 0.3, "tasks": str(written(tmp_path)), "batch_size": 2}
    result, backend = watched_run(tmp_path / "runs", scattered_reward, sft=sft)
    assert result.metrics["sft/loss"] > 0.5 and result.metrics["sft/entropy"] > 0
    policy, demonstrations = (sum(s.trained_tokens for s in batch.samples) for batch, _ in backend.batches)
    assert result.metrics["tokens/trained"] == policy + demonstrations
    assert abs(result.metrics["policy/loss"]) < 0.2  # normalised advantages at ratio 1


def test_too_few_demonstrations_for_a_batch_is_a_clear_error(tmp_path: Path) -> None:
    sft = {"coef": 0.3, "tasks": str(written(tmp_path)), "batch_size": 7}
    with pytest.raises(ConfigError, match=r"sft\.batch_size is 7, but"):
        watched_run(tmp_path / "runs", scattered_reward, sft=sft)


def test_sft_trains_the_assistant_turns_of_a_file_and_nothing_else(tmp_path: Path) -> None:
    path = written(tmp_path)
    (tmp_path / "sft.toml").write_text(
        f"""
        run = {{ dir = "{tmp_path}", name = "sft" }}
        data = {{ tasks = "{path}" }}
        backend = {{ name = "watched" }}
        trainer = {{ steps = 2, batch_size = 3, save_last = false }}
        optimizer = {{ lr = 1e-3 }}
        track = {{ trackers = ["jsonl"], plot = false }}
        """
    )
    assert run_command(["sft", str(tmp_path / "sft.toml")]) == 0
    backend = WatchedBackend.made.pop()
    tokenizer = backend.tokenizer
    wanted = {f"{n + 1}<|im_end|>That is {n + 2}, é!<|im_end|>" for n in range(6)}
    found = set()
    for sample in backend.samples:
        found.add(tokenizer.decode([t for t, kept in zip(sample.tokens[1:], sample.loss_mask, strict=True) if kept]))
        whole = tokenizer.decode(list(sample.tokens))
        assert whole.count("<|im_start|>") == 5 and whole.startswith("<|im_start|>system\nYou add.<|im_end|>\n")
    assert found == wanted  # all six, in two steps of three, each one row
    batch, algorithm = backend.batches[0]
    assert algorithm.loss == "cross_entropy"
    initial = plain_model()
    losses = [x for s in batch.samples for x in trained(s, -plain_logprobs(initial, s.tokens).detach())]
    assert logged(tmp_path / "sft")[0]["policy/loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-4)


def test_a_knob_that_the_objective_settles_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.kl\.coef = 0\.1 has no effect: objective sft"):
        build_config({"algorithm": {"objective": "sft", "kl": {"coef": 0.1}}})
