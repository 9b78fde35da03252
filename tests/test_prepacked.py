"""Decoding with a second copy of the weights gives what the weights themselves give, and follows when they change."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from torch import Tensor

import tiny
from forwards import assert_close, decoded_logits, reference_logits
from headrace.backends.local.backend import LocalBackend
from headrace.engine.base import Generation, SamplingParams
from headrace.engine.lane import Lane
from headrace.engine.torch_engine import TorchEngine
from headrace.models.causal import build_causal_model
from headrace.models.llama import LlamaModel
from headrace.models.packed import PackedRows
from headrace.models.prepacked import Prepacked
from headrace.runfile import build_config

ALL_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PATIENCE = 4

needs_mkl = pytest.mark.skipif(
    not (torch.backends.mkl.is_available() and hasattr(torch.ops.mkl, "_mkl_linear")), reason="torch without MKL"
)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def make(kind: str = "llama", dtype: torch.dtype = torch.float32) -> tuple[Any, LlamaModel, LlamaModel]:
    """Weights, and two models on them: one that packs, one that does not."""
    hf_model = tiny.tiny_model("llama" if kind == "lora" else kind, dtype)
    if kind == "lora":
        hf_model = tiny.add_lora(hf_model, *ALL_LINEAR)
    packing, plain = build_causal_model(hf_model), build_causal_model(hf_model)
    assert isinstance(packing, LlamaModel) and isinstance(plain, LlamaModel)
    packing.pack_weights()
    return hf_model, packing, plain


def packed_for(model: LlamaModel) -> int:
    assert model._prepacked is not None
    return model._prepacked.rows


def decode(model: LlamaModel, count: int, steps: int = PATIENCE + 3) -> list[Tensor]:
    """Logits of so many sequences over some steps, from the beginning on."""
    return decoded_logits(model, tiny.random_rows(*[steps] * count), [0] * count)


def assert_alike(packing: LlamaModel, plain: LlamaModel, count: int) -> None:
    assert_close(decode(packing, count), decode(plain, count), 1e-5)


# ---- what is decoded ----------------------------------------------------------------------------------------------


@needs_mkl
@pytest.mark.parametrize("count", [2, 16, 17, 40])
@pytest.mark.parametrize("kind", ["llama", "llama_biases", "llama_ungrouped_tied", "qwen2", "qwen3", "lora"])
def test_packed_weights_give_the_plain_logits(kind: str, count: int) -> None:
    hf_model, packing, plain = make(kind)
    assert_alike(packing, plain, count)
    assert packed_for(packing) == (16 if count <= 16 else -(-count // 32) * 32)
    assert_alike(packing, plain, count)  # packed from the first step on
    rows = tiny.random_rows(*[3] * count)
    with torch.no_grad():
        assert_close(decoded_logits(packing, rows, [0] * count), reference_logits(hf_model, rows), 5e-5)


@needs_mkl
def test_a_batch_may_grow_and_shrink() -> None:
    _, packing, plain = make()
    layouts = []
    for count in (3, 16, 20, 1, 70, 64, 33, 2, 1, 5):
        assert_alike(packing, plain, count)
        layouts.append(packed_for(packing))
    assert layouts == [16, 16, 32, 32, 96, 64, 64, 16, 16, 16]


@needs_mkl
def test_prefilling_as_many_tokens_as_there_are_rows_gives_the_same_cache() -> None:
    _, packing, plain = make("qwen2")
    decode(packing, 5)
    caches = []
    for model in (packing, plain):
        cache = model.new_cache()
        cache.ensure(2, 20)
        model.prefill(cache, PackedRows.from_rows(tiny.random_rows(9, 7)), [0, 1])
        caches.append([*cache.keys, *cache.values])
    assert packed_for(packing) == 16
    assert_close(caches[0], caches[1], 1e-5)


# ---- when it packs ------------------------------------------------------------------------------------------------


@needs_mkl
def test_it_waits_for_some_steps_with_about_as_many_sequences() -> None:
    _, packing, _ = make()
    chooser = packing._prepacked
    assert chooser is not None
    assert [chooser.rows_for(5) for _ in range(PATIENCE + 2)] == [0] * PATIENCE + [16] * 2
    assert [chooser.rows_for(count) for count in (16, 2, 9)] == [16] * 3
    assert [chooser.rows_for(30) for _ in range(PATIENCE)] == [0] * PATIENCE
    assert chooser.rows_for(16) == 16  # the others have gone again: what is there still serves
    assert [chooser.rows_for(150) for _ in range(PATIENCE + 1)] == [0] * PATIENCE + [160]
    assert chooser.rows_for(128) == 160  # a few rows too many
    assert chooser.rows_for(90) == 0  # too many of them
    chooser.drop()
    assert chooser.rows == 0
    assert [chooser.rows_for(128) for _ in range(PATIENCE + 1)] == [0] * PATIENCE + [128]


@needs_mkl
def test_a_single_sequence_is_not_packed_for() -> None:
    _, packing, plain = make()
    assert_close(decode(packing, 1, steps=20), decode(plain, 1, steps=20), 0.0)
    assert packed_for(packing) == 0


def test_other_types_are_decoded_as_they_are() -> None:
    _, packing, plain = make(dtype=torch.float64)
    assert_close(decode(packing, 5), decode(plain, 5), 0.0)
    assert packed_for(packing) == 0


def test_without_the_library_nothing_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: False)
    _, packing, plain = make()
    assert_close(decode(packing, 5), decode(plain, 5), 0.0)
    assert packed_for(packing) == 0


# ---- when the weights change --------------------------------------------------------------------------------------


@needs_mkl
@pytest.mark.parametrize("kind", ["llama_biases", "qwen2", "lora"])
def test_weights_that_change_in_place_are_decoded_with_once_it_is_told(kind: str) -> None:
    hf_model, packing, plain = make(kind)
    assert_alike(packing, plain, 5)
    tiny.randomise(hf_model, seed=5)
    stale, fresh = decode(packing, 5), decode(plain, 5)
    assert (torch.cat(stale) - torch.cat(fresh)).abs().max() > 0.1  # so it is the copy that is read
    packing.weights_changed()
    assert packed_for(packing) == 0
    assert_close(decode(packing, 5), fresh, 1e-5)
    assert packed_for(packing) == 16
    assert_close(decode(packing, 5), fresh, 1e-5)


@needs_mkl
def test_a_lane_that_loads_forgets_the_copies_of_both_models() -> None:
    _, first, _ = make()
    hf_model, second, plain = make("qwen2")
    decode(first, 5)
    decode(second, 5)
    lane = Lane(first, 0, 8, 100)
    tiny.randomise(hf_model, seed=5)
    lane.load(1, second, recompute=False)
    assert (packed_for(first), packed_for(second)) == (0, 0)
    assert_alike(second, plain, 5)
    tiny.randomise(hf_model, seed=6)
    lane.load(2, None, recompute=False)
    assert_alike(second, plain, 5)


@needs_mkl
def test_a_copy_of_a_model_packs_weights_of_its_own() -> None:
    hf_model, packing, plain = make()
    want = decode(plain, 5)
    decode(packing, 5)
    copied = packing.copy()
    assert packed_for(copied) == 0
    tiny.randomise(hf_model, seed=5)
    packing.weights_changed()
    assert_close(decode(copied, 5), want, 1e-5)
    assert packed_for(copied) == 16
    assert_alike(packing, plain, 5)
    assert_close(decode(copied, 5), want, 1e-5)


@needs_mkl
async def test_an_engine_with_packed_weights_samples_what_a_plain_one_does() -> None:
    hf_model, packing, plain = make("qwen3")
    engines = [TorchEngine(model, max_batch=24) for model in (packing, plain)]
    for version in (1, 2):
        one, two = [await sample(engine) for engine in engines]
        assert packed_for(packing) == 16 and packed_layouts(plain) == {0}
        for got, want in zip(one, two, strict=True):
            assert got.completion_ids == want.completion_ids
            assert got.logprobs == pytest.approx(want.logprobs, abs=1e-4)
        tiny.randomise(hf_model, seed=version)
        for engine in engines:
            await engine.load_weights(version)
        assert packed_for(packing) == 0
    for engine in engines:
        await engine.close()


def packed_layouts(model: LlamaModel) -> set[int]:
    return {linear._packed[0] for layer in model._layers for linear in layer.linears}


async def sample(engine: TorchEngine) -> list[Generation]:
    """Replies of different lengths, more than are decoded at once."""
    asked = [
        engine.generate(prompt, SamplingParams(max_tokens=5 + index, temperature=1.0), seed=index)
        for index, prompt in enumerate(tiny.random_rows(*range(3, 33)))
    ]
    return list(await asyncio.gather(*asked))


# ---- who packs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "packs"),
    [
        ({}, True),
        ({"engine": {"pack_weights": False}}, False),
        ({"run": {"deterministic": True}}, False),
    ],
    ids=["usual", "switched off", "deterministic"],
)
async def test_a_run_packs_unless_it_is_told_not_to_or_must_repeat_to_the_bit(
    changes: dict[str, Any], packs: bool
) -> None:
    backend = LocalBackend(build_config(changes))
    engine = backend.create_engine()
    assert isinstance(backend.model, LlamaModel)
    assert isinstance(backend.model._prepacked, Prepacked) == packs
    await engine.close()
    await backend.close()
