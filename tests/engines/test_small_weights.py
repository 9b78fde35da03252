"""Decoding with weights in fewer bits: what they are rounded to, that this is what is computed, and when it is anew."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from test_decoder import KINDS, sampled_at_once, sampled_one_by_one
from test_torch_engine import TorchEngineContract
from torch import Tensor

import tiny
from forwards import assert_close, decoded_logits, reference_logits
from headrace.config import Weights
from headrace.config.loading import build_config
from headrace.engines.base import SamplingParams
from headrace.engines.torch.engine import TorchEngine
from headrace.errors import ConfigError
from headrace.models.causal import build_causal_model
from headrace.models.kernels import cpu as native
from headrace.models.llama import LlamaModel
from headrace.trainer.trainer import UnifiedTrainer

SMALL: list[Weights] = ["bfloat16", "int8"]

pytestmark = [
    pytest.mark.skipif(native.kernels() is None, reason="no native kernels on this machine"),
    pytest.mark.usefixtures("threads_as_before"),
]


def rounded(weight_OI: Tensor, weights: Weights) -> Tensor:
    """By definition."""
    if weights == "bfloat16":
        return weight_OI.bfloat16().float()
    scale_O1 = weight_OI.abs().amax(1, keepdim=True) / 127
    return (weight_OI / scale_O1.clamp_min(1e-30)).round() * scale_O1


@torch.no_grad()
def round_model(hf_model: Any, weights: Weights) -> Any:
    """All linear layers rounded; the embedding is not, even where the head is the same matrix."""
    if hf_model.config.tie_word_embeddings:
        hf_model.lm_head.weight = torch.nn.Parameter(hf_model.lm_head.weight.clone())
    for module in hf_model.modules():
        if isinstance(module, torch.nn.Linear):
            module.weight.copy_(rounded(module.weight, weights))
    return hf_model


def small_model(hf_model: Any, weights: Weights) -> LlamaModel:
    model = build_causal_model(hf_model)
    assert isinstance(model, LlamaModel)
    model.decode_with(weights)
    return model


@pytest.mark.parametrize("count", [1, 2, 3, 7, 8, 9, 17, 40])
@pytest.mark.parametrize("weights", SMALL)
@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_the_rounded_weights(kind: str, weights: Weights, count: int) -> None:
    hf_model = tiny.tiny_model(kind)
    model = small_model(hf_model, weights)
    rows = tiny.random_rows(*[5] * count)
    got = decoded_logits(model, rows, [0] * count)
    with torch.no_grad():
        assert float((got[0] - reference_logits(hf_model, rows[:1])[0]).abs().max()) > 1e-3
        assert_close(got, reference_logits(round_model(copy.deepcopy(hf_model), weights), rows), 1e-4)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("weights", SMALL)
def test_several_steps_at_once_are_the_same_to_the_bit(weights: Weights, threads: int) -> None:
    model = small_model(tiny.tiny_model("qwen3"), weights)
    torch.set_num_threads(threads)
    for slots in (1, 8, 12, 17, 20):  # threads with slots of their own may have few of many
        rows = tiny.random_rows(*range(2, 2 + slots))
        assert sampled_at_once(model, rows, 7) == sampled_one_by_one(model, rows, 7)


@pytest.mark.parametrize("weights", SMALL)
def test_changed_weights_are_read_once_they_are_renewed(weights: Weights) -> None:
    hf_model = tiny.tiny_model("llama")
    model, rows = small_model(hf_model, weights), tiny.random_rows(*[4] * 3)
    before = decoded_logits(model, rows, [0] * 3)
    with torch.no_grad():
        for module in hf_model.modules():  # the embedding is read as it is, and so are norms
            if isinstance(module, torch.nn.Linear):
                module.weight.mul_(1.5)
    assert_close(decoded_logits(model, rows, [0] * 3), before, 0.0)
    model.renew()
    with torch.no_grad():
        after = reference_logits(round_model(copy.deepcopy(hf_model), weights), rows)
    assert_close(decoded_logits(model, rows, [0] * 3), after, 1e-4)
    assert float((before[0] - after[0]).abs().max()) > 0.1


@pytest.mark.parametrize("weights", SMALL)
def test_a_copy_decodes_with_the_same_bits(weights: Weights) -> None:
    hf_model = tiny.tiny_model("llama")
    model, rows = small_model(hf_model, weights), tiny.random_rows(*[4] * 3)
    want = decoded_logits(model, rows, [0] * 3)
    copied = model.copy()
    tiny.randomise(hf_model, seed=5)
    model.renew()
    assert_close(decoded_logits(copied, rows, [0] * 3), want, 0.0)


def test_rows_of_zeros_stay_zeros() -> None:
    hf_model = tiny.tiny_model("llama")
    with torch.no_grad():
        hf_model.lm_head.weight[::2] = 0.0
    logits = decoded_logits(small_model(hf_model, "int8"), tiny.random_rows(3), [0])[0]
    assert not logits[:, ::2].any() and logits[:, 1::2].all()


def test_back_to_the_weights_as_they_are() -> None:
    hf_model = tiny.tiny_model("llama")
    model, rows = small_model(hf_model, "int8"), tiny.random_rows(4, 4)
    model.decode_with("float32")
    assert_close(decoded_logits(model, rows, [0, 0]), decoded_logits(build_causal_model(hf_model), rows, [0, 0]), 0.0)


def test_where_it_cannot_be_had_it_is_refused() -> None:
    adapted = tiny.add_lora(tiny.tiny_model("llama"), "q_proj")
    odd = tiny.tiny_model("llama", intermediate_size=40)
    for hf_model, why in (
        (tiny.tiny_model("gpt2"), "decoded by transformers"),
        (adapted, "none for this model"),
        (odd, "no multiple of 16"),
    ):
        model = build_causal_model(hf_model)
        model.decode_with("float32")
        with pytest.raises(ConfigError, match=rf'engine.weights = "int8" is not .*{why}.*; set it to "float32"'):
            model.decode_with("int8")


@pytest.mark.parametrize("weights", SMALL)
async def test_tokens_carry_the_log_probabilities_of_what_sampled_them(weights: Weights) -> None:
    hf_model = tiny.tiny_model("llama")
    engine = TorchEngine(small_model(hf_model, weights))
    made = await engine.generate([5], SamplingParams(max_tokens=30, temperature=1.0), seed=3)
    row = [5, *made.completion_ids]
    (exact,) = await engine.compute_logprobs([row])  # scoring reads the weights as they are
    await engine.close()
    with torch.no_grad():
        logits = reference_logits(round_model(copy.deepcopy(hf_model), weights), [row[:-1]])[0]
    chosen = logits.log_softmax(-1).gather(1, torch.tensor(row[1:])[:, None]).squeeze(1).tolist()
    assert made.logprobs == pytest.approx(chosen, abs=1e-4)
    assert made.logprobs != pytest.approx(exact, abs=1e-3)


class SmallWeightsContract(TorchEngineContract):
    crowd_tolerance = 2e-5  # sums of few sequences are made in another order than those of many
    """On weights that are round already, so that what is decoded with is the reference's own."""

    family = "llama"
    weights: Weights

    def setup_method(self) -> None:
        super().setup_method()
        round_model(self.hf_model, self.weights)
        self.model._model.decode_with(self.weights)

    def change_weights(self) -> None:
        super().change_weights()
        round_model(self.hf_model, self.weights)


class TestBfloat16(SmallWeightsContract):
    weights = "bfloat16"


class TestInt8(SmallWeightsContract):
    weights = "int8"


@pytest.mark.parametrize("placement", ["colocate", "separate"])
def test_a_run_corrects_for_what_it_samples_with(placement: str, tmp_path: Path) -> None:
    config = build_config(
        {
            "run": {"dir": tmp_path},
            "data": {"tasks": "countdown", "args": {"count": 16}},
            "rollout": {"group_size": 4, "max_tokens": 16},
            "engine": {"weights": "int8"},
            "algorithm": {"proximal": "recompute", "correction": {"name": "tis"}},
            "trainer": {"steps": 2, "batch_size": 4, "placement": placement, "save_last": False},
            "workflow": {"name": "single_turn", "judger": "countdown"},
            "track": {"trackers": ["jsonl"], "plot": False},
        }
    )
    result = UnifiedTrainer(config).fit()
    assert 1e-4 < result.metrics["drift/same_version"] < 0.1
