"""The engine on the strict device: the numbers of the CPU, nothing mixed, one transfer back per decoding step."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import sim_device
import tiny
from contracts.engine_harness import soon
from forwards import decoded_logits
from headrace.config import LoraSection, ModelSection
from headrace.engines.base import Generation, SamplingParams
from headrace.engines.process.child import EngineProcess
from headrace.engines.process.engine import ProcessEngine
from headrace.engines.process.wire import EngineOptions
from headrace.engines.torch.engine import TorchEngine
from headrace.engines.torch.sampling import sample_tokens
from headrace.errors import EngineError
from headrace.models import batched_decoding
from headrace.models.causal import CausalModel, build_causal_model
from headrace.models.load import load_model
from headrace.models.modules import trained_parameters
from headrace.weights.digest import weight_digest
from headrace.weights.in_place import InPlace
from headrace.weights.shared_memory import SharedWeights
from headrace.weights.source import ModelWeights
from headrace.weights.sync import WeightSync
from sim_device import DEVICE, counted

FAMILIES = ("llama", "gpt2", "gemma2", "phi", "mistral_window", "mixtral", "qwen3_moe", "gpt_oss", "mamba")
PARAMS = [
    SamplingParams(max_tokens=12),
    SamplingParams(max_tokens=12, temperature=0.7),
    SamplingParams(max_tokens=12, temperature=0.0),
    SamplingParams(max_tokens=12, top_k=5),
    SamplingParams(max_tokens=12, top_p=0.8, temperature=1.3),
    SamplingParams(max_tokens=12, top_k=20, top_p=0.5),
]
Make = Callable[..., TorchEngine]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
async def make() -> AsyncIterator[Make]:
    engines: list[TorchEngine] = []

    def make(model: CausalModel, **options: Any) -> TorchEngine:
        engines.append(TorchEngine(model, **options))
        return engines[-1]

    yield make
    for engine in engines:
        await soon(engine.close())


def pair(family: str) -> tuple[Any, Any]:
    """The same model on the CPU and on the device."""
    return tiny.tiny_model(family), tiny.tiny_model(family).to(DEVICE)


def models(family: str) -> tuple[CausalModel, CausalModel]:
    here, there = (build_causal_model(hf_model, fast_path=False) for hf_model in pair(family))
    assert there.device == DEVICE
    return here, there


async def generated(engine: Any, params: list[SamplingParams], count: int = 12) -> list[Generation]:
    rows = tiny.random_rows(*(1 + i % 5 for i in range(count // 2)))
    requests = [(row, params[i % len(params)], i) for i, row in enumerate(rows * 2)]  # each prompt twice
    return list(await soon(asyncio.gather(*(engine.generate(*request) for request in requests))))


def assert_same(got: list[Generation], want: list[Generation], tolerance: float = 1e-4) -> None:
    for one, two in zip(got, want, strict=True):
        assert one.completion_ids == two.completion_ids
        for name in ("logprobs", "model_logprobs"):
            np.testing.assert_allclose(getattr(one, name), getattr(two, name), atol=tolerance, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_prefill_and_decoding_give_the_logits_of_the_cpu(family: str) -> None:
    rows = tiny.random_rows(40, 3, 1, 20)
    here, there = models(family)
    for block in (0, 8):
        here.row_block = there.row_block = block
        want, got = (decoded_logits(model, rows, [30, 2, 0, 1]) for model in (here, there))
        for one, two in zip(got, want, strict=True):
            assert one.device == DEVICE
            torch.testing.assert_close(one.cpu(), two, atol=2e-5, rtol=0)


def test_tokens_are_those_that_the_cpu_draws() -> None:
    logits_BV = torch.randn((60, 3000), generator=torch.Generator().manual_seed(1)) * 2
    params = [one.filled(SamplingParams(1.0, 1.0, 0)) for one in PARAMS] * 10
    for chosen in (params, [params[0]] * 60):
        want = sample_tokens(logits_BV, chosen, range(60), [3] * 60)
        with counted() as moved:
            got = sample_tokens(logits_BV.to(DEVICE), chosen, range(60), [3] * 60)
        assert got[0] == want[0]
        np.testing.assert_allclose(got[1:], want[1:], atol=1e-5)
        assert moved["down"] == 1 and not moved["stall"]


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
async def test_the_engine_generates_what_it_generates_on_the_cpu(make: Make, family: str) -> None:
    here, there = models(family)
    for params in ([PARAMS[0]], PARAMS):
        assert_same(await generated(make(there), params), await generated(make(here), params))


async def traffic_of(engine: TorchEngine, params: list[SamplingParams]) -> tuple[int, int]:
    """(transfers to the host, waits of the host) while requests are decoded that all take 12 steps."""
    with counted() as moved:
        await generated(engine, params)
    return moved["down"], moved["stall"]


async def test_a_step_brings_one_transfer_to_the_host_which_waits_for_nothing_else(make: Make) -> None:
    engine = make(models("llama")[1])
    assert await traffic_of(engine, [PARAMS[0]]) == await traffic_of(engine, PARAMS) == (12, 0)


async def test_the_engine_scores_as_on_the_cpu(make: Make) -> None:
    here, there = models("gemma2")
    rows = tiny.random_rows(9, 1, 30)
    want, got = [await soon(make(model).compute_logprobs(rows)) for model in (here, there)]
    for one, two in zip(got, want, strict=True):
        np.testing.assert_allclose(one, two, atol=1e-4)


async def test_new_weights_in_place_are_decoded_with_and_proved(make: Make) -> None:
    hf_here, hf_there = pair("qwen3")
    here, there = (build_causal_model(hf_model, fast_path=False) for hf_model in (hf_here, hf_there))
    engines = make(here), make(there)
    before = await generated(engines[1], PARAMS)
    for hf_model in (hf_here, hf_there):
        with torch.no_grad():
            for i, parameter in enumerate(hf_model.parameters()):
                parameter.add_(0.02 * (i % 3 - 1))
    proofs = []
    for hf_model, model, engine in zip((hf_here, hf_there), (here, there), engines, strict=True):
        sync = WeightSync(ModelWeights(hf_model), InPlace(model), engine)
        proofs.append((await soon(sync.sync(1))).digest)
    assert proofs[0] == proofs[1] == weight_digest(hf_here.parameters())
    after = await generated(engines[1], PARAMS)
    assert_same(after, await generated(engines[0], PARAMS))
    assert [one.completion_ids for one in after] != [one.completion_ids for one in before]


async def test_pinned_weights_stay_on_the_device(make: Make) -> None:
    hf_model = pair("llama")[1]
    model = build_causal_model(hf_model)
    engine = make(model)
    await soon(engine.pin())
    before = await soon(engine.generate([3, 4, 5], PARAMS[0], 1, pinned=True))
    with torch.no_grad():
        for parameter in hf_model.parameters():
            parameter.add_(0.1)
    assert await soon(engine.generate([3, 4, 5], PARAMS[0], 1, pinned=True)) == before


def launch_sim(options: EngineOptions, files: Sequence[int]) -> EngineProcess:
    """An engine process that knows the device."""
    path = os.pathsep.join([os.path.dirname(sim_device.__file__), *filter(None, [os.environ.get("PYTHONPATH")])])
    return EngineProcess("sim_worker", files, {"OMP_NUM_THREADS": str(options.threads), "PYTHONPATH": path})


@pytest.mark.parametrize("options", [{"dtype": "bfloat16"}, {"lora": LoraSection(rank=4, targets=("q_proj",))}])
async def test_shared_memory_brings_weights_from_device_to_device(tmp_path: Path, options: dict[str, Any]) -> None:
    folder = str(tiny.saved_model("qwen3", tmp_path))
    given: dict[str, Any] = {"dtype": "float32", **options}
    section = ModelSection(name=folder, device="sim:0", **given)
    learner = load_model(section)
    source = ModelWeights(learner)
    weights = SharedWeights(source)
    engine = ProcessEngine(weights, EngineOptions(section, row_block=8), launch_sim)
    sync, ours = WeightSync(source, weights, engine), TorchEngine(build_causal_model(learner))
    ours._live.model.row_block = 8
    try:
        await soon(engine.pin())
        pinned = await soon(engine.generate([3, 4, 5], PARAMS[0], 1, pinned=True))
        for version in range(1, 5):  # more often than there are buffers
            with torch.no_grad():
                for parameter in trained_parameters(learner):
                    parameter.add_(0.01 * version)
            synced = await soon(sync.sync(version))
            assert synced.digest == weight_digest(p.cpu() for p in trained_parameters(learner))
            assert await generated(engine, PARAMS[:1], 4) == _at(await generated(ours, PARAMS[:1], 4), version)
        assert await soon(engine.generate([3, 4, 5], PARAMS[0], 1, pinned=True)) == pinned
    finally:
        await soon(engine.close())
        await soon(ours.close())


def _at(made: list[Generation], version: int) -> list[Generation]:
    return [replace(one, versions=(version,) * len(one.versions)) for one in made]


async def test_a_tensor_left_on_the_cpu_is_noticed(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make(models("llama")[1])
    await generated(engine, PARAMS)
    upload = batched_decoding.upload
    monkeypatch.setattr(batched_decoding, "upload", lambda arrays, device: upload(arrays, torch.device("cpu")))
    with pytest.raises(EngineError, match="same device"):
        await generated(engine, PARAMS)


async def test_a_needless_wait_is_noticed(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    model = models("llama")[1]
    logits = model.decode_logits
    monkeypatch.setattr(model, "decode_logits", lambda hidden: logits(hidden * float(hidden.isfinite().all())))
    assert await traffic_of(make(model), [PARAMS[0]]) == (12, 12)
