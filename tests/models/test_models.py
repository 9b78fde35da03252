"""Both forwards compute what the transformers model computes, and learner and engine see the same weights."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tiny
from forwards import (
    assert_close,
    assert_same_gradients,
    decoded_logits,
    gradients,
    packed_logits,
    reference_logits,
)
from headrace.backends.local.storage import load_state, save_state
from headrace.config import ModelSection
from headrace.errors import DataError
from headrace.models.causal import CausalModel, build_causal_model
from headrace.models.fallback import TransformersModel
from headrace.models.linear import FusedLinear
from headrace.models.llama import LlamaModel, covers
from headrace.models.load import load_model
from headrace.models.logprobs import target_logprobs
from headrace.models.packed import PackedRows

LENGTHS = (5, 1, 19, 12)
ALL_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def exact_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers computes norms in float32 whatever the model's type; let the reference be as exact as ours."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm
    from transformers.models.mistral.modeling_mistral import MistralRMSNorm
    from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

    def forward(self: Any, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)

    for norm in (LlamaRMSNorm, MistralRMSNorm, Qwen2RMSNorm, Qwen3RMSNorm):
        monkeypatch.setattr(norm, "forward", forward)


# ---- the fast path ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", tiny.FAST)
def test_the_fast_path_covers_its_families(family: str) -> None:
    assert isinstance(build_causal_model(tiny.tiny_model(family)), LlamaModel)
    assert isinstance(build_causal_model(tiny.tiny_model(family), fast_path=False), TransformersModel)


@pytest.mark.parametrize("family", tiny.FALLBACK)
def test_the_fast_path_leaves_other_architectures_alone(family: str) -> None:
    assert not covers(tiny.tiny_model(family))


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_act": "gelu"},
        {"attention_dropout": 0.1},
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_the_fast_path_leaves_unusual_options_alone(changes: dict[str, Any]) -> None:
    assert not covers(tiny.tiny_model("llama", **changes))


@pytest.mark.parametrize("family", tiny.FAST)
def test_packed_logits_equal_those_of_transformers(family: str) -> None:
    hf_model, rows = tiny.tiny_model(family), tiny.random_rows(*LENGTHS)
    with torch.no_grad():
        assert_close(packed_logits(build_causal_model(hf_model), rows), reference_logits(hf_model, rows), 2e-5)


@pytest.mark.usefixtures("exact_norms")
@pytest.mark.parametrize("family", tiny.FAST)
def test_in_float64_they_equal_to_ten_digits(family: str) -> None:
    hf_model, rows = tiny.tiny_model(family, torch.float64), tiny.random_rows(*LENGTHS)
    want = reference_logits(hf_model, rows)
    want_gradients = gradients(hf_model, want)
    model = build_causal_model(hf_model)
    got = packed_logits(model, rows)
    assert_close(got, want, 1e-10)
    assert_same_gradients(gradients(hf_model, got), want_gradients, 1e-10)
    assert_close(decoded_logits(model, rows, [0] * 4), want, 1e-10)


@pytest.mark.parametrize("family", tiny.FAST)
def test_decoding_gives_the_logits_of_the_whole_row(family: str) -> None:
    hf_model, rows = tiny.tiny_model(family), tiny.random_rows(70, 3, 1, 20)
    model, prefilled = build_causal_model(hf_model), [60, 2, 0, 1]
    with torch.no_grad():
        want = [part[start:] for part, start in zip(reference_logits(hf_model, rows), prefilled, strict=True)]
    assert_close(decoded_logits(model, rows, prefilled), want, 2e-5)
    model.row_block = 8
    assert_close(decoded_logits(model, rows, prefilled), want, 2e-5)


def test_products_of_fixed_shape_do_not_depend_on_longer_neighbours() -> None:
    model = build_causal_model(tiny.tiny_model("llama", max_position_embeddings=512))
    model.row_block = 8
    # lengths at which the attention kernel rounds a masked row differently
    rows, prefilled = tiny.random_rows(250, 448, 20), [240, 440, 12]
    alone = [decoded_logits(model, [row], [start])[0] for row, start in zip(rows, prefilled, strict=True)]
    for one, two in zip(decoded_logits(model, rows, prefilled), alone, strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_a_row_does_not_see_its_neighbours(family: str) -> None:
    model, rows = build_causal_model(tiny.tiny_model(family, torch.float64)), tiny.random_rows(*LENGTHS)
    with torch.no_grad():
        together = packed_logits(model, rows)
        for index, row in enumerate(rows):
            (alone,) = packed_logits(model, [row])
            torch.testing.assert_close(together[index], alone, atol=1e-12, rtol=0)
            others = [tiny.random_rows(len(r), seed=7)[0] if i != index else r for i, r in enumerate(rows)]
            assert torch.equal(packed_logits(model, others)[index], together[index])  # to the bit


@pytest.mark.parametrize("family", tiny.FAST)
def test_gradients_equal_those_of_transformers(family: str) -> None:
    hf_model, rows = tiny.tiny_model(family), tiny.random_rows(*LENGTHS)
    want = gradients(hf_model, reference_logits(hf_model, rows))
    assert_same_gradients(gradients(hf_model, packed_logits(build_causal_model(hf_model), rows)), want, 1e-4)


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
@pytest.mark.parametrize("adapted", [False, True])
def test_checkpointing_gives_the_same_gradients(family: str, adapted: bool) -> None:
    hf_model, rows = tiny.tiny_model(family), tiny.random_rows(*LENGTHS)
    if adapted:
        hf_model = tiny.add_lora(hf_model, "q_proj", "down_proj")
    model = build_causal_model(hf_model.train())
    want = gradients(hf_model, packed_logits(model, rows))
    if isinstance(model, LlamaModel):
        model.gradient_checkpointing = True
    else:
        hf_model.gradient_checkpointing_enable()
    assert_same_gradients(gradients(hf_model, packed_logits(model, rows)), want, 1e-6)


# ---- adapters -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("targets", [ALL_LINEAR, ("k_proj", "up_proj"), ("v_proj", "lm_head")], ids="-".join)
def test_adapters_work_in_every_forward(family: str, targets: tuple[str, ...]) -> None:
    plain_rows = tiny.random_rows(*LENGTHS)
    hf_model = tiny.add_lora(tiny.tiny_model(family, tie_word_embeddings=False), *targets)
    model = build_causal_model(hf_model)
    assert isinstance(model, LlamaModel)
    want = reference_logits(hf_model, plain_rows)
    want_gradients = gradients(hf_model, want)
    got = packed_logits(model, plain_rows)
    assert_close(got, want, 2e-5)
    assert_same_gradients(gradients(hf_model, got), want_gradients, 1e-4)
    for model.row_block in (0, 8):
        assert_close(
            decoded_logits(model, plain_rows, [0, 0, 10, 3]), [want[0], want[1], want[2][10:], want[3][3:]], 2e-5
        )


def test_shared_prefixes_work_in_bfloat16() -> None:
    hf_model = tiny.tiny_model("llama", torch.bfloat16)
    stem = tiny.random_rows(12)[0]
    rows = [[*stem, *end] for end in tiny.random_rows(5, 9, 3)]
    model = build_causal_model(hf_model)
    shared = PackedRows.from_rows(rows, share=True)
    states_ND = model.hidden(shared)
    got = list(model.logits(states_ND[shared.where_T]).split([len(row) for row in rows]))
    assert_close(got, packed_logits(model, rows), 0.4)
    states_ND.float().sum().backward()


def test_adapters_of_a_wider_type_than_the_model_work() -> None:
    hf_model, rows = tiny.add_lora(tiny.tiny_model("llama", torch.bfloat16), *ALL_LINEAR), tiny.random_rows(*LENGTHS)
    assert {p.dtype for p in hf_model.parameters() if p.requires_grad} == {torch.float32}
    want = reference_logits(hf_model, rows)
    model = build_causal_model(hf_model)
    assert_close(packed_logits(model, rows), want, 0.4)  # bfloat16 has two or three digits
    assert_close(decoded_logits(model, rows, [0, 0, 10, 3]), [want[0], want[1], want[2][10:], want[3][3:]], 0.4)


@pytest.mark.parametrize("fast_path", [True, False])
def test_the_dropout_of_adapters_acts_where_gradients_are_computed_only(fast_path: bool) -> None:
    hf_model = tiny.add_lora(tiny.tiny_model("llama"), *ALL_LINEAR, dropout=0.5)
    rows = tiny.random_rows(*LENGTHS)
    with torch.no_grad():
        want = reference_logits(hf_model.eval(), rows)
    hf_model.train()
    model = build_causal_model(hf_model, fast_path)
    with torch.no_grad():
        assert_close(packed_logits(model, rows), want, 2e-5)
    assert_close(decoded_logits(model, rows, [0, 0, 10, 3]), [want[0], want[1], want[2][10:], want[3][3:]], 2e-5)
    assert (packed_logits(model, rows)[0] - want[0]).abs().max() > 0.01


@pytest.mark.parametrize("fast_path", [True, False])
def test_switched_off_adapters_are_off_for_the_learner(fast_path: bool) -> None:
    rows = tiny.random_rows(*LENGTHS)
    with torch.no_grad():
        want = reference_logits(tiny.tiny_model("llama"), rows)
        hf_model = tiny.add_lora(tiny.tiny_model("llama"), *ALL_LINEAR)
        model = build_causal_model(hf_model, fast_path)
        with hf_model.disable_adapter():
            assert_close(packed_logits(model, rows), want, 2e-5)


# ---- the transformers forward -------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", tiny.FALLBACK)
def test_the_fallback_gives_what_the_model_gives(family: str) -> None:
    hf_model, rows = tiny.tiny_model(family), tiny.random_rows(*LENGTHS)
    model, prefilled = build_causal_model(hf_model), [0, 0, 14, 11]
    assert isinstance(model, TransformersModel)
    want = reference_logits(hf_model, rows)
    want_gradients = gradients(hf_model, want)
    got = packed_logits(model, rows)
    assert_close(got, want, 2e-5)
    assert_same_gradients(gradients(hf_model, got), want_gradients, 1e-4)
    tails = [part[start:].detach() for part, start in zip(want, prefilled, strict=True)]
    assert_close(decoded_logits(model, rows, prefilled), tails, 2e-5)


@pytest.mark.parametrize("family", ["gpt2", "gemma2", "mamba", "openai_gpt"])
def test_a_copied_slot_continues_from_the_length_that_was_asked_for(family: str) -> None:
    hf_model = tiny.tiny_model(family)
    model = build_causal_model(hf_model)
    row, other = tiny.random_rows(20, 20)
    other[:9] = row[:9]
    with torch.no_grad():
        cache = model.new_cache()
        cache.ensure(2, 21)
        model.prefill(cache, PackedRows.from_rows([row]), [0])
        cache.share(0, 1, 9)
        logits = model.decode_logits(model.decode(cache, torch.tensor([5, other[9]]), [20, 9]))
        assert_close(list(logits), [part[-1] for part in reference_logits(hf_model, [[*row, 5], other[:10]])], 2e-5)


def test_small_logits_do_not_hide_a_cap() -> None:
    hf_model = tiny.tiny_model("gemma2", final_logit_softcapping=30.0)
    with torch.no_grad():
        hf_model.get_output_embeddings().weight.mul_(1e-3)
        model = build_causal_model(hf_model)
        hf_model.get_output_embeddings().weight.mul_(1e5)  # as training may do
        assert float(reference_logits(hf_model, tiny.random_rows(5))[0].abs().max()) > 25
        assert_close(packed_logits(model, tiny.random_rows(5)), reference_logits(hf_model, tiny.random_rows(5)), 1e-4)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_loaded_model_has_no_dropout(family: str, tmp_path: Path) -> None:
    odd: dict[str, Any] = {"attention_dropout": 0.3} if family == "llama" else {"resid_pdrop": 0.3}
    hf_model = tiny.tiny_model(family, **odd)
    hf_model.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    loaded, rows = load_model(ModelSection(name=str(tmp_path))).train(), tiny.random_rows(*LENGTHS)
    assert covers(loaded) == (family == "llama")
    assert_close(packed_logits(build_causal_model(loaded), rows), reference_logits(hf_model, rows), 2e-5)


def test_a_model_reads_integers_only() -> None:
    with pytest.raises(DataError, match="integer token ids, got str 'image'"):
        PackedRows.from_rows([[3, 4], [5, "image"]])


# ---- log-probabilities --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_chunks_of_logits_change_nothing(family: str, chunk: int) -> None:
    hf_model, rows = tiny.tiny_model(family, torch.float64), tiny.random_rows(*LENGTHS)
    model = build_causal_model(hf_model)
    packed = PackedRows.from_rows(rows)
    targets_N = torch.tensor([token for row in tiny.random_rows(*LENGTHS, seed=3) for token in row])
    temperatures_N = torch.linspace(0.5, 2.0, len(targets_N), dtype=torch.float64)

    scaled_NV = torch.cat(reference_logits(hf_model, rows)) / temperatures_N[:, None]
    whole_N = torch.distributions.Categorical(logits=scaled_NV)
    want, want_entropy = whole_N.log_prob(targets_N), whole_N.entropy()
    hf_model.zero_grad(set_to_none=True)
    want.exp().sum().backward()
    want_gradients = {name: p.grad.clone() for name, p in hf_model.named_parameters()}

    hf_model.zero_grad(set_to_none=True)
    got, entropy = target_logprobs(model, model.hidden(packed), targets_N, temperatures_N, chunk)
    got.exp().sum().backward()
    # transformers rounds norms to float32, so that the model as a whole agrees to that
    torch.testing.assert_close(got, want, atol=2e-5, rtol=0)
    torch.testing.assert_close(entropy, want_entropy, atol=2e-5, rtol=0)
    assert not entropy.requires_grad
    assert_same_gradients({n: p.grad for n, p in hf_model.named_parameters()}, want_gradients, 1e-4)
    with torch.no_grad():
        again, _ = target_logprobs(model, model.hidden(packed), targets_N, temperatures_N, chunk)
    torch.testing.assert_close(again, got, atol=1e-12, rtol=0)


# ---- one set of weights -------------------------------------------------------------------------------------------


def assert_decodes_what_it_trains(model: CausalModel) -> list[Tensor]:
    rows = tiny.random_rows(*LENGTHS)
    with torch.no_grad():
        logits = packed_logits(model, rows)
    assert_close(decoded_logits(model, rows, [0, 0, 9, 3]), [logits[0], logits[1], logits[2][9:], logits[3][3:]], 2e-5)
    return logits


def train_a_little(hf_model: Any, model: CausalModel, optimizer: torch.optim.Optimizer) -> None:
    gradients(hf_model, packed_logits(model, tiny.random_rows(*LENGTHS)))
    optimizer.step()


def new_optimizer(hf_model: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in hf_model.parameters() if p.requires_grad], lr=0.02, **options)


@pytest.mark.parametrize("kind", ["llama_biases", "llama_ungrouped_tied", "qwen2", "lora", "gpt2", "gemma2"])
def test_an_optimizer_step_changes_what_decoding_sees(kind: str) -> None:
    hf_model = tiny.add_lora(tiny.tiny_model("llama"), *ALL_LINEAR) if kind == "lora" else tiny.tiny_model(kind)
    model = build_causal_model(hf_model)
    before = assert_decodes_what_it_trains(model)
    for options in ({"fused": True}, {"foreach": True}, {"foreach": False}):
        train_a_little(hf_model, model, new_optimizer(hf_model, **options))
        after = assert_decodes_what_it_trains(model)
        assert (after[0] - before[0]).abs().max() > 0.01
        before = after


def test_layers_become_views_of_one_buffer_and_keep_their_values() -> None:
    layers = [torch.nn.Linear(4, size) for size in (3, 5, 2)]
    values = [layer.weight.detach().clone() for layer in layers]
    fused = FusedLinear(layers)
    assert fused.weight.shape == (10, 4)
    assert {layer.weight.untyped_storage().data_ptr() for layer in layers} == {
        fused.weight.untyped_storage().data_ptr()
    }
    assert all(torch.equal(layer.weight, value) for layer, value in zip(layers, values, strict=True))
    x = torch.randn(6, 4)
    for one, two in zip(fused.fused(x), fused.apart(x), strict=True):
        torch.testing.assert_close(one, two)


def test_building_twice_keeps_both_on_the_same_weights() -> None:
    hf_model = tiny.tiny_model("llama_biases")
    first = build_causal_model(hf_model)
    where = [p.data_ptr() for p in hf_model.parameters()]
    second = build_causal_model(hf_model)
    assert [p.data_ptr() for p in hf_model.parameters()] == where
    train_a_little(hf_model, first, new_optimizer(hf_model))
    assert_close(assert_decodes_what_it_trains(first), assert_decodes_what_it_trains(second), 0.0)
    adapted = tiny.add_lora(hf_model, *ALL_LINEAR)
    third = build_causal_model(adapted)
    train_a_little(adapted, third, new_optimizer(adapted))
    assert_decodes_what_it_trains(third)
    tiny.randomise(hf_model, seed=5)
    assert_decodes_what_it_trains(first)


@pytest.mark.parametrize("kind", ["llama_ungrouped_tied", "lora", "gemma2"])
def test_a_loaded_state_is_seen_by_decoding(kind: str, tmp_path: Path) -> None:
    hf_model = tiny.add_lora(tiny.tiny_model("llama"), *ALL_LINEAR) if kind == "lora" else tiny.tiny_model(kind)
    model, optimizer = build_causal_model(hf_model), new_optimizer(hf_model)
    train_a_little(hf_model, model, optimizer)
    saved = assert_decodes_what_it_trains(model)
    save_state(tmp_path, hf_model, optimizer)
    train_a_little(hf_model, model, optimizer)
    moved = assert_decodes_what_it_trains(model)
    load_state(tmp_path, hf_model, optimizer)
    assert_close(assert_decodes_what_it_trains(model), saved, 0.0)
    train_a_little(hf_model, model, optimizer)  # the optimizer's state came back, too
    assert_close(assert_decodes_what_it_trains(model), moved, 1e-6)


def test_a_state_dict_is_loaded_into_the_shared_buffers() -> None:
    hf_model, other = tiny.tiny_model("qwen2"), tiny.tiny_model("qwen2", seed=1)
    model = build_causal_model(hf_model)
    hf_model.load_state_dict(other.state_dict())
    with torch.no_grad():
        want = packed_logits(build_causal_model(other), tiny.random_rows(*LENGTHS))
    assert_close(assert_decodes_what_it_trains(model), want, 0.0)


def test_bfloat16_is_safe_where_the_machine_reports_units_that_it_does_not_have() -> None:
    # in a process of its own: where it is not safe, it ends
    code = (
        "import torch; from headrace.models.bfloat16 import make_bfloat16_safe; make_bfloat16_safe(); "
        "a = torch.ones(64, 64, dtype=torch.bfloat16); print(torch.nn.functional.linear(a, a)[0, 0].item())"
    )
    environment = {key: value for key, value in os.environ.items() if key != "ONEDNN_MAX_CPU_ISA"}
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "64.0")


def test_parameters_are_where_products_do_not_depend_on_their_place(tmp_path: Path) -> None:
    model = load_model(ModelSection(name=str(tiny.saved_model("gpt2", tmp_path))))
    assert all(parameter.data_ptr() % 64 == 0 for parameter in model.parameters())
