"""A decoding step in one native call gives what the layers one by one give, to the bit whatever else is decoded."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from torch import Tensor

import tiny
from forwards import assert_close, decoded_logits, reference_logits
from headrace.engines.base import Generation, SamplingParams
from headrace.engines.torch.engine import TorchEngine
from headrace.engines.torch.sampling import sample_tokens
from headrace.models.causal import Draws, build_causal_model
from headrace.models.kernels import cpu as native
from headrace.models.llama import LlamaModel
from headrace.models.packed import PackedRows

KINDS = ["llama", "llama_biases", "llama_ungrouped_tied", "qwen2", "qwen3"]
ALL_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

pytestmark = [
    pytest.mark.skipif(native.kernels() is None, reason="no native kernels on this machine"),
    pytest.mark.usefixtures("threads_as_before"),
]


def make(hf_model: Any, decoder: bool = True) -> LlamaModel:
    model = build_causal_model(hf_model)
    assert isinstance(model, LlamaModel)
    if not decoder:
        model.__dict__["_decoder"] = None  # layer by layer
    return model


def states(model: LlamaModel, rows: list[list[int]], prefilled: int = 0) -> list[Tensor]:
    """Hidden states of the rows, fed one token at a time; one tensor a step."""
    cache = model.new_cache()
    cache.ensure(len(rows), len(rows[0]))
    if prefilled:
        model.prefill(cache, PackedRows.from_rows([row[:prefilled] for row in rows]), list(range(len(rows))))
    return [
        model.decode(cache, torch.tensor([row[at] for row in rows]), [at] * len(rows)).clone()
        for at in range(prefilled, len(rows[0]))
    ]


@pytest.mark.parametrize("count", [1, 2, 16, 17, 40, 70])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_transformers(kind: str, count: int) -> None:
    hf_model = tiny.tiny_model(kind, torch.float32)
    model = make(hf_model)
    assert model._decoder is not None
    rows = tiny.random_rows(*[5] * count)
    with torch.no_grad():
        assert_close(decoded_logits(model, rows, [0] * count), reference_logits(hf_model, rows), 5e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_the_layers_one_by_one_give_the_same(kind: str) -> None:
    hf_model = tiny.tiny_model(kind, torch.float32)
    rows = tiny.random_rows(*[70] * 3)  # attention goes over more than one block of positions
    one, two = (states(make(hf_model, decoder), rows, prefilled=60) for decoder in (True, False))
    assert_close(one, two, 1e-5)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_sequence_does_not_depend_on_the_others_or_on_the_threads(threads: int) -> None:
    model = make(tiny.tiny_model("qwen3", torch.float32))
    rows = tiny.random_rows(*[6] * 50)
    torch.set_num_threads(1)
    alone = states(model, rows[:1])
    torch.set_num_threads(threads)
    for count in (2, 16, 31, 50):
        for got, want in zip(states(model, rows[:count]), alone, strict=True):
            assert torch.equal(got[0], want[0])


def test_weights_that_change_in_place_are_read() -> None:
    hf_model = tiny.tiny_model("llama", torch.float32)
    model, plain = make(hf_model), make(hf_model, decoder=False)
    rows = tiny.random_rows(*[4] * 5)
    before = states(model, rows)
    tiny.randomise(hf_model, seed=5)
    after = states(model, rows)
    assert (torch.cat(before) - torch.cat(after)).abs().max() > 0.1
    assert_close(after, states(plain, rows), 1e-5)


def test_a_copy_reads_weights_of_its_own() -> None:
    hf_model = tiny.tiny_model("llama", torch.float32)
    model, rows = make(hf_model), tiny.random_rows(*[4] * 5)
    want = states(model, rows)
    copied = model.copy()
    tiny.randomise(hf_model, seed=5)
    assert_close(states(copied, rows), want, 0.0)


def test_a_full_slot_is_refused_before_anything_is_written() -> None:
    model = make(tiny.tiny_model("llama", torch.float32))
    cache = model.new_cache()
    cache.ensure(2, 8)
    for tensor in (*cache.keys, *cache.values):
        tensor.zero_()
    with pytest.raises(IndexError, match="no room for one more token"):
        model.decode(cache, torch.tensor([1, 2]), [0, cache.length])
    assert not any(tensor.any() for tensor in (*cache.keys, *cache.values))


def test_adapters_and_other_types_are_decoded_layer_by_layer() -> None:
    adapted = tiny.add_lora(tiny.tiny_model("llama", torch.float32), *ALL_LINEAR)
    for hf_model, tolerance in ((adapted, 5e-5), (tiny.tiny_model("llama", torch.float64), 5e-6)):
        model = make(hf_model)
        assert model._decoder is None
        rows = tiny.random_rows(*[5] * 18)
        with torch.no_grad():
            assert_close(decoded_logits(model, rows, [0] * 18), reference_logits(hf_model, rows), tolerance)


async def test_an_engine_samples_the_same_tokens_either_way() -> None:
    hf_model = tiny.tiny_model("qwen3", torch.float32)
    engines = [TorchEngine(make(hf_model, decoder), max_batch=24) for decoder in (True, False)]
    one, two = [await sample(engine) for engine in engines]
    for got, want in zip(one, two, strict=True):
        assert got.completion_ids == want.completion_ids
        assert got.logprobs == pytest.approx(want.logprobs, abs=1e-4)
    for engine in engines:
        await engine.close()


async def sample(engine: TorchEngine) -> list[Generation]:
    """Replies of different lengths, more than are decoded at once."""
    asked = [
        engine.generate(prompt, SamplingParams(max_tokens=5 + index, temperature=1.0), seed=index)
        for index, prompt in enumerate(tiny.random_rows(*range(3, 33)))
    ]
    return list(await asyncio.gather(*asked))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), [(3, 1), (4, 7), (12, 16), (25, 33), (511, 128)])
def test_a_product_of_few_rows_is_that_of_torch(outputs: int, inputs: int, bias: bool) -> None:
    kernels = native.kernels()
    assert kernels is not None
    weight, added = torch.randn(outputs, inputs), torch.randn(outputs) if bias else None
    for rows in (1, 2, 15, 16, 17, 32, 33, 49, 128):
        x = torch.randn(rows, inputs)
        want = torch.nn.functional.linear(x.double(), weight.double(), None if added is None else added.double())
        assert torch.allclose(kernels.few_rows(x, weight, added).double(), want, atol=1e-5 * inputs**0.5)


# ---- several steps at once ----------------------------------------------------------------------------------------


def sampled_one_by_one(
    model: LlamaModel, rows: list[list[int]], steps: int
) -> tuple[list[list[int]], list[list[float]]]:
    cache, tokens, logprobs = filled(model, rows, steps), [[row[-1] for row in rows]], []
    for step in range(steps):
        hidden = model.decode(cache, torch.tensor(tokens[-1]), [len(row) - 1 + step for row in rows])
        plain = [SamplingParams(temperature=1.0)] * len(rows)
        drawn = sample_tokens(model.decode_logits(hidden), plain, seeds_of(rows), [3 + step] * len(rows))
        tokens.append(drawn[0])
        logprobs.append(drawn[1])
    return tokens[1:], logprobs


def seeds_of(rows: list[list[int]]) -> list[int]:
    return [2**64 - 1 - slot for slot in range(len(rows))]


def filled(model: LlamaModel, rows: list[list[int]], steps: int) -> Any:
    cache = model.new_cache()
    cache.ensure(len(rows), max(map(len, rows)) + steps)
    longer = [slot for slot, row in enumerate(rows) if len(row) > 1]
    model.prefill(cache, PackedRows.from_rows([rows[slot][:-1] for slot in longer]), longer)
    return cache


def sampled_at_once(model: LlamaModel, rows: list[list[int]], steps: int, stop_ids: tuple[int, ...] = ()) -> Any:
    draws = Draws(seeds_of(rows), [3] * len(rows), stop_ids, steps)
    last, lengths = torch.tensor([row[-1] for row in rows]), [len(row) - 1 for row in rows]
    sampled = model.decode_and_sample(filled(model, rows, steps), last, lengths, draws)
    assert sampled is not None
    return tuple(x.tolist() for x in sampled)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_several_steps_at_once_are_the_same_to_the_bit(kind: str, threads: int) -> None:
    model = make(tiny.tiny_model(kind, torch.float32))
    torch.set_num_threads(threads)
    # so many slots that all threads work on each, or that each has slots of its own
    for rows in (tiny.random_rows(5), tiny.random_rows(*range(1, 21)), tiny.random_rows(*range(1, 40))):
        assert sampled_at_once(model, rows, 7) == sampled_one_by_one(model, rows, 7)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("slots", [3, 20, 40])
def test_a_stop_ends_the_steps_whoever_draws_it(slots: int, threads: int) -> None:
    model = make(tiny.tiny_model("llama", torch.float32))
    torch.set_num_threads(threads)
    rows = tiny.random_rows(*range(5, 5 + slots))
    tokens, logprobs = sampled_at_once(model, rows, 9)
    for slot in (0, 1, slots - 1):
        stop = tokens[4][slot]
        first = next(step for step in range(9) if stop in tokens[step])
        assert sampled_at_once(model, rows, 9, (10**6, stop)) == (tokens[: first + 1], logprobs[: first + 1])


@pytest.mark.parametrize("threads", [2, 4])
def test_threads_with_slots_of_their_own_read_a_stem_that_is_anothers(threads: int) -> None:
    model = make(tiny.tiny_model("llama", torch.float32))
    torch.set_num_threads(threads)
    (prompt,) = tiny.random_rows(30)
    cache, slots, steps = filled(model, [prompt] * 64, 6), 64, 6
    draws = Draws(seeds_of([prompt] * slots), [3] * slots, (), steps)
    last, lengths = torch.tensor([prompt[-1]] * slots), [len(prompt) - 1] * slots
    apart = model.decode_and_sample(cache, last, lengths, draws)
    for slot in range(1, slots):
        cache.share(0, slot, len(prompt) - 1)
    shared = model.decode_and_sample(cache, last, lengths, draws)
    assert apart is not None and shared is not None
    assert torch.equal(apart[0], shared[0])
    torch.testing.assert_close(apart[1], shared[1], atol=1e-5, rtol=0)


def test_without_room_for_all_steps_none_is_made() -> None:
    model = make(tiny.tiny_model("llama", torch.float32))
    cache = model.new_cache()
    cache.ensure(1, 64)
    with pytest.raises(IndexError, match="no room"):
        model.decode_and_sample(cache, torch.tensor([1]), [cache.length - 2], Draws([1], [0], (), 3))


def test_without_the_decoder_steps_are_made_one_by_one() -> None:
    model = make(tiny.tiny_model("llama", torch.float32), decoder=False)
    assert model.decode_and_sample(model.new_cache(), torch.tensor([1]), [0], Draws([1], [0], (), 3)) is None
