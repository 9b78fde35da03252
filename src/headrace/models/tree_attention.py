"""Attention over a tree of packed rows: each token sees its own piece and those that it hangs on.

Queries, keys and values are stacked along the heads. Native kernels where they serve, else torch's by parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from headrace.models.elementwise import turn_
from headrace.models.kernels.cpu import attention as native_attention
from headrace.models.packed import PackedRows, Stem

Angles = tuple[Tensor, Tensor]


def tree_attention(qkv_NHd: Tensor, angles: Angles, rows: PackedRows, kv_heads: int) -> Tensor:
    """What each token sees; queries and keys are turned by their angles first, in place. With gradients."""
    return _TreeAttention.apply(qkv_NHd, angles, rows, kv_heads)  # type: ignore[no-any-return]


class _TreeAttention(Function):
    @staticmethod
    def forward(ctx: Any, qkv_NHd: Tensor, angles: Angles, rows: PackedRows, kv_heads: int) -> Tensor:
        turn_(qkv_NHd, angles, qkv_NHd.shape[1] - kv_heads)
        out_NHd, sum_NH = tree_forward(qkv_NHd, rows, kv_heads)
        ctx.save_for_backward(qkv_NHd, out_NHd, sum_NH)
        ctx.angles, ctx.rows, ctx.kv_heads = angles, rows, kv_heads
        return out_NHd

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NHd: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        qkv_NHd, out_NHd, sum_NH = ctx.saved_tensors
        back_NHd = tree_backward(grad_NHd, qkv_NHd, out_NHd, sum_NH, ctx.rows, ctx.kv_heads)
        return turn_(back_NHd, ctx.angles, back_NHd.shape[1] - ctx.kv_heads, -1), None, None, None


def attention_with_past(
    qkv_NHd: Tensor, rows: PackedRows, kv_heads: int, past: Sequence[tuple[slice, Tensor, Tensor]]
) -> tuple[Tensor, Tensor]:
    """`tree_forward`, where tokens also see keys and values [heads, length, dim] from before."""
    out_NHd, sum_NH = tree_forward(qkv_NHd, rows, kv_heads)
    for tokens, keys, values in past:
        q = qkv_NHd[tokens, : -2 * kv_heads].transpose(0, 1)[None]
        _weigh_in(out_NHd, sum_NH, tokens, *_flash(q, keys[None], values[None], 0.0, False))
    return out_NHd, sum_NH


def tree_forward(qkv_NHd: Tensor, rows: PackedRows, kv_heads: int) -> tuple[Tensor, Tensor]:
    """(what each token sees, the logarithm of what its exponentials sum to)."""
    if kernels := native_attention.attention_kernels(qkv_NHd):
        return native_attention.forward(kernels, qkv_NHd.contiguous(), rows.tree, kv_heads)
    layout, outs, sums = rows.layout, [], []
    for part_RLHd in layout.by_bin(layout.spread(qkv_NHd)):
        out, total = _flash(*_heads_first(part_RLHd, kv_heads), 0.0, True)
        outs.append(out.transpose(1, 2))
        sums.append(total.transpose(1, 2))
    out_NHd, sum_NH = layout.collect(outs).contiguous(), layout.collect(sums)
    for stem in layout.stems:  # by parts, which are weighed by the sums of their exponentials
        seen = _flash(*_stem_inputs(qkv_NHd, stem, kv_heads), 0.0, False)
        _weigh_in(out_NHd, sum_NH, stem.below, *seen)
    return out_NHd, sum_NH


def tree_backward(
    grad_NHd: Tensor, qkv_NHd: Tensor, out_NHd: Tensor, sum_NH: Tensor, rows: PackedRows, kv_heads: int
) -> Tensor:
    """The gradient of queries, keys and values. All that a part needs of the others is the sum of exponentials."""
    if kernels := native_attention.attention_kernels(qkv_NHd):
        return native_attention.backward(kernels, grad_NHd, qkv_NHd, out_NHd, sum_NH, rows.tree, kv_heads)
    layout = rows.layout
    given = [layout.by_bin(layout.spread(x)) for x in (qkv_NHd, grad_NHd, out_NHd)]
    sum_PH = layout.spread(sum_NH)
    if not layout.plain:  # padding has no share in anything
        sum_PH.masked_fill_(~layout.real_P[:, None], torch.inf)
        given[1] = [
            part.mul_(real[..., None, None]) for part, real in zip(given[1], layout.by_bin(layout.real_P), strict=True)
        ]
    parts = []
    for qkv, grad, out, total in zip(*given, layout.by_bin(sum_PH), strict=True):
        q, k, v = _heads_first(qkv, kv_heads)
        back = _flash_backward(grad.transpose(1, 2), q, k, v, out.transpose(1, 2), total.transpose(1, 2), 0.0, True)
        parts.append(torch.cat([x.transpose(1, 2) for x in back], dim=2))
    back_NHd = layout.collect(parts)
    heads = out_NHd.shape[1]
    for stem in layout.stems:
        grad, out = (x[stem.below].transpose(0, 1)[None] for x in (grad_NHd, out_NHd))
        inputs = _stem_inputs(qkv_NHd, stem, kv_heads)
        q, k, v = _flash_backward(grad, *inputs, out, sum_NH[stem.below].t()[None], 0.0, False)
        back_NHd[stem.below, :heads] += q[0].transpose(0, 1)
        back_NHd[stem.piece, heads : heads + kv_heads] += k[0].transpose(0, 1)
        back_NHd[stem.piece, heads + kv_heads :] += v[0].transpose(0, 1)
    return back_NHd


def _weigh_in(out_NHd: Tensor, sum_NH: Tensor, tokens: slice, more_1HQd: Tensor, sum_1HQ: Tensor) -> None:
    """Add what the tokens see elsewhere."""
    more_QH = sum_1HQ[0].t()
    total_QH = torch.logaddexp(sum_NH[tokens], more_QH)
    weights_QH1 = (more_QH - total_QH).exp_()[..., None].to(out_NHd.dtype)
    out_NHd[tokens].lerp_(more_1HQd[0].transpose(0, 1), weights_QH1)
    sum_NH[tokens] = total_QH


_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def _heads_first(qkv_RLHd: Tensor, kv_heads: int) -> list[Tensor]:
    heads = qkv_RLHd.shape[2] - 2 * kv_heads
    return [x.transpose(1, 2) for x in qkv_RLHd.split((heads, kv_heads, kv_heads), dim=2)]


def _stem_inputs(qkv_NHd: Tensor, stem: Stem, kv_heads: int) -> list[Tensor]:
    below, piece = (_heads_first(qkv_NHd[part][None], kv_heads) for part in (stem.below, stem.piece))
    return [below[0], piece[1], piece[2]]
