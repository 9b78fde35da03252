"""Packed rows through transformers' own forward: what each row gives alone, whichever kernel attends."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tiny
from headrace.errors import ConfigError
from headrace.models import row_attention
from headrace.models.causal import build_causal_model
from headrace.models.fallback import TransformersModel
from headrace.models.llama import LlamaModel
from headrace.models.packed import PackedRows

PACKED = ["llama", "qwen2", "qwen3", "mistral", "mistral_window", "gpt2", "gpt_neox", "phi", "phi3", "gemma2", "gemma3",
          "granite", "mixtral", "qwen3_moe", "gpt_oss"]  # fmt: skip
PADDED = ["openai_gpt", "mamba"]


def rows() -> list[list[int]]:
    """Of different lengths; three share a prefix, longer than any window."""
    found = tiny.random_rows(30, 34, 5, 1, 22, 40)
    found[1][:25] = found[5][:19] + found[5][19:25]
    found[4][:20] = found[5][:20]
    return found


def logits(model: Any, given: list[list[int]]) -> list[Tensor]:
    packed = PackedRows.from_rows(given, model.shares_prefixes)
    return list(model.logits(model.hidden(packed)[packed.where_T]).split(packed.lengths))


def alone(hf_model: Any, given: list[list[int]]) -> list[Tensor]:
    return [hf_model(input_ids=torch.tensor([row]), use_cache=False).logits[0] for row in given]


def gradients(hf_model: Any, found: list[Tensor]) -> dict[str, Tensor]:
    hf_model.zero_grad(set_to_none=True)
    sum(part.square().mean() for part in found).backward()  # type: ignore[union-attr]
    return {name: p.grad.clone() for name, p in hf_model.named_parameters() if p.grad is not None}


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor], tolerance: float) -> None:
    assert ours.keys() == theirs.keys()
    largest = max(float(gradient.abs().max()) for gradient in theirs.values())
    assert largest > 0
    for name in ours:
        assert float((ours[name] - theirs[name]).abs().max()) <= tolerance * largest, name


@pytest.mark.parametrize("family", [*PACKED, *PADDED])
def test_packed_rows_give_what_each_gives_alone(family: str) -> None:
    hf_model, given = tiny.tiny_model(family), rows()
    model = TransformersModel(hf_model)
    assert model.attention == ("padded" if family in PADDED else "sdpa")
    assert model.shares_prefixes is (family not in PADDED)
    want, got = alone(hf_model, given), logits(model, given)
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
    assert_same(gradients(hf_model, got), gradients(hf_model, want), 1e-4)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "llama3_rope"])
def test_gradients_are_those_of_the_fast_path(family: str) -> None:
    fast, other = tiny.tiny_model(family), tiny.tiny_model(family)
    model = build_causal_model(fast)
    assert isinstance(model, LlamaModel)
    ours = gradients(fast, logits(model, rows()))
    assert_same(gradients(other, logits(TransformersModel(other), rows())), ours, 1e-5)


def varlen_reference(
    q: Tensor, k: Tensor, v: Tensor, ends_R: Tensor, longest: int, scaling: float | None, back: int,
    softcap: float | None,
) -> Tensor:  # fmt: skip
    """A kernel for rows end to end, as a GPU has one: row by row."""
    parts = []
    bounds = ends_R.tolist()
    assert ends_R.dtype == torch.int32 and longest == max(b - a for a, b in pairwise(bounds))
    for first, last in pairwise(bounds):
        seen = torch.ones(last - first, last - first, dtype=torch.bool).tril()
        seen = seen if back < 0 else seen.triu(-back)
        own_q, own_k, own_v = (x[first:last].transpose(0, 1)[None] for x in (q, k, v))
        mixed = F.scaled_dot_product_attention(own_q, own_k, own_v, attn_mask=seen, scale=scaling, enable_gqa=True)
        parts.append(mixed[0].transpose(0, 1))
    return torch.cat(parts)


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral_window", "gemma3"])
def test_a_kernel_for_rows_of_any_length_gives_the_same(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(row_attention.VARLEN, "varlen", varlen_reference)
    one, two = tiny.tiny_model(family), tiny.tiny_model(family)
    by_bins, end_to_end = TransformersModel(one, "sdpa"), TransformersModel(two, "varlen")
    assert end_to_end.attention == "varlen"
    ours, theirs = logits(by_bins, rows()), logits(end_to_end, rows())
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=3e-5, rtol=0)
    assert_same(gradients(two, theirs), gradients(one, ours), 1e-4)


def test_a_kernel_that_is_wrong_is_found_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def mixing(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
        """As if all rows were one."""
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)

    monkeypatch.setitem(row_attention.VARLEN, "varlen", mixing)
    with pytest.raises(ConfigError, match=r'"varlen" does not serve this model here \(varlen: its results differ by'):
        TransformersModel(tiny.tiny_model("llama"), "varlen")


@pytest.mark.parametrize("kernel", ["varlen", "flash_attn"])
def test_a_kernel_that_this_machine_does_not_have_is_refused(kernel: str) -> None:
    with pytest.raises(ConfigError, match=rf'model.attention = "{kernel}" does not serve.*set it to "auto"'):
        TransformersModel(tiny.tiny_model("llama"), kernel)


def test_caps_and_sinks_are_left_to_the_model_s_own_attention() -> None:
    with pytest.raises(ConfigError, match="a cap, sinks or other things of its own"):
        TransformersModel(tiny.tiny_model("gpt_oss"), "varlen")


def test_the_model_still_does_what_transformers_does_with_a_padded_batch() -> None:
    plain, packed = tiny.tiny_model("mistral_window"), tiny.tiny_model("mistral_window")
    TransformersModel(packed)
    ids = torch.tensor([tiny.random_rows(20)[0], [*tiny.random_rows(12, seed=1)[0], *[0] * 8]])
    mask = torch.tensor([[1] * 20, [1] * 12 + [0] * 8])
    want, got = (model(input_ids=ids, attention_mask=mask, use_cache=False).logits for model in (plain, packed))
    torch.testing.assert_close(got, want, atol=1e-5, rtol=0)


def test_checkpointing_some_layers_gives_the_same_gradients() -> None:
    from headrace.backends.local.learner import Learner
    from headrace.config.loading import build_config

    def learner(**backend: Any) -> Learner:
        return Learner(build_config({"model": {"device": "cpu", "fast_path": False}, "backend": backend}))

    torch.set_num_threads(1)
    plain, some = learner(), learner(gradient_checkpointing=True, checkpoint_every=3)
    layers = some.hf_model.model.layers
    assert [layer.gradient_checkpointing for layer in layers] == [True, False, False, True]
    given = [[3, 4, 5, 6, 7] * 4, [9, 8, 7]]
    ours, theirs = (gradients(one.hf_model, logits(one.model, given)) for one in (some, plain))
    assert_same(ours, theirs, 1e-6)
