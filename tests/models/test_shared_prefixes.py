"""Rows that begin alike run that part once: hidden states, log-probabilities and all gradients stay what they were."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import tiny
from contracts.backend_contract import IMITATE, random_samples
from headrace.algorithms.batching import pack
from headrace.backends.local.backend import LocalBackend
from headrace.config import AlgorithmSection, ModelSection
from headrace.config.loading import build_config
from headrace.data.sample import Sample
from headrace.models.causal import build_causal_model
from headrace.models.llama import LlamaModel
from headrace.models.load import load_model
from headrace.models.logprobs import target_logprobs
from headrace.models.packed import PackedRows

FAMILIES = ["llama", "llama_ungrouped_tied", "llama_biases", "qwen2", "qwen3"]
ALL_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SHARED = [False, True]
EXACT = 1e-10
Found = tuple[Tensor, dict[str, Tensor]]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def family_rows() -> list[list[int]]:
    """A group, a conversation whose turns go on, the same row twice, a row apart, and padding ids in the middle."""
    one, two, three, four = tiny.random_rows(40, 30, 21, 25)
    turn = [*one, *two]
    group = [[*one, *tail] for tail in tiny.random_rows(3, 9, 1, seed=4)]
    return [*group, one, turn, [*turn, *three], [*turn, 0, 0, 7], four, four, [*one[:10], 5, 6]]


def model_of(family: str, seed: int = 0) -> tuple[Any, LlamaModel]:
    if family == "bundled":
        hf_model = load_model(ModelSection(name="bundled", dtype="float64"))
    else:
        hf_model = tiny.tiny_model(family, torch.float64, seed)
    return hf_model, llama(hf_model)


def llama(hf_model: Any) -> LlamaModel:
    model = build_causal_model(hf_model)
    assert isinstance(model, LlamaModel)
    return model


def trained(hf_model: Any) -> dict[str, Tensor]:
    """Copies of all gradients."""
    return {name: p.grad.clone() for name, p in hf_model.named_parameters() if p.grad is not None}


def backward(model: LlamaModel, rows: list[list[int]], share: bool, chunk: int = 10**6) -> tuple[Tensor, Tensor]:
    """Hidden states and log-probabilities of every token of every row, with their gradients added."""
    packed = PackedRows.from_rows(rows, share)
    assert (len(packed.ids_N) < sum(packed.lengths)) == share
    hidden_TD = model.hidden(packed).index_select(0, packed.where_T)
    count = hidden_TD.shape[0]
    targets_T = torch.tensor([token for row in rows for token in (*row[1:], 3)])
    temperatures_T = torch.linspace(0.7, 1.3, count, dtype=torch.float64)
    logprobs_T, _ = target_logprobs(model, hidden_TD, targets_T, temperatures_T, chunk)
    weights_T = torch.linspace(-1, 1, count, dtype=torch.float64) ** 3
    (logprobs_T * weights_T).sum().backward()
    return hidden_TD.detach(), logprobs_T.detach()


def run(hf_model: Any, model: LlamaModel, rows: list[list[int]], share: bool, chunk: int = 10**6) -> Found:
    hf_model.zero_grad(set_to_none=True)
    hidden_TD, logprobs_T = backward(model, rows, share, chunk)
    return torch.cat((hidden_TD, logprobs_T[:, None]), dim=1), trained(hf_model)


def assert_same(got: Found, want: Found) -> None:
    torch.testing.assert_close(got[0], want[0], atol=EXACT, rtol=0)
    assert all(gradient.any() for gradient in want[1].values()), "there is a gradient with nothing to compare"
    assert_same_gradients(got[1], want[1])


def assert_same_gradients(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys() and want
    for name, gradient in want.items():
        scale = max(float(gradient.abs().max()), 1.0)
        torch.testing.assert_close(got[name], gradient, atol=EXACT * scale, rtol=0, msg=name)


# ---- one function, however it is run ------------------------------------------------------------------------------


@pytest.mark.parametrize("family", [*FAMILIES, "bundled"])
def test_sharing_and_written_out_backward_passes_change_no_gradient(family: str) -> None:
    hf_model, model = model_of(family)
    rows = family_rows()
    assert model._plain
    want = run(hf_model, model, rows, share=False)
    assert len(want[1]) == sum(1 for _ in hf_model.parameters())
    assert_same(run(hf_model, model, rows, share=True), want)
    model._plain = False
    assert_same(run(hf_model, model, rows, share=False), want)
    assert_same(run(hf_model, model, rows, share=True), want)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_each_row_alone_gives_the_same(family: str) -> None:
    hf_model, model = model_of(family)
    rows = family_rows()
    model._plain = False  # autograd's gradients
    packed = PackedRows.from_rows(rows, share=True)
    with torch.no_grad():
        alone = torch.cat([model.hidden(PackedRows.from_rows([row])) for row in rows])
        torch.testing.assert_close(model.hidden(packed)[packed.where_T], alone, atol=EXACT, rtol=0)
    hf_model.zero_grad(set_to_none=True)
    sum(model.hidden(PackedRows.from_rows([row])).pow(3).sum() for row in rows).backward()  # type: ignore[union-attr]
    want = trained(hf_model)
    model._plain = True
    hf_model.zero_grad(set_to_none=True)
    hidden = model.hidden(packed)[packed.where_T]
    hidden.pow(3).sum().backward()
    got = trained(hf_model)
    assert_same((hidden.detach(), got), (alone, want))


def test_padding_has_no_share_even_where_attention_is_beyond_doubt() -> None:
    """Scores that differ by more than an exponential can hold: what stands in the padding must not be weighed."""
    hf_model, model = model_of("llama")
    with torch.no_grad():
        for layer in hf_model.model.layers:
            layer.self_attn.q_proj.weight.mul_(1000)
    rows = tiny.random_rows(30, 29, 25, 22, 20)
    alone = [run(hf_model, model, [row], share=False)[0] for row in rows]
    packed = run(hf_model, model, rows, share=False)
    torch.testing.assert_close(packed[0][:, :-1], torch.cat(alone)[:, :-1], atol=1e-8, rtol=0)
    assert all(gradient.isfinite().all() for gradient in packed[1].values())


@pytest.mark.parametrize("targets", [ALL_LINEAR, ("k_proj", "down_proj")], ids=["all", "some"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_adapters_get_the_same_gradients(family: str, targets: tuple[str, ...]) -> None:
    hf_model = tiny.add_lora(tiny.tiny_model(family, torch.float64), *targets).double()
    model = llama(hf_model)
    want = run(hf_model, model, family_rows(), share=False)
    assert want[1] and all("lora_" in name for name in want[1])
    assert_same(run(hf_model, model, family_rows(), share=True), want)


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_checkpointing_and_chunks_of_logits_change_nothing(family: str, plain: bool) -> None:
    hf_model, model = model_of(family)
    model._plain = plain
    want = run(hf_model, model, family_rows(), share=False)
    model.gradient_checkpointing = True
    for share in SHARED:
        assert_same(run(hf_model, model, family_rows(), share, chunk=50), want)


def test_scoring_without_gradients_leaves_none_and_gives_the_same() -> None:
    hf_model, model = model_of("qwen3")
    (want, _), rows = run(hf_model, model, family_rows(), share=False), family_rows()
    hf_model.zero_grad(set_to_none=True)
    for model._plain in (True, False):
        for share in SHARED:
            packed = PackedRows.from_rows(rows, share)
            with torch.no_grad():
                hidden_TD = model.hidden(packed)[packed.where_T]
            torch.testing.assert_close(hidden_TD, want[:, :-1], atol=EXACT, rtol=0)
    assert not trained(hf_model)


def test_sampling_prefills_what_is_shared_into_every_slot() -> None:
    _, model = model_of("qwen3")
    rows, caches = family_rows(), []
    for share in SHARED:
        cache = model.new_cache()
        cache.ensure(len(rows), max(map(len, rows)))
        model.prefill(cache, PackedRows.from_rows(rows, share), list(range(len(rows))))
        caches.append([*cache.keys, *cache.values])
    for one, two in zip(*caches, strict=True):
        assert float(one.abs().max()) > 0.1
        torch.testing.assert_close(one, two, atol=EXACT, rtol=0)


# ---- where gradients go -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama_biases", "qwen2", "qwen3"])
@pytest.mark.parametrize("share", SHARED)
def test_several_backward_passes_add_up(family: str, share: bool) -> None:
    hf_model, model = model_of(family)
    rows, others = family_rows(), family_rows()[:4]
    parts = [run(hf_model, model, some, share)[1] for some in (rows, others, rows)]
    want = {name: sum(part[name] for part in parts) for name in parts[0]}
    hf_model.zero_grad(set_to_none=True)
    states = [backward(model, some, share)[0] for some in (rows, others, rows)]
    assert_same((states[0], trained(hf_model)), (states[2], want))  # type: ignore[arg-type]
    hf_model.zero_grad(set_to_none=False)  # gradients that stay and are overwritten with zeros
    for some in (rows, others, rows):
        backward(model, some, share)
    assert_same((states[0], trained(hf_model)), (states[0], want))  # type: ignore[arg-type]


def test_gradients_are_added_to_those_that_autograd_left() -> None:
    """What another loss has put there stands in tensors of its own, not in views of one buffer."""
    hf_model, model = model_of("llama_biases")
    want = run(hf_model, model, family_rows(), share=True)
    for parameter in hf_model.parameters():
        parameter.grad = torch.ones_like(parameter)
    hidden, _ = backward(model, family_rows(), share=True)
    got = {name: gradient - 1 for name, gradient in trained(hf_model).items()}
    assert_same((hidden, got), (want[0][:, :-1], want[1]))


@contextmanager
def frozen(hf_model: Any, *parts: str) -> Iterator[list[str]]:
    chosen = {name: p for name, p in hf_model.named_parameters() if any(part in name for part in parts)}
    for parameter in chosen.values():
        parameter.requires_grad_(False)
    yield list(chosen)
    for parameter in chosen.values():
        parameter.requires_grad_(True)


@pytest.mark.parametrize("parts", [("embed_tokens",), ("layers.0.",), ("k_proj", "norm"), ("lm_head",)], ids="-".join)
def test_what_is_frozen_gets_no_gradient_and_the_rest_the_same(parts: tuple[str, ...]) -> None:
    hf_model, model = model_of("qwen3")
    states, want = run(hf_model, model, family_rows(), share=False)
    with frozen(hf_model, *parts) as names:
        assert names
        kept = {name: gradient for name, gradient in want.items() if name not in names}
        for share in SHARED:
            assert_same(run(hf_model, model, family_rows(), share), (states, kept))
    assert_same(run(hf_model, model, family_rows(), share=True), (states, want))


@pytest.mark.parametrize("share", SHARED)
def test_the_embedding_of_padding_is_not_trained(share: bool) -> None:
    hf_model, model = model_of("llama")
    assert hf_model.model.embed_tokens.padding_idx == 0
    for model._plain in (True, False):
        embedding = run(hf_model, model, family_rows(), share)[1]["model.embed_tokens.weight"]
        assert not embedding[0].any() and embedding[7].any()


# ---- the backend --------------------------------------------------------------------------------------------------


def grown_samples(valued: bool) -> list[Sample]:
    """Two groups with a prompt each that is not trained, and advantages of both signs."""
    found = []
    for group, prompt in enumerate(random_samples(2, 90)):
        start = (prompt.tokens * 20)[:40]
        for tail in random_samples(3, 90, seed=1 + group):
            size = 40 + len(tail.loss_mask)
            row = Sample(
                tokens=start + tail.tokens,
                loss_mask=(0,) * 40 + tail.loss_mask,
                logprobs=(0.0,) * 40 + tail.logprobs,
                versions=(0,) * size,
                advantages=(0.0,) * 40 + tail.advantages,
                returns=tuple(0.1 * i for i in range(size)) if valued else None,
                group_id=group,
            )
            found.append(row)
    return found


VALUED = AlgorithmSection(estimator="gae", value_head=True, loss="reinforce")


async def of_backend(share: bool, **changes: Any) -> tuple[Any, ...]:
    config = {
        "algorithm": {"estimator": "gae", "value_head": True},
        "backend": {"share_prefixes": share, "logits_chunk": 64},
        **changes,
    }
    backend = LocalBackend(build_config(config))
    torch.nn.init.ones_(backend.learner.value_head.weight)  # type: ignore[union-attr]
    batch = pack(grown_samples(True), VALUED, 4096)
    assert backend.learner.model.shares_prefixes is share
    logprobs = await backend.compute_logprobs(batch)
    values = await backend.compute_values(batch)
    await backend.forward_backward(batch, VALUED)
    gradients = trained(backend.learner.hf_model), trained(backend.learner.value_head)
    await backend.close()
    return logprobs, values, *gradients


@pytest.mark.parametrize("rank", [0, 4])
async def test_a_backend_that_shares_scores_values_and_trains_as_one_that_does_not(rank: int) -> None:
    changes: dict[str, Any] = {"model": {"dtype": "float64", "lora": {"rank": rank}}}
    one, two = await of_backend(True, **changes), await of_backend(False, **changes)
    for got, want in zip(one[:2], two[:2], strict=True):
        for row, other in zip(got, want, strict=True):
            assert any(other) and row == pytest.approx(other, abs=EXACT)
    for got, want in zip(one[2:], two[2:], strict=True):
        assert_same_gradients(got, want)


async def test_the_gradient_of_a_group_is_that_of_its_rows_one_by_one() -> None:
    backend = LocalBackend(build_config({"model": {"dtype": "float64"}}))
    found = []
    for tokens in (4096, 1):
        backend.learner.hf_model.zero_grad(set_to_none=True)
        batch = pack(grown_samples(False), IMITATE, tokens)
        assert len(batch.micro_batches) == (1 if tokens > 1 else 6)
        await backend.forward_backward(batch, IMITATE)
        found.append(trained(backend.learner.hf_model))
    await backend.close()
    assert_same_gradients(found[0], found[1])
