"""Every architecture is decoded in batches through its own forward, and the learner agrees with what was sampled."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.masking_utils import AttentionMaskInterface

import tiny
from contracts.engine_harness import soon
from forwards import assert_close, decoded_logits, reference_logits
from headrace.engines.base import Generation, SamplingParams
from headrace.engines.torch.engine import TorchEngine
from headrace.errors import ConfigError
from headrace.models import slot_attention
from headrace.models.batched_decoding import BatchedDecoder
from headrace.models.causal import CausalModel
from headrace.models.fallback import TransformersModel
from headrace.models.llama import LlamaModel
from headrace.models.logprobs import target_logprobs
from headrace.models.packed import PackedRows
from headrace.models.sequential_decoding import SequentialDecoder
from headrace.models.slot_cache import SlotKeyValues
from headrace.weights.in_place import InPlace
from headrace.weights.source import ModelWeights
from headrace.weights.sync import WeightSync

ONE_BY_ONE = {"openai_gpt": "no key/value cache", "mamba": "no key/value cache"}
BATCHED = [family for family in tiny.FAMILIES if family not in ONE_BY_ONE]
TRAINED = [
    "gemma2",
    "gemma3",
    "gpt2",
    "phi",
    "phi3",
    "mixtral",
    "qwen3_moe",
    "gpt_oss",
    "qwen2",
    "qwen3",
    "mistral_window",
]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("family", BATCHED)
def test_slots_of_any_length_are_decoded_together(family: str) -> None:
    hf_model, rows = tiny.tiny_model(family), tiny.random_rows(70, 3, 1, 20)
    model, prefilled = TransformersModel(hf_model), [60, 2, 0, 1]
    assert isinstance(model._decoder, BatchedDecoder)
    want = [part[start:] for part, start in zip(exact_logits(hf_model, rows), prefilled, strict=True)]
    assert_close(decoded_logits(model, rows, prefilled), want, 2e-5)


@torch.no_grad()
def exact_logits(hf_model: Any, rows: list[list[int]]) -> list[Tensor]:
    """With the attention that has all of the model's caps: that of torch leaves them out."""
    if getattr(hf_model.config, "attn_logit_softcapping", None):
        hf_model.config._attn_implementation = "eager"
    return reference_logits(hf_model, rows)


@pytest.mark.parametrize("family", ONE_BY_ONE)
def test_what_cannot_be_decoded_together_is_decoded_one_by_one_and_says_so(family: str, caplog: Any) -> None:
    model = TransformersModel(tiny.tiny_model(family))
    assert isinstance(model._decoder, SequentialDecoder)
    assert f"one sequence at a time: it has {ONE_BY_ONE[family]}" in caplog.text


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "mistral_window", "qwen3_moe"])
def test_a_cached_prefix_is_continued(family: str) -> None:
    hf_model, rows = tiny.tiny_model(family), tiny.random_rows(40, 25, 12)
    model, begun = TransformersModel(hf_model), [17, 3, 0]
    cache = model.new_cache()
    cache.ensure(3, 40)
    model.prefill(cache, PackedRows.from_rows([row[:n] for row, n in zip(rows[:2], begun, strict=False)]), [0, 1])
    rest = [row[n:-1] for row, n in zip(rows, begun, strict=True)]
    model.prefill(cache, PackedRows.from_rows(rest, begin=begun), [0, 1, 2], begun)
    ids_B = torch.tensor([row[-1] for row in rows])
    got = model.decode_logits(model.decode(cache, ids_B, [len(row) - 1 for row in rows]))
    assert_close(list(got), [part[-1] for part in exact_logits(hf_model, rows)], 2e-5)


def test_prefixes_of_different_lengths_are_continued_within_the_room_that_there_is() -> None:
    hf_model, rows, begun = tiny.tiny_model("mistral_window"), tiny.random_rows(33, 65), [2, 44]
    model = TransformersModel(hf_model)
    cache = model.new_cache()
    cache.ensure(2, 64)
    model.prefill(cache, PackedRows.from_rows([row[:n] for row, n in zip(rows, begun, strict=True)]), [0, 1])
    rest = [row[n:-1] for row, n in zip(rows, begun, strict=True)]
    model.prefill(cache, PackedRows.from_rows(rest, begin=begun), [0, 1], begun)
    cache.ensure(2, 65)
    got = model.decode_logits(model.decode(cache, torch.tensor([row[-1] for row in rows]), [32, 64]))
    assert_close(list(got), [part[-1] for part in exact_logits(hf_model, rows)], 2e-5)


def test_slots_are_shared_moved_taken_and_put() -> None:
    model, (row,) = TransformersModel(tiny.tiny_model("gemma3")), tiny.random_rows(30)
    cache = model.new_cache()
    cache.ensure(2, 30)
    model.prefill(cache, PackedRows.from_rows([row[:-1]]), [1])
    cache.share(1, 0, 20)
    model.prefill(cache, PackedRows.from_rows([row[20:-1]], begin=[20]), [0], [20])
    want = next_logits(model, cache, row)
    cache.move(1, 0, 29)
    assert torch.equal(next_logits(model, cache, row), want)
    taken = cache.take(0, 29)
    cache.ensure(40, 300)  # grows, and keeps what is there
    assert torch.equal(next_logits(model, cache, row), want)
    cache.release()
    cache.ensure(1, 30)
    model.prefill(cache, PackedRows.from_rows([row[:3]]), [0])
    cache.put(0, 29, taken)
    assert torch.equal(next_logits(model, cache, row), want)


def next_logits(model: CausalModel, cache: SlotKeyValues, row: list[int]) -> Tensor:
    """After a row whose tokens but the last are in slot 0; in float64 it does not show how they got there."""
    hidden = model.decode(cache, torch.tensor([row[-1]]), [len(row) - 1])
    return (model.decode_logits(hidden).double() * 1e4).round()


@pytest.mark.parametrize("family", ["gemma2", "qwen3_moe", "gpt2"])
def test_with_fixed_shapes_neighbours_do_not_change_a_bit(family: str) -> None:
    model = TransformersModel(tiny.tiny_model(family))
    model.row_block = 32
    rows = tiny.random_rows(30, 4, 70)
    together = decoded_logits(model, rows, [20, 1, 50])
    for row, start, want in zip(rows, (20, 1, 50), together, strict=True):
        assert torch.equal(decoded_logits(model, [row], [start])[0], want)


def test_a_model_that_is_decoded_wrongly_in_batches_is_found_at_the_start(monkeypatch: Any, caplog: Any) -> None:
    def sees_everything(**given: Any) -> Tensor:
        return torch.zeros_like(slot_attention._slot_mask(**given))

    monkeypatch.setitem(AttentionMaskInterface._global_mapping, slot_attention.GROUPED, sees_everything)
    hf_model, rows = tiny.tiny_model("qwen3"), tiny.random_rows(9, 5)
    model = TransformersModel(hf_model)
    assert isinstance(model._decoder, SequentialDecoder)
    assert "one sequence at a time: together, logits were off by" in caplog.text
    assert_close(
        decoded_logits(model, rows, [3, 0]),
        [exact_logits(hf_model, rows)[0][3:], exact_logits(hf_model, rows)[1]],
        2e-5,
    )


def test_a_cap_on_scores_counts_in_sampling_and_learning() -> None:
    hf_model, rows = tiny.tiny_model("gemma2", attn_logit_softcapping=0.5), tiny.random_rows(20, 6)
    model = TransformersModel(hf_model)
    with torch.no_grad():
        learned = model.logits(model.hidden(PackedRows.from_rows(rows))).split([20, 6])
    torch_s_own = [part[-1] for part in reference_logits(tiny.tiny_model("gemma2", attn_logit_softcapping=0.5), rows)]
    want = exact_logits(hf_model, rows)
    assert (want[0][-1] - torch_s_own[0]).abs().max() > 1e-2, "the cap does nothing here"
    assert_close(decoded_logits(model, rows, [0, 0]), want, 2e-5)
    assert_close(list(learned), want, 2e-5)


def test_positions_that_depend_on_the_length_of_a_row_bound_it() -> None:
    factors = [1.0] * 4
    rope = {
        "rope_type": "longrope", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64,
        "short_factor": factors, "long_factor": [2.0] * 4,
    }  # fmt: skip
    hf_model = tiny.tiny_model("phi3", rope_parameters=rope, original_max_position_embeddings=64)
    model, rows = TransformersModel(hf_model), tiny.random_rows(64, 5)
    assert model.max_length == 64
    assert_close(
        decoded_logits(model, rows, [10, 0]),
        [exact_logits(hf_model, rows)[0][10:], exact_logits(hf_model, rows)[1]],
        2e-5,
    )


# ---- sampler and learner ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", TRAINED)
async def test_after_training_the_learner_gives_each_sampled_token_the_logprob_of_the_sampler(family: str) -> None:
    hf_model = tiny.tiny_model(family)
    model = TransformersModel(hf_model)
    engine = TorchEngine(model)
    before = await generated(engine)
    await engine.pause()
    loss_before, loss_after = trained(hf_model, model, before)
    assert loss_after < loss_before
    await soon(WeightSync(ModelWeights(hf_model), InPlace(model), engine).sync(1))
    await engine.resume()
    after = await generated(engine)
    assert [one.completion_ids for one in after] != [one.completion_ids for one in before]
    with torch.no_grad():
        for one in after:
            learned = logprobs_of(model, [one])[-len(one.completion_ids) :]
            np.testing.assert_allclose(one.logprobs, learned.numpy(), atol=1e-4)
    await soon(engine.close())


async def generated(engine: TorchEngine) -> list[Generation]:
    rows = tiny.random_rows(1, 2, 12, 17, 5)
    params = SamplingParams(max_tokens=14)
    return list(await soon(asyncio.gather(*(engine.generate(row, params, i) for i, row in enumerate(rows * 2)))))


def logprobs_of(model: TransformersModel, made: list[Generation]) -> Tensor:
    rows = [[*one.prompt_ids, *one.completion_ids] for one in made]
    targets = torch.tensor([token for row in rows for token in row[1:]])
    packed = PackedRows.from_rows([row[:-1] for row in rows], model.shares_prefixes)
    hidden = model.hidden(packed).index_select(0, packed.where_T)
    return target_logprobs(model, hidden, targets, torch.ones(len(targets)), 64)[0]


def trained(hf_model: Any, model: TransformersModel, made: list[Generation]) -> tuple[float, float]:
    """The loss before and after two steps towards what was generated."""
    optimizer = torch.optim.AdamW(hf_model.parameters(), lr=5e-3)
    losses = []
    for _ in range(3):
        loss = -logprobs_of(model, made).mean()
        losses.append(float(loss.detach()))
        optimizer.zero_grad()
        loss.backward()
        if len(losses) < 3:
            optimizer.step()
    return losses[0], losses[-1]


# ---- compiled -----------------------------------------------------------------------------------------------------


@pytest.mark.slow  # the compiler takes long
@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
async def test_a_compiled_step_samples_the_same_tokens(family: str) -> None:
    hf_model = tiny.tiny_model(family)
    engine = TorchEngine(TransformersModel(hf_model))
    want = await generated(engine)
    await soon(engine.close())
    model = TransformersModel(hf_model)
    model.compile_decoding()
    assert isinstance(copied := model.copy()._decoder, BatchedDecoder) and copied.compiled
    engine = TorchEngine(model)
    rows = tiny.random_rows(1, 2, 12, 17, 5)
    tasks = [engine.generate(row, SamplingParams(max_tokens=14), i) for i, row in enumerate(rows * 2)]
    got = await asyncio.wait_for(asyncio.gather(*tasks), 600)
    await soon(engine.close())
    for one, two in zip(got, want, strict=True):
        assert one.completion_ids == two.completion_ids
        np.testing.assert_allclose(one.logprobs, two.logprobs, atol=1e-4)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (lambda: TransformersModel(tiny.tiny_model("mamba")), "one sequence at a time; remove it"),
        (lambda: LlamaModel(tiny.tiny_model("llama")), "set model.fast_path = false"),
    ],
)
def test_what_cannot_be_compiled_says_so(model: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        model().compile_decoding()
