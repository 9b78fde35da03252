"""The memory plan: parameters are those of real models, activations those that autograd keeps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import tiny
from headrace.config.loading import build_config
from headrace.models.fallback import TransformersModel
from headrace.models.packed import PackedRows
from headrace.models.plan import MemoryPlan, ModelShape, memory_plan

SEVEN_B = ModelShape(28, 3584, 18944, 3584, 512, 152_064, False)  # as Qwen2.5-7B


@pytest.mark.parametrize("family", ["llama", "llama_ungrouped_tied", "qwen3", "mistral", "mixtral"])
def test_parameters_are_counted(family: str) -> None:
    model = tiny.tiny_model(family)
    found = ModelShape.of(model.config.to_dict()).parameters
    assert found == pytest.approx(sum(p.numel() for p in model.parameters()), rel=0.01)


def test_parameters_of_a_published_model() -> None:
    assert SEVEN_B.parameters == pytest.approx(7.6e9, rel=0.01)


def test_adapters_are_counted() -> None:
    targets = ("q_proj", "k_proj", "down_proj")
    model = tiny.add_lora(tiny.tiny_model("llama"), *targets)
    shape = ModelShape.of(model.config.to_dict())
    assert shape.adapters(4, targets) == sum(p.numel() for n, p in model.named_parameters() if "lora_" in n)


def saved_bytes(shape: dict[str, Any], layers: int, dtype: torch.dtype, rows: list[list[int]]) -> int:
    """What autograd keeps of the forward pass, without the parameters."""
    config = AutoConfig.for_model("llama", vocab_size=100, num_hidden_layers=layers, **shape)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).train()
    causal = TransformersModel(model)
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, Any] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        causal.hidden(PackedRows.from_rows(rows))
    return sum(size for size, _ in kept.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("width", "inner", "heads", "groups"), [(64, 128, 4, 2), (128, 384, 4, 4), (256, 512, 8, 2)])
def test_activations_are_what_autograd_keeps(
    dtype: torch.dtype, width: int, inner: int, heads: int, groups: int
) -> None:
    given = {
        "hidden_size": width, "intermediate_size": inner, "num_attention_heads": heads, "num_key_value_heads": groups,
    }  # fmt: skip
    rows = [[3] * 50, [4] * 40, [5] * 45]
    few, many = (saved_bytes(given, layers, dtype, rows) for layers in (1, 3))
    measured = (many - few) / 2 / sum(map(len, rows)) / dtype.itemsize
    shape = ModelShape.of({**given, "num_hidden_layers": 1, "vocab_size": 100})
    assert shape.activations(dtype.itemsize == 2) == pytest.approx(measured, rel=0.15)


def plan(**sections: Any) -> MemoryPlan:
    sections["model"] = {"device": "cuda", **sections.get("model", {})}
    return memory_plan(build_config(sections), SEVEN_B)


def test_full_fine_tuning_has_masters_moments_and_gradients() -> None:
    found = plan()
    count = SEVEN_B.parameters
    assert found.parts["parameters"] == 2 * count
    assert found.parts["gradients"] == 4 * count
    assert found.parts["optimizer"] == 12 * count
    assert not found.fits(80 * 2**30)


@pytest.mark.parametrize(
    "smaller",
    [
        {"optimizer": {"offload": True}},
        {"backend": {"gradient_checkpointing": True}},
        {"backend": {"micro_batch_tokens": 1024}},
        {"backend": {"logits_chunk": 128}},
        {"model": {"lora": {"rank": 16}}},
        {"model": {"lora": {"rank": 16}, "quantize": "nf4"}},
    ],
    ids=str,
)
def test_what_an_error_recommends_saves_memory(smaller: dict[str, Any]) -> None:
    assert plan(**smaller).training < plan().training


def test_checkpointing_every_other_layer_is_in_between() -> None:
    every, other, none = (
        plan(backend={"gradient_checkpointing": True}),
        plan(backend={"gradient_checkpointing": True, "checkpoint_every": 2}),
        plan(),
    )
    assert every.training < other.training < none.training


def test_quantised_adapters_of_seven_billion_fit_a_24_gib_card() -> None:
    lean = {"gradient_checkpointing": True, "micro_batch_tokens": 2048, "logits_chunk": 512}
    assert plan(model={"lora": {"rank": 16}, "quantize": "nf4"}, backend=lean).fits(24 * 2**30)
