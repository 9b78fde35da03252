"""The learner on the strict device: the numbers of the CPU, nothing mixed, one transfer each way per micro-batch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import sim_device
from contracts.backend_contract import IMITATE, random_samples
from headrace.algorithms.batching import grad_scale, pack
from headrace.backends.local import offload, token_losses, tokens
from headrace.backends.local.learner import Learner
from headrace.config import AlgorithmSection
from headrace.config.loading import build_config
from headrace.data.episode import Step
from headrace.data.sample import Sample, TrainBatch
from headrace.errors import DeviceMemoryError
from headrace.models.device import accelerators, resolve_device
from sim_device import DEVICE, counted

SIM, HOST = "sim:0", "cpu"
WIDE = {"dtype": "float32", "fast_path": False}
PPO = AlgorithmSection.model_validate({"loss": "ppo_clip", "entropy_coef": 0.01, "kl": {"coef": 0.1}})
ROLES = AlgorithmSection.model_validate({"loss": "reinforce", "roles": {"critic": {"loss": "gspo"}}})
VETO = AlgorithmSection.model_validate({"loss": "ppo_clip", "correction": {"name": "veto", "floor": 0.5}})
VALUED = AlgorithmSection.model_validate({"loss": "reinforce", "estimator": "gae", "value_head": True})
DPO = AlgorithmSection.model_validate({"loss": "dpo", "objective": "dpo"})


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def learner(device: str, **sections: Any) -> Learner:
    model = {**WIDE, "device": device, **sections.pop("model", {})}
    if device != HOST and "fast_path" not in sections:
        model.pop("fast_path", None)
    # where gradients are nearly 0, the update must not follow the sign of a rounding error
    optimizer = {"eps": 0.01, **sections.pop("optimizer", {})}
    return Learner(build_config({"model": model, "optimizer": optimizer, **sections}))


def rows(valued: bool = False) -> list[Sample]:
    """Rows with shared beginnings, of two roles, with all that losses read."""
    samples = random_samples(6, 90)
    shared = tuple(range(5, 25))
    mask = (0,) * 19
    begun = [
        replace(
            sample, tokens=shared + sample.tokens, loss_mask=(*mask, 0, *sample.loss_mask),
            logprobs=(*(0.0,) * 20, *sample.logprobs), versions=(*(0,) * 20, *sample.versions),
            advantages=(*(0.0,) * 20, *sample.advantages),
        )
        for sample in samples[:3]
    ]  # fmt: skip
    found = [*begun, *samples[3:]]
    reference = [replace(s, reference_logprobs=tuple(x - 0.1 for x in s.logprobs)) for s in found]
    roles = [replace(s, role="critic" if i % 3 == 0 else "agent") for i, s in enumerate(reference)]
    return [replace(s, returns=s.advantages) if valued and i != 1 else s for i, s in enumerate(roles)]


def packed(algorithm: AlgorithmSection, budget: int = 100) -> TrainBatch:
    batch = pack(rows(algorithm.value_head), algorithm, budget)
    assert len(batch.micro_batches) > 1
    return batch


def train(one: Learner, algorithm: AlgorithmSection, steps: int = 2) -> tuple[Any, dict[str, float]]:
    batch, found, trained = packed(algorithm), {}, None
    for _ in range(steps):
        trained = one.forward_backward(batch, algorithm)
        found = trained.metrics.reduce() | one.optim_step(1e-3, grad_scale([batch], algorithm)).reduce()
    return trained, {key: value for key, value in found.items() if not key.startswith("memory/device_")}


def weights(one: Learner) -> dict[str, torch.Tensor]:
    return {name: p.detach().cpu() for name, p in one.modules().named_parameters() if p.requires_grad}


def assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], tolerance: float = 1e-5) -> None:
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], atol=tolerance, rtol=0, msg=name)


def test_auto_is_the_accelerator_of_this_process() -> None:
    assert resolve_device("auto") == DEVICE
    assert [one.device for one in accelerators()] == [DEVICE]


CASES: list[tuple[str, AlgorithmSection, dict[str, Any]]] = [
    ("imitation", IMITATE, {}),
    ("ppo with entropy and a reference", PPO, {}),
    ("losses by role", ROLES, {}),
    ("rejected rows", VETO, {}),
    ("value head", VALUED, {"algorithm": {"value_head": True, "estimator": "gae"}}),
    ("lora", IMITATE, {"model": {"lora": {"rank": 4}}}),
    ("checkpointed", IMITATE, {"backend": {"gradient_checkpointing": True, "checkpoint_every": 2, "logits_chunk": 7}}),
    ("padded", IMITATE, {"model": {"attention": "padded"}}),
]


@pytest.mark.parametrize(("algorithm", "sections"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_training_gives_the_numbers_of_the_cpu(algorithm: AlgorithmSection, sections: dict[str, Any]) -> None:
    here, there = (learner(device, **sections) for device in (HOST, SIM))
    (one, metrics), (two, others) = train(here, algorithm), train(there, algorithm)
    assert others == pytest.approx(metrics, abs=1e-4, rel=1e-4) and one.rejected == two.rejected
    for ours, theirs in zip(one.logprobs, two.logprobs, strict=True):
        assert theirs == pytest.approx(ours, abs=1e-4)
    assert_same(weights(there), weights(here))
    assert {p.device for p in there.modules().parameters()} == {DEVICE}


def test_dpo_gives_the_numbers_of_the_cpu() -> None:
    here, there = learner(HOST), learner(SIM)
    for one in (here, there):
        batch = pack(rows(), DPO, 200)
        one.forward_backward(batch, DPO)
        one.optim_step(1e-3, 1.0)
    assert_same(weights(there), weights(here))


def test_scores_and_values_are_those_of_the_cpu() -> None:
    sections = {"algorithm": {"value_head": True, "estimator": "gae", "kl": {"coef": 0.1}}}
    here, there = learner(HOST, **sections), learner(SIM, **sections)
    for one in (here, there):
        assert one.value_head is not None
        torch.nn.init.ones_(one.value_head.weight)
    batch = packed(VALUED)
    for ask in (
        lambda one: one.logprobs(batch),
        lambda one: one.logprobs(batch, "reference"),
        lambda one: one.values(batch),
    ):
        for ours, theirs in zip(ask(here), ask(there), strict=True):
            assert theirs == pytest.approx(ours, abs=1e-4)


def test_the_reference_of_adapters_is_the_model_without_them() -> None:
    one = learner(SIM, model={"lora": {"rank": 4}})
    batch = packed(IMITATE)
    before = one.logprobs(batch, "reference")
    train(one, IMITATE)
    after, now = one.logprobs(batch, "reference"), one.logprobs(batch)
    assert after == before and now != before


def test_the_teacher_scores_and_is_refreshed_on_the_device() -> None:
    steps = [Step(prompt_ids=(5, 6, 7), response_ids=(8, 9), logprobs=(-1.0, -1.0), versions=(0, 0))]
    sections = {"algorithm": {"estimator": "distill"}, "distill": {"refresh_every": 2}}
    here, there = learner(HOST, **sections), learner(SIM, **sections)
    for _ in range(2):
        ours, theirs = (one.teacher_logprobs(steps) for one in (here, there))
        assert theirs[0] == pytest.approx(ours[0], abs=1e-4)
        for one in (here, there):
            train(one, IMITATE, 1)
            one.refresh_teacher()


@pytest.mark.parametrize("algorithm", [IMITATE, PPO, ROLES, VETO], ids=["imitation", "ppo", "roles", "veto"])
def test_a_micro_batch_goes_up_once_and_comes_down_once(algorithm: AlgorithmSection) -> None:
    one, batch = learner(SIM), packed(algorithm)
    one.forward_backward(batch, algorithm)
    with counted() as seen:
        one.forward_backward(batch, algorithm)
    count = len(batch.micro_batches)
    selections = 2 * count if algorithm is ROLES else 0  # where each role's tokens are
    assert (seen["up"], seen["down"]) == (count + selections, count)
    assert seen["stall"] <= count  # torch's attention asks nothing; the rotary embedding of transformers may


def test_scoring_goes_up_once_and_comes_down_once() -> None:
    one, batch = learner(SIM), packed(IMITATE)
    with counted() as seen:
        one.logprobs(batch)
    count = len(batch.micro_batches)
    assert (seen["up"], seen["down"]) == (count, count)


# ---- types and checkpoints ------------------------------------------------------------------------------------------


def test_accelerators_compute_in_bfloat16_with_float32_masters() -> None:
    one = learner(SIM, model={"dtype": "auto"})
    assert {p.dtype for p in one.hf_model.parameters()} == {torch.bfloat16}
    assert {p.dtype for p in one.masters.optimized} == {torch.float32}
    before = [p.detach().clone() for p in one.masters.tensors()]
    batch = packed(IMITATE)
    one.forward_backward(batch, IMITATE)
    one.optim_step(1e-5, 1.0)  # too small a step for bfloat16
    for old, new in zip(before, one.masters.tensors(), strict=True):
        assert not torch.equal(old.cpu(), new.detach().cpu())
    assert {v.dtype for state in one.optimizer.state.values() for v in state.values()} == {torch.float32}
    for parameter, master in zip(one.hf_model.parameters(), one.masters.tensors(), strict=True):
        assert torch.equal(parameter.detach().cpu(), master.detach().cpu().bfloat16())


WAYS = [
    ({"device": HOST}, {"device": SIM}),
    ({"device": SIM}, {"device": HOST}),
    ({"device": SIM, "dtype": "bfloat16"}, {"device": HOST, "dtype": "float32"}),
    ({"device": HOST, "dtype": "float32"}, {"device": SIM, "dtype": "bfloat16"}),
    ({"device": HOST, "dtype": "bfloat16"}, {"device": SIM, "dtype": "float32"}),
]


@pytest.mark.parametrize(("written", "resumed"), WAYS)
def test_a_checkpoint_crosses_devices_and_types(
    written: dict[str, Any], resumed: dict[str, Any], tmp_path: Path
) -> None:
    one, two = (learner(at["device"], model=at) for at in (written, resumed))
    train(one, IMITATE)
    one.save(tmp_path)
    two.load(tmp_path)
    narrow = "bfloat16" in (written.get("dtype"), resumed.get("dtype"))
    state, again = ({k: v.cpu().float() for k, v in x.state()["weights"].items()} for x in (one, two))
    assert_same(again, state, 1e-2 if narrow else 0)
    moments = [x.state()["optimizer"] for x in (one, two)]
    for name in moments[0]:
        ours, theirs = (found[name].cpu().float() for found in moments)
        torch.testing.assert_close(theirs, ours, rtol=1e-2 if narrow else 0, atol=1e-6 if narrow else 0)
    (_, first), (_, second) = train(one, IMITATE, 1), train(two, IMITATE, 1)
    assert second["policy/loss"] == pytest.approx(first["policy/loss"], rel=0.05 if narrow else 1e-4)


def test_masters_survive_a_checkpoint_to_the_bit(tmp_path: Path) -> None:
    one, two = (learner(SIM, model={"dtype": "bfloat16"}) for _ in range(2))
    train(one, IMITATE)
    one.save(tmp_path)
    two.load(tmp_path)
    ours, theirs = ({k: v.cpu() for k, v in x.state()["weights"].items()} for x in (one, two))
    assert_same(ours, theirs, 0)
    train(one, IMITATE, 1)
    train(two, IMITATE, 1)
    assert_same(weights(one), weights(two), 0)


def test_offloaded_state_is_on_the_host_but_for_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload.HostState.__init__, "__defaults__", (5000,))  # several parts
    plain, one = (learner(SIM, model={"dtype": "bfloat16"}, optimizer={"offload": off}) for off in (False, True))
    for _ in range(2):
        train(plain, IMITATE, 1)
        train(one, IMITATE, 1)
        held = [value for state in one.optimizer.state.values() for value in state.values()]
        assert {tensor.device.type for tensor in (*held, *one.masters.tensors())} == {"cpu"}
    assert_same(weights(one), weights(plain), 0)
    one.save(tmp_path)
    again = learner(SIM, model={"dtype": "bfloat16"}, optimizer={"offload": True})
    again.load(tmp_path)
    train(plain, IMITATE, 1)
    train(again, IMITATE, 1)
    assert_same(weights(again), weights(plain), 0)


# ---- memory ---------------------------------------------------------------------------------------------------------


def test_peaks_of_both_phases_are_metrics() -> None:
    one = learner(SIM)
    sim_device.module.peak = 300 * 2**20  # what sampling took
    batch = packed(IMITATE)
    one.forward_backward(batch, IMITATE)
    metrics = one.optim_step(1e-3, 1.0).reduce()
    assert metrics["memory/device_generate_peak_mb"] == 300 and "memory/device_train_peak_mb" in metrics


def test_out_of_memory_says_what_to_lower(monkeypatch: pytest.MonkeyPatch) -> None:
    one, batch = learner(SIM), packed(IMITATE)

    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("tried to allocate 2.00 GiB")

    monkeypatch.setattr(one.model, "hidden", full)
    with pytest.raises(DeviceMemoryError) as raised:
        one.forward_backward(batch, IMITATE)
    said = str(raised.value)
    assert "sim:0 has not enough memory for a micro-batch (8.0 GiB" in said
    assert "backend.micro_batch_tokens =" in said and "(now 3072" in said and "resumed" in said


# ---- the suite catches what it is for -------------------------------------------------------------------------------


def test_a_planted_mistake_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Targets that stay on the CPU: as if somebody had forgotten a device."""
    one, batch = learner(SIM), packed(IMITATE)
    made = tokens.TokenTensors.__init__

    def forgetful(self: Any, *given: Any) -> None:
        made(self, *given)
        self.targets_M = self.targets_M.cpu()

    monkeypatch.setattr(tokens.TokenTensors, "__init__", forgetful)
    with pytest.raises(RuntimeError, match="same device"):
        one.forward_backward(batch, IMITATE)


def test_a_planted_wait_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A number that is read in the loop: as if somebody had logged a loss."""
    one, batch = learner(SIM), packed(IMITATE)
    losses = token_losses.token_losses

    def logging(*given: Any) -> Any:
        found = losses(*given)
        float(found[0].detach().sum())
        return found

    monkeypatch.setattr("headrace.backends.local.learner.token_losses", logging)
    with counted() as seen:
        one.forward_backward(batch, IMITATE)
    assert seen["stall"] >= len(batch.micro_batches)
