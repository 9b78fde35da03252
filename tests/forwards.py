"""Ways through a model that must agree: transformers row by row, packed rows, and one decoding step per token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import tiny
from headrace.models.causal import CausalModel
from headrace.models.packed import PackedRows


def reference_logits(hf_model: Any, rows: list[list[int]]) -> list[Tensor]:
    """Row by row through transformers: nothing is packed or padded."""
    return [hf_model(input_ids=torch.tensor([row]), use_cache=False).logits[0] for row in rows]


def packed_logits(model: CausalModel, rows: list[list[int]]) -> list[Tensor]:
    return list(model.logits(model.hidden(PackedRows.from_rows(rows))).split([len(row) for row in rows]))


@torch.no_grad()
def decoded_logits(model: CausalModel, rows: list[list[int]], prefilled: list[int]) -> list[Tensor]:
    """The logits after each token from `prefilled` on, with one decoding step per token; slots stand empty at 0."""
    cache = model.new_cache()
    cache.ensure(len(rows), max(len(row) for row in rows))
    begun = [i for i, length in enumerate(prefilled) if length]
    if begun:
        model.prefill(cache, PackedRows.from_rows([rows[i][: prefilled[i]] for i in begun]), begun)
    lengths, found = list(prefilled), [[] for _ in rows]
    while any(length < len(row) for length, row in zip(lengths, rows, strict=True)):
        # a row that has ended is fed on, as nothing else may notice
        ids = [row[length % len(row)] for length, row in zip(lengths, rows, strict=True)]
        cache.ensure(len(rows), max(lengths) + 1)
        logits_BV = model.decode_logits(model.decode(cache, torch.tensor(ids), lengths))
        for slot, row in enumerate(rows):
            if lengths[slot] < len(row):
                found[slot].append(logits_BV[slot])
            lengths[slot] += 1
    return [torch.stack(parts) for parts in found]


def assert_close(got: list[Tensor], want: list[Tensor], tolerance: float) -> None:
    for one, two in zip(got, want, strict=True):
        torch.testing.assert_close(one, two, atol=tolerance, rtol=0)


def gradients(hf_model: Any, logits: list[Tensor]) -> dict[str, Tensor]:
    """Of an arbitrary smooth function of all logits, with respect to everything that is trained."""
    hf_model.zero_grad(set_to_none=True)
    weights_V = torch.linspace(-1, 1, tiny.VOCABULARY) ** 3
    sum((part.log_softmax(-1) * weights_V).sum(-1).square().mean() for part in logits).backward()  # type: ignore[union-attr]
    trained = {name: p for name, p in hf_model.named_parameters() if p.requires_grad}
    missing = [name for name, p in trained.items() if p.grad is None]
    assert not missing, f"no gradient for {missing}"
    return {name: p.grad.clone() for name, p in trained.items() if p.grad is not None}


def assert_same_gradients(got: dict[str, Tensor], want: dict[str, Tensor], tolerance: float) -> None:
    assert got.keys() == want.keys()
    for name, gradient in want.items():
        scale = float(gradient.abs().max()) + 1e-3
        torch.testing.assert_close(got[name] / scale, gradient / scale, atol=tolerance, rtol=0, msg=name)
