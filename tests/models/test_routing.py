"""Routing replay: tokens go to the experts that are named, weighed by the model's own router."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tiny
from headrace.data.routing import RoutedExperts
from headrace.errors import ConfigError, DataError
from headrace.models.causal import build_causal_model
from headrace.models.fallback import TransformersModel
from headrace.models.packed import PackedRows
from headrace.models.routing import RoutingReplay

FAMILIES = ["qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3"]
_FOUR: dict[str, Any] = {"num_local_experts": 4}
_DEEPSEEK: dict[str, Any] = {
    **tiny.FAMILIES["llama"][1], "num_key_value_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "moe_intermediate_size": 16, "q_lora_rank": 8,
    "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
}  # fmt: skip


@pytest.fixture(autouse=True)
def deepseek(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers, one of them without experts; groups of experts."""
    monkeypatch.setitem(tiny.FAMILIES, "deepseek_v3", ("deepseek_v3", _DEEPSEEK))


def new_model(family: str) -> Any:
    return tiny.tiny_model(family, **(_FOUR if family == "mixtral" else {}))


def random_routing(replay: RoutingReplay, rows: list[list[int]], seed: int = 0) -> list[RoutedExperts]:
    rng = np.random.default_rng(seed)
    draw = [
        [[rng.permutation(replay.experts)[: replay.top_k] for _ in range(replay.layers)] for _ in row] for row in rows
    ]
    return [RoutedExperts.of(np.array(one)) for one in draw]


def logits(model: TransformersModel, rows: list[list[int]], routed: Any = None) -> list[Tensor]:
    packed = PackedRows.from_rows(rows)
    if routed is not None:
        replay = model._forward.routing
        assert replay is not None
        packed = packed.routed_to(torch.from_numpy(replay.packed(routed, packed.lengths)))
    return list(model.logits(model.hidden(packed)).split(packed.lengths))


def own_routing(model: TransformersModel, hf_model: Any, rows: list[list[int]]) -> list[RoutedExperts]:
    """What the model's own routers choose for each row alone."""
    found: list[RoutedExperts] = []
    routers = [m for m in hf_model.modules() if type(m).__name__.lower().endswith("topkrouter")]
    for row in rows:
        chosen: list[Tensor] = []
        note = lambda _, __, out, to=chosen: to.append(out[2])  # noqa: E731
        hooks = [router.register_forward_hook(note) for router in routers]
        logits(model, [row])
        for hook in hooks:
            hook.remove()
        replay = model._forward.routing
        assert replay is not None
        dense = [torch.zeros_like(chosen[0])] * (replay.layers - len(chosen))
        found.append(RoutedExperts.of(torch.stack([*dense, *chosen], 1).numpy()))
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_the_models_own_choice_replayed_changes_nothing_and_another_one_does(family: str) -> None:
    hf_model, rows = new_model(family), tiny.random_rows(9, 5, 12)
    model = TransformersModel(hf_model)
    model.replay_routing()
    usual = logits(model, rows)
    replay = model._forward.routing
    assert replay is not None and not model.shares_prefixes
    for ours, theirs in zip(logits(model, rows, own_routing(model, hf_model, rows)), usual, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    other = logits(model, rows, random_routing(replay, rows))
    assert all((ours - theirs).abs().max() > 1e-2 for ours, theirs in zip(other, usual, strict=True))
    for ours, theirs in zip(logits(model, rows), usual, strict=True):  # nothing of it stays
        assert torch.equal(ours, theirs)


def by_hand(hf_model: Any, row: list[int], experts: np.ndarray) -> Tensor:
    """Qwen3-MoE with given experts [T, L, K], its routers replaced by a few lines of our own."""
    for layer, decoder in enumerate(hf_model.model.layers):
        gate, chosen = decoder.mlp.gate, torch.from_numpy(experts[:, layer].astype(np.int64))

        def forward(states: Tensor, gate: Any = gate, chosen: Tensor = chosen) -> tuple[Tensor, Tensor, Tensor]:
            scores = F.linear(states, gate.weight)
            weights = scores.softmax(-1, dtype=torch.float32).gather(1, chosen)
            return scores, weights / (weights.sum(-1, keepdim=True) if gate.norm_topk_prob else 1.0), chosen

        gate.forward = forward
    return hf_model(input_ids=torch.tensor([row]), use_cache=False).logits[0]


def test_named_experts_are_weighed_by_the_models_own_router_which_gets_their_gradient() -> None:
    rows = tiny.random_rows(9, 5, 12)
    hf_model = tiny.tiny_model("qwen3_moe")
    model = TransformersModel(hf_model)
    routed = random_routing(model.replay_routing(), rows)
    ours = logits(model, rows, routed)
    sum(one.square().mean() for one in ours).backward()  # type: ignore[union-attr]
    other = tiny.tiny_model("qwen3_moe")
    theirs = [by_hand(other, row, one.array().reshape(len(row), 2, 2)) for row, one in zip(rows, routed, strict=True)]
    sum(one.square().mean() for one in theirs).backward()  # type: ignore[union-attr]
    for one, two in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)
    for (name, one), two in zip(hf_model.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad, rtol=1e-3, atol=1e-6, msg=name)
        if name.endswith("gate.weight"):
            assert one.grad.abs().max() > 1e-5


def test_recomputed_activations_are_routed_as_before() -> None:
    rows, found = tiny.random_rows(9, 5), []
    for checkpoints in (False, True):
        hf_model = tiny.tiny_model("qwen3_moe").train()
        model = TransformersModel(hf_model)
        routed = random_routing(model.replay_routing(), rows)
        if checkpoints:
            hf_model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        sum(one.square().mean() for one in logits(model, rows, routed)).backward()  # type: ignore[union-attr]
        found.append([p.grad for p in hf_model.parameters()])
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))


def test_rows_without_experts_choose_by_themselves_beside_others() -> None:
    rows = tiny.random_rows(9, 5)
    model = TransformersModel(tiny.tiny_model("qwen3_moe"))
    routed = random_routing(model.replay_routing(), rows)
    mixed, named, usual = logits(model, rows, [None, routed[1]]), logits(model, rows, routed), logits(model, rows)
    torch.testing.assert_close(mixed[0], usual[0])
    torch.testing.assert_close(mixed[1], named[1])
    assert (mixed[1] - usual[1]).abs().max() > 1e-2


def test_padded_rows_are_routed_like_packed_ones() -> None:
    rows = tiny.random_rows(9, 5)
    packed, padded = (TransformersModel(tiny.tiny_model("qwen3_moe"), kind) for kind in ("auto", "padded"))
    routed = random_routing(packed.replay_routing(), rows)
    padded.replay_routing()
    for one, two in zip(logits(packed, rows, routed), logits(padded, rows, routed), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_model_without_experts_is_refused(family: str) -> None:
    with pytest.raises(ConfigError, match="needs a mixture-of-experts model"):
        build_causal_model(tiny.tiny_model(family)).replay_routing()


def test_a_router_that_chooses_in_another_way_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    hf_model = tiny.tiny_model("qwen3_moe")
    gate = hf_model.model.layers[0].mlp.gate
    usual = gate.forward
    monkeypatch.setattr(gate, "forward", lambda states: (*usual(states)[:2], usual(states)[0].argsort(-1)[:, -2:]))
    with pytest.raises(ConfigError, match="cannot replay the choices of Qwen3MoeTopKRouter"):
        TransformersModel(hf_model).replay_routing()


@pytest.mark.parametrize("experts", [np.zeros((4, 3, 2), np.uint8), np.full((4, 2, 2), 7)])
def test_experts_of_another_model_are_refused(experts: np.ndarray) -> None:
    model = TransformersModel(tiny.tiny_model("qwen3_moe"))
    model.replay_routing()
    with pytest.raises(DataError, match="2 layers with 2 of 4 each: is it another model"):
        logits(model, [[5, 6, 7, 8]], [RoutedExperts.of(experts)])
