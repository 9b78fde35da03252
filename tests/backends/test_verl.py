"""verl's workers compute what the local backend computes. Where verl is installed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fsdp_cases import BUDGET, Case, difference, local_gradient, losses, spread_weights, steps
from headrace.algorithms.batching import pack
from headrace.backends.fsdp.group import LearnerGroup
from headrace.backends.local.learner import Learner
from headrace.config import AlgorithmSection
from headrace.config.loading import build_config
from headrace.errors import BackendError, DivergedError
from verl_cases import new_group, sections, verl_config
from verl_pool import WHY, has_verl, pooled_workers

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not has_verl(), reason=WHY)]

CASES = {case.name: case for case in losses() if not case.valued}
PPO, DPO = CASES["ppo_clip"], CASES["dpo"]
CLOSE = 1e-5


@pytest.fixture(scope="module")
def workers() -> Iterator[None]:
    with pooled_workers():
        yield


def both(case: Case, folder: Path, ranks: int = 2) -> tuple[Learner, LearnerGroup]:
    """The local learner and verl's workers, with the same weights, which are not those of the model's folder."""
    torch.set_num_threads(1)
    learner = Learner(build_config(sections(case)))
    spread_weights(learner)
    learner.save(folder / "begin")
    group = new_group(verl_config(case, ranks))
    group.load(folder / "begin")
    return learner, group


@pytest.mark.usefixtures("workers")
@pytest.mark.parametrize("name", list(CASES))
def test_gradients_and_weights_are_the_local_backends(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    learner, group = both(case, tmp_path)
    batch = case.batch(seed=1)
    one, many = (each.forward_backward(batch, case.algorithm) for each in (learner, group))
    ours, theirs = local_gradient(learner), group.together("gradient")[0]
    largest = max(float(gradient.abs().max()) for gradient in ours.values())
    assert ours.keys() == theirs.keys()
    assert max(float((ours[key] - theirs[key]).abs().max()) for key in ours) < CLOSE * largest
    assert one.rejected == many.rejected and one.clip_states == many.clip_states
    for mine, its in zip(one.logprobs, many.logprobs, strict=True):
        assert mine == pytest.approx(its, rel=CLOSE, abs=CLOSE)
    expected = {key: value for key, value in one.metrics.reduce().items() if not key.startswith("memory/")}
    assert many.metrics.reduce() == pytest.approx(expected, rel=1e-4, abs=CLOSE)
    for each in (learner, group):
        each.optim_step(1e-3, 0.01)
    assert steps(learner, case, range(2, 5)) == pytest.approx(steps(group, case, range(2, 5)), rel=1e-4)
    weights = group.together("weights")[0]
    assert max(float((tensor - weights[key]).abs().max()) for key, tensor in learner.weights().items()) < CLOSE
    group.close()


@pytest.mark.usefixtures("workers")
@pytest.mark.parametrize("ranks", [1, 2])
def test_dpo_on_random_pairs_is_the_local_backends(ranks: int, tmp_path: Path) -> None:
    """From the reference's log-probabilities to the loss of each pair, the gradient and the policy after steps."""
    learner, group = both(DPO, tmp_path, ranks)
    algorithm = AlgorithmSection(loss="dpo", aggregation="sequence_mean_token_sum")
    for seed in range(3):
        given = pack(DPO.samples(seed, 8), algorithm, BUDGET, 2)
        batches, found = [], []
        for each in (learner, group):
            scored = each.logprobs(given, "reference")
            pairs = [replace(s, reference_logprobs=tuple(row)) for s, row in zip(given.samples, scored, strict=True)]
            batches.append(pack(pairs, algorithm, BUDGET, 2))
            found.append(each.forward_backward(batches[-1], algorithm).metrics.reduce())
        for mine, its in zip(*(batch.samples for batch in batches), strict=True):
            assert mine.reference_logprobs == pytest.approx(its.reference_logprobs, rel=CLOSE, abs=CLOSE)
        assert found[0]["dpo/loss"] == pytest.approx(found[1]["dpo/loss"], abs=CLOSE)
        norms = [each.optim_step(1e-3, 0.25).reduce()["policy/grad_norm"] for each in (learner, group)]
        assert norms[0] == pytest.approx(norms[1], rel=CLOSE)
    weights = group.together("weights")[0]
    assert max(float((tensor - weights[key]).abs().max()) for key, tensor in learner.weights().items()) < CLOSE
    group.close()


@pytest.mark.usefixtures("workers")
def test_fewer_rows_than_ranks_give_the_same_gradient(tmp_path: Path) -> None:
    learner, group = both(PPO, tmp_path)
    for each in (learner, group):
        each.forward_backward(PPO.batch(count=1), PPO.algorithm)
    assert difference(local_gradient(learner), group.together("gradient")[0]) < 1e-4
    group.close()


@pytest.mark.usefixtures("workers")
def test_a_batch_that_diverges_leaves_no_gradient_on_any_rank(tmp_path: Path) -> None:
    _, group = both(PPO, tmp_path)
    samples = PPO.samples(0, 4)
    broken = replace(samples[2], advantages=(float("nan"),) * len(samples[2].advantages), task_id="the-broken-one")
    with pytest.raises(DivergedError, match="the-broken-one"):
        group.forward_backward(pack([*samples, broken], PPO.algorithm, BUDGET), PPO.algorithm)
    with pytest.raises(BackendError, match="no accumulated gradient"):
        group.optim_step(1e-3, 1.0)
    assert group.restarts == 0
    group.close()


@pytest.mark.usefixtures("workers")
def test_checkpoints_are_those_of_any_number_of_ranks_and_of_the_local_backend(tmp_path: Path) -> None:
    learner, group = both(PPO, tmp_path)
    steps(group, PPO, [1])
    group.save(tmp_path / "by two")
    learner.load(tmp_path / "by two")
    before = group.together("weights")[0]
    assert all(torch.equal(tensor, before[key]) for key, tensor in learner.weights().items())
    alone = new_group(verl_config(PPO, 1))
    alone.load(tmp_path / "by two")
    for each in (learner, group, alone):
        steps(each, PPO, [2])  # the optimizer's moments came along
    after = learner.weights()
    for each in (group, alone):
        found = each.together("weights")[0]
        assert max(float((tensor - found[key]).abs().max()) for key, tensor in after.items()) < CLOSE
        each.close()


@pytest.mark.usefixtures("workers")
def test_bfloat16_computes_so_and_keeps_float32_for_the_optimizer(tmp_path: Path) -> None:
    config = verl_config(Case("bfloat16", PPO.algorithm, {"model": {"dtype": "bfloat16"}}))
    narrow, wide = new_group(config), new_group(verl_config(PPO))
    batch = PPO.batch(seed=1)
    drift = [
        abs(a - b)
        for mine, its in zip(narrow.logprobs(batch, "policy"), wide.logprobs(batch, "policy"), strict=True)
        for a, b in zip(mine, its, strict=True)
    ]
    assert 1e-4 < sum(drift) / len(drift) < 0.1
    assert narrow.together("facts")[0]["dtype"] == "bfloat16"
    assert {tensor.dtype for tensor in narrow.together("weights")[0].values()} == {torch.float32}
    narrow.close()
    wide.close()


@pytest.mark.usefixtures("workers")
def test_parameters_that_stay_complete_after_scoring_are_neither_saved_nor_stale(tmp_path: Path) -> None:
    config = verl_config(
        Case("kept", PPO.algorithm, {"backend": {"verl": {"engine": {"reshard_after_forward": False}}}})
    )
    group = new_group(config)
    steps(group, PPO, [1])
    batch = PPO.batch(seed=2)
    before = group.logprobs(batch, "policy")
    group.save(tmp_path / "saved")
    steps(group, PPO, [3])
    after = group.logprobs(batch, "policy")
    group.load(tmp_path / "saved")
    assert group.logprobs(batch, "policy") == before != after
    group.close()
