"""The local backend passes the backend contract in each of its forms, and keeps what is its own."""

from __future__ import annotations

import resource
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from contracts.backend_contract import IMITATE, REINFORCE_LIKE, BackendContract, random_samples
from headrace.algorithms.batching import grad_scale, pack
from headrace.backends.local.backend import LocalBackend
from headrace.config import AlgorithmSection, RunConfig
from headrace.config.loading import build_config
from headrace.data.sample import Sample
from headrace.errors import BackendError, DataError
from headrace.trainer.drift import drift_metrics


def make_local(**changes: Any) -> LocalBackend:
    torch.set_num_threads(1)
    return LocalBackend(build_config(dict(changes)))


class LocalContract(BackendContract):
    def make_backend(self, config: RunConfig) -> LocalBackend:
        torch.set_num_threads(1)
        return LocalBackend(config)


class TestFullFineTuning(LocalContract): ...


class TestFullFineTuningInFloat64(LocalContract):
    tolerance = 1e-10
    settings: ClassVar[dict[str, Any]] = {"model": {"dtype": "float64"}}


class TestLora(LocalContract):
    settings: ClassVar[dict[str, Any]] = {"model": {"lora": {"rank": 4}}}


class TestTransformersForward(LocalContract):
    settings: ClassVar[dict[str, Any]] = {"model": {"fast_path": False}}


async def step(backend: LocalBackend, samples: list[Sample], algorithm: AlgorithmSection = IMITATE) -> None:
    batch = pack(samples, algorithm, 512)
    await backend.forward_backward(batch, algorithm)
    await backend.optim_step(1e-2, grad_scale([batch], algorithm))


@pytest.mark.parametrize("rank", [0, 4])
async def test_an_exported_folder_is_an_ordinary_model(tmp_path: Path, rank: int) -> None:
    backend = make_local(model={"lora": {"rank": rank}})
    samples = random_samples(4, 90)
    await step(backend, samples)
    await backend.export(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert AutoTokenizer.from_pretrained(tmp_path / "model").chat_template
    ids = torch.tensor([samples[0].tokens])
    with torch.no_grad():
        theirs = torch.log_softmax(model(ids).logits[0, :-1], -1).gather(1, ids[0, 1:, None]).squeeze(1)
    ours = (await backend.compute_logprobs(pack(samples[:1], IMITATE, 512)))[0]
    assert ours == pytest.approx(theirs.tolist(), abs=1e-4)
    await backend.close()


async def test_lora_trains_only_the_adapters() -> None:
    backend = make_local(model={"lora": {"rank": 4}})
    names = [name for name, p in backend.learner.hf_model.named_parameters() if p.requires_grad]
    assert names and all("lora_" in name for name in names)
    await backend.close()


async def test_ratio_one_gives_the_plain_policy_gradient() -> None:
    """On-policy, ppo_clip and reinforce have the same gradient: the loss value is -mean advantage."""
    backend = make_local()
    (sample,) = random_samples(1, 90)
    exact = (await backend.compute_logprobs(pack([sample], IMITATE, 512)))[0]
    on_policy = Sample(
        sample.tokens, sample.loss_mask, tuple(exact), sample.versions, sample.advantages, task_id="on-policy"
    )
    found = await backend.forward_backward(pack([on_policy], REINFORCE_LIKE, 512), REINFORCE_LIKE)
    metrics = found.metrics.reduce()
    trained = [a for a, m in zip(sample.advantages, sample.loss_mask, strict=True) if m]
    assert metrics["policy/loss"] == pytest.approx(-sum(trained) / len(trained), abs=1e-5)
    assert drift_metrics([on_policy], found.logprobs, 0).reduce()["policy/kl_to_sampler"] == pytest.approx(0, abs=1e-5)
    await backend.close()


async def test_the_value_head_learns_from_rows_with_returns_however_the_batch_is_cut() -> None:
    algorithm = AlgorithmSection(estimator="gae", value_head=True, loss="reinforce")
    found = []
    for tokens in (512, 1):
        backend = make_local(
            algorithm={"estimator": "gae", "value_head": True}, optimizer={"eps": 1.0, "grad_clip": 0.0}
        )
        samples = random_samples(4, 90)
        samples[1:3] = [replace(s, returns=tuple(1.0 for _ in s.loss_mask)) for s in samples[1:3]]
        batch = pack(samples, algorithm, tokens)
        metrics = (await backend.forward_backward(batch, algorithm)).metrics.reduce()
        assert metrics["value/loss"] == pytest.approx(0.5)  # values begin at 0
        await backend.optim_step(1e-2, grad_scale([batch], algorithm))
        found.append([value for row in await backend.compute_values(batch) for value in row])
        await backend.close()
    assert any(found[0]) and found[0] == pytest.approx(found[1], rel=1e-4)


async def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    lora, full = make_local(model={"lora": {"rank": 4}}), make_local()
    await lora.save(tmp_path / "state")
    with pytest.raises(BackendError, match="another model"):
        await full.load(tmp_path / "state")
    await lora.close()
    await full.close()


async def test_an_image_block_is_refused_by_a_text_model() -> None:
    backend = make_local()
    (sample,) = random_samples(1, 90)
    block = {"type": "image", "data": "…"}
    odd = Sample((block, *sample.tokens[1:]), sample.loss_mask, sample.logprobs, sample.versions, sample.advantages)
    with pytest.raises(DataError, match="integer token ids"):
        await backend.forward_backward(pack([odd], IMITATE, 512), IMITATE)
    await backend.close()


async def test_logits_of_one_chunk_at_a_time_give_the_same_step() -> None:
    whole, chunked = make_local(), make_local(backend={"logits_chunk": 3})
    samples = random_samples(6, 90)
    for backend in (whole, chunked):
        await step(backend, samples)
    one, two = [await backend.compute_logprobs(pack(samples, IMITATE, 512)) for backend in (whole, chunked)]
    for a, b in zip(one, two, strict=True):
        assert a == pytest.approx(b, abs=1e-3)  # Adam's first step is as long for gradients that rounding made
    await whole.close()
    await chunked.close()


async def test_a_full_disk_is_an_error_that_says_so(tmp_path: Path) -> None:
    backend = make_local()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))  # bytes, and the weights need more
    try:
        with pytest.raises(BackendError, match=r"cannot write weights.safetensors: .*File too large"):
            await backend.save(tmp_path / "state")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    await backend.close()


async def test_optimizer_state_outlives_the_file_it_was_read_from(tmp_path: Path) -> None:
    backend = make_local()
    samples = random_samples(4, 90)
    await step(backend, samples)
    await backend.save(tmp_path)
    await backend.load(tmp_path)
    (tmp_path / "optimizer.safetensors").write_bytes(b"")  # a mapped file would now be gone from under it
    await step(backend, samples)
    await backend.close()
