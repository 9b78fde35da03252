"""Ranks compute what one learner computes; checkpoints fit any number of them; a lost rank changes nothing."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import tiny
from fsdp_cases import TIGHT, Case, difference, local_gradient, losses, new_group, new_learner, steps
from headrace.algorithms.batching import pack
from headrace.backends.fsdp.backend import FsdpBackend
from headrace.backends.fsdp.group import LearnerGroup
from headrace.backends.fsdp.tensor_parallel import check_split
from headrace.backends.local.learner import Learner
from headrace.backends.ranks.pipes import PipeRanks
from headrace.config import RunConfig
from headrace.data.episode import Step
from headrace.data.routing import RoutedExperts
from headrace.data.sample import Sample
from headrace.errors import BackendError, ConfigError, DataError, DivergedError, SnapshotLostError

CASES = {case.name: case for case in losses()}
PPO, VALUES = CASES["ppo_clip"], CASES["value head"]


pytestmark = pytest.mark.usefixtures("forked_ranks")


@pytest.fixture(scope="module")
def pair(forked_ranks: None) -> Iterator[LearnerGroup]:
    """Two ranks with a value head, for all tests: each begins with the weights that it loads."""
    group = new_group(VALUES.config(2))
    yield group
    group.close()


def begin(group: LearnerGroup, case: Case, folder: Path) -> Learner:
    """A learner, and the group with its weights."""
    learner = new_learner(case)
    learner.save(folder / "begin")
    group.load(folder / "begin")
    group.together("clear_gradients")
    return learner


def compare(case: Case, group: LearnerGroup, folder: Path) -> None:
    """Gradient of a batch, what was found in it, and weights after five steps."""
    learner = begin(group, case, folder)
    batch = case.batch(seed=1)
    one, many = (each.forward_backward(batch, case.algorithm) for each in (learner, group))
    assert difference(local_gradient(learner), group.together("gradient")[0]) < TIGHT
    assert one.rejected == many.rejected
    for ours, theirs in zip(one.logprobs, many.logprobs, strict=True):
        assert ours == pytest.approx(theirs, rel=TIGHT)
    # shares of clipped tokens are means in float32
    assert _comparable(one.metrics.reduce()) == pytest.approx(_comparable(many.metrics.reduce()), rel=1e-6)
    first, other = (each.optim_step(1e-3, 0.01).reduce()["policy/grad_norm"] for each in (learner, group))
    assert first == pytest.approx(other, rel=TIGHT)
    assert steps(learner, case, range(2, 6)) == pytest.approx(steps(group, case, range(2, 6)), rel=1e-9)
    assert difference(learner.weights(), trained(group)) < 1e-9
    scored = case.batch(seed=9)
    for ours, theirs in zip(learner.logprobs(scored), group.logprobs(scored, "policy"), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-9)
    if case.valued:
        for ours, theirs in zip(learner.values(scored), group.values(scored), strict=True):
            assert ours == pytest.approx(theirs, rel=1e-8, abs=1e-12)


def _comparable(metrics: dict[str, float]) -> dict[str, float]:
    return {key: value for key, value in metrics.items() if not key.startswith("memory/")}


def trained(group: LearnerGroup | Learner) -> dict[str, torch.Tensor]:
    return group.together("weights")[0] if isinstance(group, LearnerGroup) else group.weights()


def test_two_ranks_compute_what_one_learner_computes(pair: LearnerGroup, tmp_path: Path) -> None:
    compare(VALUES, pair, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", list(CASES))
def test_any_number_of_ranks_computes_what_one_learner_computes(name: str, ranks: int, tmp_path: Path) -> None:
    group = new_group(CASES[name].config(ranks))
    compare(CASES[name], group, tmp_path)
    group.close()


@pytest.mark.slow
def test_groups_that_hold_the_model_twice_over_compute_the_same(tmp_path: Path) -> None:
    group = new_group(PPO.on(shard=2).config(4))
    compare(PPO, group, tmp_path)
    group.close()


# ---- layers that ranks split -----------------------------------------------------------------------------------------


def test_two_ranks_that_split_every_layer_compute_what_one_learner_computes(tmp_path: Path) -> None:
    split = VALUES.on(tensor_parallel=2)
    group = new_group(split.config(2))
    compare(split, group, tmp_path)
    group.save(tmp_path / "by parts")
    learner = Learner(VALUES.config())
    learner.load(tmp_path / "by parts")
    before = trained(group)
    assert all(torch.equal(before[name], tensor) for name, tensor in trained(learner).items())
    for each in (learner, group):  # the optimizer's moments came along
        steps(each, VALUES, [6])
    assert difference(trained(learner), trained(group)) < 1e-9
    group.load(tmp_path / "by parts")
    assert all(torch.equal(before[name], tensor) for name, tensor in trained(group).items())
    group.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if name not in ("adapters", "value head")])
def test_every_loss_is_the_same_where_ranks_split_every_layer(name: str, tmp_path: Path) -> None:
    split = CASES[name].on(tensor_parallel=2)
    group = new_group(split.config(2))
    compare(split, group, tmp_path)
    group.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "backend"),
    [(4, {"tensor_parallel": 2}), (4, {"tensor_parallel": 2, "shard": 2}), (4, {"tensor_parallel": 4})],
)
def test_ranks_split_layers_hold_shards_and_copies(ranks: int, backend: dict[str, int], tmp_path: Path) -> None:
    split = PPO.on(**backend)
    group = new_group(split.config(ranks))
    compare(split, group, tmp_path)
    group.save(tmp_path / "by parts")
    two = new_group(PPO.config(2))
    two.load(tmp_path / "by parts")
    before = trained(group)
    assert all(torch.equal(before[name], tensor) for name, tensor in trained(two).items())
    for each in (group, two):
        each.close()


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama_biases", "qwen2", "qwen3", "phi3"])
def test_models_of_other_families_are_split_by_their_plans(family: str, tmp_path: Path) -> None:
    tiny.saved_model(family, tmp_path / "model", vocab_size=98, intermediate_size=48)
    split = replace(PPO, sections={"model": {"name": str(tmp_path / "model")}, "backend": {"tensor_parallel": 2}})
    group = new_group(split.config(2))
    compare(split, group, tmp_path)
    group.close()


@pytest.mark.parametrize(
    ("family", "split", "says"),
    [
        ("gpt2", 2, "needs a plan of transformers for gpt2 models"),
        ("mixtral", 2, r"in ways that are not built \(moe_tp_experts, packed_colwise\)"),
        ("llama", 4, "does not divide num_key_value_heads = 2"),
        ("llama", 2, "does not divide lm_head = 97"),
    ],
)
def test_models_that_ranks_cannot_split_are_refused(family: str, split: int, says: str, tmp_path: Path) -> None:
    tiny.saved_model(family, tmp_path)
    case = replace(PPO, sections={"model": {"name": str(tmp_path)}, "backend": {"tensor_parallel": split}})
    with pytest.raises(ConfigError, match=says):
        check_split(case.config(4))


@pytest.mark.parametrize(
    ("backend", "model", "says"),
    [
        (
            {"tensor_parallel": 3},
            {},
            "and 4 ranks, which hold the model between them, are no multiple .* backend.ranks",
        ),
        ({"tensor_parallel": 4, "shard": 2}, {}, "and 2 ranks, which .* backend.shard"),
        ({"tensor_parallel": 2}, {"lora": {"rank": 4}}, "puts adapters on them"),
    ],
)
def test_splits_that_do_not_fit_the_run_are_refused(backend: dict[str, int], model: dict[str, Any], says: str) -> None:
    case = replace(PPO, sections={"model": model, "backend": backend})
    with pytest.raises(ConfigError, match=says):
        FsdpBackend.check(case.config(4))


def test_a_batch_of_fewer_rows_than_ranks_gives_the_same_gradient(pair: LearnerGroup, tmp_path: Path) -> None:
    learner = begin(pair, VALUES, tmp_path)
    for each in (learner, pair):
        each.forward_backward(VALUES.batch(count=1), VALUES.algorithm)
    assert difference(local_gradient(learner), pair.together("gradient")[0]) < TIGHT


def test_a_batch_that_diverges_leaves_no_gradient_on_any_rank(pair: LearnerGroup, tmp_path: Path) -> None:
    restarts = pair.restarts
    begin(pair, VALUES, tmp_path)
    samples = VALUES.samples(0, 4)
    broken = replace(samples[2], advantages=(float("nan"),) * len(samples[2].advantages), task_id="the-broken-one")
    with pytest.raises(DivergedError, match="the-broken-one"):
        pair.forward_backward(pack([*samples, broken], VALUES.algorithm, 48), VALUES.algorithm)
    with pytest.raises(BackendError, match="no accumulated gradient"):
        pair.optim_step(1e-3, 1.0)
    with pytest.raises(DataError, match="integer token ids"):  # found before any rank has it
        odd = replace(samples[0], tokens=("<image>", *samples[0].tokens[1:]))
        pair.forward_backward(pack([odd], VALUES.algorithm, 48), VALUES.algorithm)
    assert pair.restarts == restarts


def test_reference_and_teacher_score_as_one_learners_do(pair: LearnerGroup, tmp_path: Path) -> None:
    learner = begin(pair, VALUES, tmp_path)
    batch = VALUES.batch(seed=3)
    said = [Step(s.tokens[:3], s.tokens[3:], (-1.0,) * (len(s.tokens) - 3), temperature=0.7) for s in batch.samples]
    for ours, theirs in zip(learner.logprobs(batch, "reference"), pair.logprobs(batch, "reference"), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-9)
    for refreshed in (False, True):
        if refreshed:
            for each in (learner, pair):
                each.refresh_teacher()
        ours, theirs = learner.teacher_logprobs(said), pair.teacher_logprobs(said)
        assert [len(row) for row in theirs] == [len(step.response_ids) for step in said]
        for one, other in zip(ours, theirs, strict=True):
            assert one == pytest.approx(other, rel=1e-9)


def test_an_exported_folder_is_an_ordinary_model(pair: LearnerGroup, tmp_path: Path) -> None:
    begin(pair, VALUES, tmp_path)
    pair.together("export", tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float64)
    batch = VALUES.batch(count=1)
    ids = torch.tensor([batch.samples[0].tokens])
    with torch.no_grad():
        logits = model(ids).logits[0, :-1] / batch.samples[0].temperature
    theirs = torch.log_softmax(logits, -1).gather(1, ids[0, 1:, None]).squeeze(1)
    assert pair.logprobs(batch, "policy")[0] == pytest.approx(theirs.tolist(), rel=1e-9)


def test_adapters_are_sent_as_peft_writes_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES["adapters"]
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    group = new_group(case.config(1))
    group.together("send_weights", "adapter", (), 3)
    (folder,) = tmp_path.glob("headrace-adapters-*/policy-v3")
    sent = load_file(folder / "adapter_model.safetensors")
    ours = {name.replace(".default.weight", ".weight"): tensor for name, tensor in trained(group).items()}
    assert sent.keys() == ours.keys() and all(torch.equal(sent[name], ours[name]) for name in sent)
    assert json.loads((folder / "adapter_config.json").read_text())["r"] == case.config(1).model.lora.rank
    group.close()


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def test_a_checkpoint_of_two_ranks_is_read_by_the_local_learner_and_back(pair: LearnerGroup, tmp_path: Path) -> None:
    begin(pair, VALUES, tmp_path)
    steps(pair, VALUES, [1, 2])
    pair.save(tmp_path / "by ranks")
    learner = Learner(VALUES.config())
    learner.load(tmp_path / "by ranks")
    before = trained(pair)
    assert all(torch.equal(before[name], tensor) for name, tensor in trained(learner).items())
    learner.save(tmp_path / "by one")
    steps(learner, VALUES, [3])  # the optimizer's moments came along
    for folder in ("by one", "by ranks"):
        pair.load(tmp_path / folder)
        steps(pair, VALUES, [3])
        assert difference(trained(learner), trained(pair)) < 1e-9


@pytest.mark.parametrize("damage", ["missing", "cut"])
def test_a_damaged_shard_is_an_error_and_costs_no_rank(pair: LearnerGroup, tmp_path: Path, damage: str) -> None:
    begin(pair, VALUES, tmp_path)
    pair.save(tmp_path / "saved")
    restarts, shard = pair.restarts, tmp_path / "saved" / "__1_0.distcp"
    shard.unlink() if damage == "missing" else os.truncate(shard, 1000)
    for each in (pair, Learner(VALUES.config())):
        with pytest.raises(BackendError, match=f"cannot read the checkpoint {tmp_path / 'saved'}: [A-Z][A-Za-z]+: .+"):
            each.load(tmp_path / "saved")
    assert pair.restarts == restarts


def test_a_checkpoint_that_cannot_be_written_is_an_error_and_costs_no_rank(pair: LearnerGroup, tmp_path: Path) -> None:
    begin(pair, VALUES, tmp_path)
    restarts = pair.restarts
    (tmp_path / "saved" / "__1_0.distcp").mkdir(parents=True)  # where rank 1 would write
    with pytest.raises(BackendError, match=r"cannot write the checkpoint .*IsADirectoryError"):
        pair.save(tmp_path / "saved")
    pair.snapshot()
    pair.write_snapshot(tmp_path / "saved")
    with pytest.raises(BackendError, match=r"cannot write the checkpoint .*IsADirectoryError"):
        written(pair)
    assert pair.restarts == restarts


def written(group: LearnerGroup) -> None:
    while not group.snapshot_written():
        time.sleep(0.01)


def test_a_snapshot_is_written_while_ranks_train_on_and_is_of_its_moment(pair: LearnerGroup, tmp_path: Path) -> None:
    begin(pair, VALUES, tmp_path)
    for moment in ("first", "second"):  # in the memory of the first
        steps(pair, VALUES, [1])
        before = trained(pair)
        pair.snapshot()
        pair.write_snapshot(tmp_path / moment)
        steps(pair, VALUES, [2])
        written(pair)
        learner = Learner(VALUES.config())
        learner.load(tmp_path / moment)
        assert all(torch.equal(before[name], tensor) for name, tensor in trained(learner).items())
        steps(learner, VALUES, [2])  # the optimizer's moments came along
        assert difference(trained(learner), trained(pair)) < 1e-9


def test_a_snapshot_is_lost_with_a_rank_and_training_goes_on(pair: LearnerGroup, tmp_path: Path) -> None:
    begin(pair, VALUES, tmp_path)
    restarts = pair.restarts
    pair.snapshot()
    assert isinstance(pair.ranks, PipeRanks)
    os.kill(pair.ranks.pids[0], signal.SIGKILL)
    pair.write_snapshot(tmp_path / "lost")
    with pytest.raises(SnapshotLostError, match="ranks were lost while a checkpoint was written"):
        written(pair)
    assert pair.restarts == restarts + 1
    steps(pair, VALUES, [1])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ppo_clip", "adapters", "value head"])
def test_checkpoints_fit_any_number_of_ranks(name: str, tmp_path: Path) -> None:
    """From one group to the next, without a change; each then makes the step that the first one makes."""
    case = CASES[name]
    first = new_group(case.config(2))
    steps(first, case, [1, 2])
    first.save(tmp_path / "0")
    weights, before = trained(first), tmp_path / "0"
    steps(first, case, [3])
    after = trained(first)
    first.close()
    for number, ranks in enumerate((1, 4, 0, 2), 1):
        group = new_group(case.config(ranks)) if ranks else Learner(case.config())
        group.load(before)
        assert all(torch.equal(weights[name], tensor) for name, tensor in trained(group).items())
        before = tmp_path / str(number)
        group.save(before)
        steps(group, case, [3])
        assert difference(after, trained(group)) < 1e-9
        if isinstance(group, LearnerGroup):
            group.close()


# ---- the loss of a rank ----------------------------------------------------------------------------------------------


def test_a_rank_that_is_killed_changes_nothing(pair: LearnerGroup, tmp_path: Path) -> None:
    results, restarts = [], pair.restarts
    for killed in (False, True):
        begin(pair, VALUES, tmp_path / str(killed))
        steps(pair, VALUES, [1])
        pair.save(tmp_path / str(killed) / "partial")
        steps(pair, VALUES, [2])  # while it is written
        (tmp_path / str(killed) / "partial").rename(tmp_path / str(killed) / "saved")
        pair.saved(tmp_path / str(killed) / "saved")
        pair.forward_backward(VALUES.batch(3), VALUES.algorithm)
        if killed:
            assert isinstance(pair.ranks, PipeRanks)
            os.kill(pair.ranks.pids[1], signal.SIGKILL)
        pair.forward_backward(VALUES.batch(4), VALUES.algorithm)  # from the checkpoint, with what came after it
        pair.optim_step(1e-3, 0.01)
        results.append(trained(pair))
    assert pair.restarts == restarts + 1
    assert all(torch.equal(tensor, results[1][name]) for name, tensor in results[0].items())


@dataclass(frozen=True)
class RoutedCase(Case):
    """Tokens were sampled with experts that no router would choose."""

    folder: str = ""

    def config(self, ranks: int = 0) -> RunConfig:
        given = super().config(ranks)
        model = given.model.model_copy(update={"name": self.folder, "dtype": "float32"})  # experts have no float64
        backend = given.backend.model_copy(update={"routing_replay": True})
        return given.model_copy(update={"model": model, "backend": backend})

    def samples(self, seed: int, count: int) -> list[Sample]:
        rng = np.random.default_rng(seed)
        found = super().samples(seed, count)
        experts = [np.argsort(rng.random((len(one.tokens) - 1, 2, 4)))[..., :2] for one in found]
        return [
            replace(one, routed_experts=RoutedExperts.of(chosen)) for one, chosen in zip(found, experts, strict=True)
        ]


def test_ranks_route_tokens_as_they_were_sampled_like_one_learner(tmp_path: Path) -> None:
    folder = tiny.saved_model("qwen3_moe", tmp_path / "model")
    case = RoutedCase("routed", PPO.algorithm, folder=str(folder))
    group = new_group(case.config(2))
    try:
        learner = begin(group, case, tmp_path)
        batch = case.batch(seed=1)
        one, many = (each.forward_backward(batch, case.algorithm) for each in (learner, group))
        for ours, theirs in zip(one.logprobs, many.logprobs, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-4)
        assert difference(local_gradient(learner), group.together("gradient")[0]) < 1e-3
        for ours, theirs in zip(learner.logprobs(batch), group.logprobs(batch, "policy"), strict=True):
            assert ours == pytest.approx(theirs, rel=1e-4)
        plain = replace(batch, samples=tuple(replace(sample, routed_experts=None) for sample in batch.samples))
        apart = [
            abs(a - b)
            for free, routed in zip(learner.logprobs(plain), learner.logprobs(batch), strict=True)
            for a, b in zip(free, routed, strict=True)
        ]
        assert max(apart) > 0.1
    finally:
        group.close()
