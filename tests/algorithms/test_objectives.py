"""Every part of the RL and SFT objectives does what it says, through the real model, backend and trainer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from contracts.backend_contract import IMITATE, random_samples
from headrace import Task, Trajectory
from headrace.algorithms.advantages.gae import gae
from headrace.algorithms.batching import grad_scale, pack
from headrace.algorithms.losses import LossContext
from headrace.algorithms.objectives import AdvantageObjective, Completion, Part, Prepared
from headrace.backends.local.token_losses import token_losses
from headrace.config import AlgorithmSection, KlSection, RoleSection
from headrace.data.sample import NO_VERSION, Sample
from headrace.rollout.chat import ChatTemplate
from headrace.rollout.model_client import Model
from headrace.scheduling.buffer import FinishedGroup
from headrace.scheduling.staleness import StalenessPolicy
from headrace.tracking.metrics import MetricsAggregator
from headrace.trainer.learner_step import LearnerStep
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
    trained,
    watched_run,
)

KINDS = {
    "k1": lambda d: d,
    "k2": lambda d: d * d / 2,
    "k3": lambda d: math.exp(-d) - 1 + d,
    "abs": abs,
}


async def train(
    backend: WatchedBackend, samples: Sequence[Sample], algorithm: AlgorithmSection, steps: int = 5, lr: float = 1e-3
) -> list[dict[str, float]]:
    """So many optimizer steps on the same rows, and what each reported."""
    batch = pack(samples, algorithm, 512)
    found = []
    for _ in range(steps):
        found.append((await backend.forward_backward(batch, algorithm)).metrics.reduce())
        await backend.optim_step(lr, grad_scale([batch], algorithm))
    return found


async def with_reference(backend: WatchedBackend, samples: Sequence[Sample]) -> list[Sample]:
    found = await backend.compute_logprobs(pack(samples, IMITATE, 512), of="reference")
    return [replace(sample, reference_logprobs=tuple(row)) for sample, row in zip(samples, found, strict=True)]


def neutral(samples: Sequence[Sample]) -> list[Sample]:
    """The rows with advantage 0: nothing but penalties and bonuses trains them."""
    return [replace(sample, advantages=(0.0,) * len(sample.advantages)) for sample in samples]


# ---- KL to a reference ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 4])
async def test_the_reference_is_the_policy_as_the_run_began(rank: int) -> None:
    backend = make_backend(model={"lora": {"rank": rank}})
    samples = random_samples(4, 90)
    batch = pack(samples, IMITATE, 512)
    at_first = await backend.compute_logprobs(batch)
    await train(backend, samples, IMITATE, steps=2, lr=1e-2)
    reference, policy = await backend.compute_logprobs(batch, of="reference"), await backend.compute_logprobs(batch)
    fresh = plain_model()
    for sample, then, now, told in zip(samples, at_first, policy, reference, strict=True):
        assert told == pytest.approx(then, abs=1e-5)
        assert told == pytest.approx(plain_logprobs(fresh, sample.tokens).tolist(), abs=1e-4)
        assert max(abs(a - b) for a, b in zip(now, then, strict=True)) > 0.01
    assert (backend.learner.reference is None) == bool(rank)  # adapters are switched off; no second model
    await backend.close()


def divergence(samples: Sequence[Sample], logprobs: Sequence[Sequence[float]]) -> float:
    """Mean squared distance from the reference over the trained tokens."""
    pairs = [
        (a, b)
        for s, row in zip(samples, logprobs, strict=True)
        for a, b in zip(trained(s, row), trained(s, s.reference_logprobs or ()), strict=True)
    ]
    return sum((a - b) ** 2 for a, b in pairs) / len(pairs)


@pytest.mark.parametrize("kind", ["k2", "k3", "abs"])
async def test_kl_in_the_loss_pulls_the_policy_back(kind: Any) -> None:
    backend = make_backend()
    samples = await with_reference(backend, neutral(random_samples(6, 90)))
    batch = pack(samples, IMITATE, 512)
    await train(backend, samples, IMITATE, steps=3)
    away = divergence(samples, await backend.compute_logprobs(batch))
    algorithm = AlgorithmSection(kl=KlSection(coef=1.0, kind=kind))
    reports = await train(backend, samples, algorithm, steps=6, lr=3e-4)
    back = divergence(samples, await backend.compute_logprobs(batch))
    assert back < 0.7 * away
    assert reports[-1]["policy/kl_to_reference"] < reports[0]["policy/kl_to_reference"]
    await backend.close()


async def test_k1_in_the_loss_pushes_sampled_tokens_down_wherever_the_reference_is() -> None:
    """Its gradient is that of log π: on average over the policy's own samples it is 0, and it never pulls back."""
    backend = make_backend(**FLOAT64)
    samples = neutral(random_samples(3, 90))
    k1 = AlgorithmSection(kl=KlSection(coef=0.5, kind="k1"))
    near = [replace(s, reference_logprobs=s.logprobs) for s in samples]
    far = [replace(s, reference_logprobs=tuple(x - 3 for x in s.logprobs)) for s in samples]
    one, two = await gradient(backend, near, k1), await gradient(backend, far, k1)
    assert_same_gradient(one, two)
    imitation = await gradient(backend, samples, IMITATE)
    assert_same_gradient(one, {name: -0.5 * g for name, g in imitation.items()})
    await backend.close()


def test_a_run_with_kl_in_the_loss_compares_with_the_initial_model(tmp_path: Path) -> None:
    result, backend = watched_run(
        tmp_path,
        scattered_reward,
        algorithm={"kl": {"coef": 0.1}},
        optimizer={"lr": 1e-3},
        trainer={"steps": 2, "batch_size": 2, "save_last": False},
    )
    initial = plain_model()
    for sample in backend.samples:
        assert sample.reference_logprobs == pytest.approx(plain_logprobs(initial, sample.tokens).tolist(), abs=1e-4)
    first, second = logged(result.run_dir)
    assert abs(first["policy/kl_to_reference"]) < 1e-6 < 1e-4 < second["policy/kl_to_reference"]


@pytest.mark.parametrize("kind", list(KINDS))
def test_kl_in_the_reward_takes_its_sum_off(kind: str, tmp_path: Path) -> None:
    async def always_one(task: Task, model: Model) -> float:
        await model.chat(task.messages)
        return 1.0

    result, backend = watched_run(
        tmp_path,
        always_one,
        algorithm={"estimator": "reinforce", "kl": {"coef": 0.3, "kind": kind, "where": "reward"}},
        rollout={"group_size": 2, "max_tokens": 6, "temperature": 0.8},
        optimizer={"lr": 3e-3},
        trainer={"steps": 2, "batch_size": 2, "save_last": False},
    )
    initial = plain_model()
    penalties = []
    for sample in backend.samples:
        theirs = trained(sample, plain_logprobs(initial, sample.tokens, 0.8).detach())
        penalties.append(sum(KINDS[kind](a - b) for a, b in zip(trained(sample, sample.logprobs), theirs, strict=True)))
        assert set(trained(sample, sample.advantages)) == {sample.reward}
        assert sample.reward == pytest.approx(1.0 - 0.3 * penalties[-1], abs=1e-3)
        assert sample.reference_logprobs is None  # the loss itself has no divergence in it
    assert max(map(abs, penalties[4:])) > 0.01  # the second step is away from the reference
    assert result.metrics["reward/mean"] == 1.0  # as the workflow gave it
    assert result.metrics["reward/kl_to_reference"] == pytest.approx(sum(penalties[4:]) / 4, abs=1e-3)


@pytest.mark.parametrize(
    ("sections", "loaded"),
    [
        ({}, False),
        ({"algorithm": {"kl": {"coef": 0.1}}}, True),
        ({"algorithm": {"estimator": "reinforce", "kl": {"coef": 0.1, "where": "reward"}}}, True),
        ({"algorithm": {"kl": {"coef": 0.1}}, "model": {"lora": {"rank": 2}}}, False),
        ({"algorithm": {"objective": "dpo"}}, True),
    ],
    ids=["no kl", "kl in the loss", "kl in the reward", "lora", "dpo"],
)
def test_a_second_model_is_loaded_only_if_it_is_used(sections: Any, loaded: bool, tmp_path: Path) -> None:
    _, backend = watched_run(tmp_path, scattered_reward, **sections)
    assert (backend.learner.reference is not None) == loaded
    assert backend.learner.teacher is None


# ---- entropy and corrections ----------------------------------------------------------------------------------------


async def test_an_entropy_bonus_raises_the_entropy() -> None:
    entropies = {}
    for coef in (0.3, -0.3):
        backend = make_backend()
        reports = await train(backend, neutral(random_samples(6, 90)), AlgorithmSection(entropy_coef=coef), lr=3e-4)
        entropies[coef] = [report["policy/entropy"] for report in reports]
        await backend.close()
    assert entropies[0.3] == sorted(entropies[0.3]) and entropies[0.3][-1] > entropies[0.3][0] + 0.01
    assert entropies[-0.3][-1] < entropies[-0.3][0] - 0.01


def by_hand(name: str, log_ratios: list[float]) -> list[float]:
    """Weights of one row's tokens with low 0.7, high 1.5, floor 1e-3."""
    ratios = [math.exp(x) for x in log_ratios]
    match name:
        case "tis":
            return [min(max(r, 0.7), 1.5) for r in ratios]
        case "tis of sequences":
            return [min(max(math.exp(sum(log_ratios)), 0.7), 1.5)] * len(ratios)
        case "icepop":
            return [r if 0.7 <= r <= 1.5 else 0.0 for r in ratios]
        case "sequence_mask":
            mean = math.exp(sum(log_ratios) / len(log_ratios))
            return [float(0.7 <= mean <= 1.5)] * len(ratios)
        case _:
            return [float(min(ratios) >= 1e-3)] * len(ratios)


@pytest.mark.parametrize("name", ["tis", "tis of sequences", "icepop", "sequence_mask", "veto"])
async def test_a_correction_weighs_the_gradient(name: str) -> None:
    backend = make_backend(**FLOAT64)
    rows = random_samples(6, 90, seed=3)
    exact = await backend.compute_logprobs(pack(rows, IMITATE, 512))
    generator = torch.Generator().manual_seed(0)
    samples, weighed, all_weights = [], [], []
    for place, (sample, learner) in enumerate(zip(rows, exact, strict=True)):
        noise = (torch.randn(len(learner), generator=generator, dtype=torch.float64) * 0.3 + 0.2 * (place - 2)).tolist()
        if place == 1:
            noise[-1] += 12.0  # the learner finds this token all but impossible
        sampler = [a + b for a, b in zip(learner, noise, strict=True)]
        weights = by_hand(name, trained(sample, [a - b for a, b in zip(learner, sampler, strict=True)]))
        all_weights += weights
        rest = iter(weights)
        scaled = [a * next(rest) if kept else a for a, kept in zip(sample.advantages, sample.loss_mask, strict=True)]
        samples.append(replace(sample, logprobs=tuple(sampler)))
        weighed.append(replace(sample, logprobs=tuple(sampler), advantages=tuple(scaled)))
    kind, _, level = name.partition(" of ")
    correction = {"name": kind, "level": "sequence" if level else "token", "low": 0.7, "high": 1.5, "floor": 1e-3}
    plain = AlgorithmSection(proximal="recompute")
    corrected = AlgorithmSection.model_validate({"proximal": "recompute", "correction": correction})
    assert len(set(all_weights)) > 1
    got = await gradient(backend, samples, corrected)
    assert_same_gradient(got, await gradient(backend, weighed, plain), 1e-8)
    with pytest.raises(AssertionError):
        assert_same_gradient(got, await gradient(backend, samples, plain), 1e-3)
    await backend.close()


class _Given:
    """An objective whose groups are batches already."""

    streams = True

    def __init__(self, algorithm: AlgorithmSection) -> None:
        self._algorithm = algorithm

    async def prepare(self, groups: Sequence[Any], version: int) -> Prepared:
        return Prepared(Part(pack(list(groups), self._algorithm, 40), self._algorithm), MetricsAggregator())

    def complete(self, parts: Sequence[Part], step: int) -> Completion:
        return Completion((), grad_scale([part.batch for part in parts], self._algorithm))


AGGREGATIONS = ["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "token_sum", "constant"]


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
async def test_a_step_is_normalised_without_what_is_rejected(aggregation: str) -> None:
    """In pieces or at once; KL and entropy of rejected rows are out as well."""
    backend = make_backend(**FLOAT64, optimizer={"grad_clip": 0.0, "lr": 1e-30})
    rows = random_samples(6, 90, seed=3)
    exact = await backend.compute_logprobs(pack(rows, IMITATE, 512))
    rows = [replace(s, logprobs=tuple(own), reference_logprobs=s.logprobs) for s, own in zip(rows, exact, strict=True)]
    off = [replace(s, logprobs=tuple(x + 1.0 for x in s.logprobs)) if i in (1, 2) else s for i, s in enumerate(rows)]
    settings = {"proximal": "recompute", "aggregation": aggregation, "entropy_coef": 0.1, "kl": {"coef": 0.1}}
    plain = AlgorithmSection.model_validate(settings)
    masking = AlgorithmSection.model_validate({**settings, "correction": {"name": "sequence_mask", "low": 0.7}})

    async def norm(samples: Sequence[Sample], algorithm: AlgorithmSection, *sizes: int) -> float:
        learner = LearnerStep(backend.learner.config, backend, _Given(algorithm), StalenessPolicy(0))
        left = list(samples)
        for size in sizes:
            piece, left = tuple(left[:size]), left[size:]
            await learner.learn([], [FinishedGroup(0, (), piece, 1)])  # type: ignore[arg-type]
        await learner.update(0)
        return learner.metrics.reduce()["policy/grad_norm"]

    wanted = await norm([s for i, s in enumerate(off) if i not in (1, 2)], plain, 4)
    assert await norm(off, masking, 6) == pytest.approx(wanted, rel=1e-9)
    assert await norm(off, masking, 1, 2, 3) == pytest.approx(wanted, rel=1e-9)
    await backend.close()


async def test_a_token_that_icepop_zeroes_stays_in_the_normaliser() -> None:
    """Two tokens of advantage 1, one far off: the mean is over both (0.5), with sequence_mask over one (1)."""
    context: dict[str, Any] = {
        "logprobs_M": torch.zeros(2),
        "sampler_logprobs_M": torch.tensor([0.0, 5.0]),
        "row_M": torch.arange(2),
    }
    for name, wanted in (("icepop", 0.5), ("sequence_mask", 1.0), ("veto", 1.0)):
        section = {"name": name} | ({"floor": 0.1} if name == "veto" else {"low": 0.5, "high": 2.0})
        algorithm = AlgorithmSection.model_validate({"proximal": "recompute", "correction": section})
        rows = [Sample((1, 2), (1,), (-s,), (0,), (1.0,)) for s in (0.0, 5.0)]
        given = LossContext(
            old_logprobs_M=torch.zeros(2), advantages_M=torch.ones(2), rows=2, algorithm=algorithm, **context
        )
        loss_M, _, rejected_R, _ = token_losses(given, rows, torch.zeros(2), torch.ones(2, dtype=torch.bool))
        batch = replace(pack(rows, algorithm, 64), rejected=frozenset(rejected_R.nonzero().flatten().tolist()))
        assert -float(loss_M.sum()) * grad_scale([batch], algorithm) == wanted


async def test_given_text_does_not_get_its_row_rejected() -> None:
    row = Sample((1, 2, 3), (1, 1), (0.0, -1.0), (NO_VERSION, 0), (1.0, 1.0))
    algorithm = AlgorithmSection.model_validate({"proximal": "recompute", "correction": {"name": "veto"}})
    logprobs_M = torch.tensor([-30.0, -1.0])
    given = LossContext(
        logprobs_M=logprobs_M, old_logprobs_M=logprobs_M, sampler_logprobs_M=torch.tensor([0.0, -1.0]),
        advantages_M=torch.ones(2), row_M=torch.zeros(2, dtype=torch.long), rows=1, algorithm=algorithm,
    )  # fmt: skip
    loss_M, _, rejected_R, _ = token_losses(given, [row], torch.zeros(2), torch.tensor([False, True]))
    assert rejected_R.tolist() == [False] and loss_M.tolist() == [-1.0, -1.0]


async def test_given_text_has_no_sampler_to_correct_for() -> None:
    backend = make_backend(**FLOAT64)
    given = [replace(s, versions=(NO_VERSION,) * len(s.versions)) for s in random_samples(3, 90)]
    tis = AlgorithmSection.model_validate(
        {"loss": "cross_entropy", "proximal": "recompute", "correction": {"name": "tis"}}
    )
    assert_same_gradient(await gradient(backend, given, tis), await gradient(backend, given, IMITATE))
    await backend.close()


# ---- generalised advantage estimation -------------------------------------------------------------------------------

GAE: dict[str, Any] = {
    "algorithm": {"estimator": "gae", "value_head": True, "gamma": 0.97, "gae_lambda": 0.9},
    "rollout": {"group_size": 1},
}


async def test_values_learn_and_advantages_follow_them() -> None:
    backend = make_backend(**GAE)
    objective = AdvantageObjective(backend.learner.config, backend, ChatTemplate(backend.tokenizer))
    groups = await sampled_groups(backend)
    losses = []
    for step in range(8):
        part = (await objective.prepare(groups, 0)).part
        assert part is not None
        values = await backend.compute_values(part.batch)
        for sample, row in zip(part.batch.samples, values, strict=True):
            rewards = [0.0] * (sample.trained_tokens - 1) + [sample.reward or 0.0]
            advantages, returns = gae(rewards, trained(sample, row), 0.97, 0.9)
            assert trained(sample, sample.advantages) == pytest.approx(advantages.tolist())
            assert trained(sample, sample.returns or ()) == pytest.approx(returns.tolist())
        losses.append((await backend.forward_backward(part.batch, part.algorithm)).metrics.reduce()["value/loss"])
        await backend.optim_step(1e-3, objective.complete([part], step).grad_scale)
    assert losses[-1] < 0.5 * losses[0]
    await backend.close()


def test_a_run_by_values_reports_their_loss_and_starts_from_the_rewards(tmp_path: Path) -> None:
    result, backend = watched_run(
        tmp_path,
        scattered_reward,
        algorithm={"estimator": "gae", "value_head": True},
        rollout={"group_size": 1, "max_tokens": 8},
        optimizer={"lr": 1e-3},
        trainer={"steps": 3, "batch_size": 4, "save_last": False},
    )
    assert all(row["value/loss"] > 0 for row in logged(result.run_dir))
    (first, algorithm), *_, (last, _) = backend.batches
    for sample in first.samples:  # values begin at 0
        wanted = gae(
            [0.0] * (sample.trained_tokens - 1) + [sample.reward or 0.0], [0.0] * sample.trained_tokens, 1.0, 0.95
        )
        assert trained(sample, sample.advantages) == pytest.approx(wanted[0].tolist())
    for sample in last.samples:
        values = [a - b for a, b in zip(sample.returns or (), sample.advantages, strict=True)]
        assert any(trained(sample, values)) and algorithm.value_coef == 0.5


async def test_the_value_head_is_in_the_checkpoint(tmp_path: Path) -> None:
    one, two = make_backend(**GAE), make_backend(**GAE)
    samples = [replace(s, returns=s.advantages) for s in random_samples(4, 90)]
    batch = pack(samples, one.learner.config.algorithm, 512)
    await train(one, samples, one.learner.config.algorithm, steps=2)
    await one.save(tmp_path / "state")
    await two.load(tmp_path / "state")
    found = await one.compute_values(batch)
    assert await two.compute_values(batch) == found and any(value for row in found for value in row)
    for backend in (one, two):  # and so are its moments
        await train(backend, samples, backend.learner.config.algorithm, steps=1)
    assert await two.compute_values(batch) == await one.compute_values(batch)
    await one.close()
    await two.close()


async def test_values_learn_beside_a_role_that_has_none() -> None:
    """Rows with and without returns in one micro-batch give the gradients of both."""
    backend = make_backend(**GAE, **FLOAT64)
    algorithm = backend.learner.config.algorithm
    rows = random_samples(6, 90)
    valued = [replace(s, returns=s.advantages, role="solver") for s in rows[:3]]
    plain = [replace(s, role="critic") for s in rows[3:]]
    together = await gradient(backend, [*valued, *plain], algorithm)
    apart = [await gradient(backend, part, algorithm) for part in (valued, plain)]
    assert "value_head.weight" in together and "value_head.weight" not in apart[1]
    assert_same_gradient(together, {name: g + apart[1].get(name, 0) for name, g in apart[0].items()})
    await backend.close()


# ---- roles ----------------------------------------------------------------------------------------------------------


async def test_each_role_has_its_own_loss_in_one_batch() -> None:
    backend = make_backend(**FLOAT64)
    roles = {"solver": RoleSection(loss="cispo"), "critic": RoleSection(loss="reinforce")}
    mixed = AlgorithmSection(loss="ppo_clip", roles=roles)
    rows = [replace(s, role=("solver", "critic", "agent")[i % 3]) for i, s in enumerate(random_samples(9, 90))]
    together = await gradient(backend, rows, mixed)
    apart = [
        await gradient(backend, [s for s in rows if s.role == role], AlgorithmSection(loss=loss))
        for role, loss in (("solver", "cispo"), ("critic", "reinforce"), ("agent", "ppo_clip"))
    ]
    assert_same_gradient(together, {name: apart[0][name] + apart[1][name] + apart[2][name] for name in together})
    await backend.close()


async def two_roles(task: Task, model: Model) -> list[Trajectory]:
    """A solver with a reward, and a critic that brings advantages of its own and no reward."""
    solution = await model.chat(task.messages, role="solver")
    await model.chat([*task.messages, {"role": "user", "content": "Is it right?"}], role="critic")
    solver, critic = model.trajectories()
    given = tuple(replace(s, advantage=[0.5 * i for i in range(len(s.response_ids))]) for s in critic.steps)
    return [replace(solver, reward=float(sum(solution.completion_ids) % 5)), replace(critic, steps=given)]


def test_a_role_that_is_not_trained_is_not_trained_and_needs_no_reward(tmp_path: Path) -> None:
    async def with_helper(task: Task, model: Model) -> list[Trajectory]:
        await model.chat(task.messages, role="helper", temperature=0)
        reply = await model.chat(task.messages, role="solver")
        helper, solver = model.trajectories()
        return [helper, replace(solver, reward=float(sum(reply.completion_ids) % 5))]

    result, backend = watched_run(tmp_path, with_helper, algorithm={"roles": {"helper": {"train": False}}})
    assert result.steps == 1
    assert [sample.role for sample in backend.samples] == ["solver"] * 8


def test_each_role_has_its_own_estimator_in_one_run(tmp_path: Path) -> None:
    async def both(task: Task, model: Model) -> list[Trajectory]:
        solver, _ = await two_roles(task, model)
        return [solver, replace(model.trajectories()[1], reward=3.0)]

    _, backend = watched_run(
        tmp_path,
        both,
        algorithm={"normalize_by_std": False, "roles": {"critic": {"estimator": "reinforce"}}},
    )
    solvers = [s for s in backend.samples if s.role == "solver"]
    for group in (solvers[:4], solvers[4:]):
        mean = sum(s.reward or 0.0 for s in group) / 4
        for sample in group:
            wanted = [(sample.reward or 0.0) - mean] * sample.trained_tokens
            assert trained(sample, sample.advantages) == pytest.approx(wanted)
    critics = [s for s in backend.samples if s.role == "critic"]
    assert len(critics) == 8 and all(set(trained(s, s.advantages)) == {3.0} for s in critics)


def test_advantages_of_a_workflow_mix_with_a_role_that_has_rewards(tmp_path: Path) -> None:
    result, backend = watched_run(
        tmp_path, two_roles, algorithm={"use_precomputed_advantage": True, "normalize_by_std": False}
    )
    for sample in backend.samples:
        found = trained(sample, sample.advantages)
        if sample.role == "critic":
            assert found == [0.5 * i for i in range(len(found))]
        else:
            assert len(set(found)) == 1
    assert {sample.role for sample in backend.samples} == {"solver", "critic"}
    rewards = [sample.reward or 0.0 for sample in backend.samples if sample.role == "solver"]
    assert result.metrics["reward/mean"] == pytest.approx(sum(rewards) / 8)
