"""Parts of a decoder layer whose backward passes are written out, for training all weights.

Autograd keeps every intermediate, makes a tensor for each weight's gradient and adds it to the last one in another
pass over memory. These keep what is dear to compute, compute again what is cheap, and add to `.grad` within the matrix
product; the parameters are no inputs of theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from headrace.models.elementwise import norm_backward, normed, probabilities, swiglu, swiglu_backward, turn_
from headrace.models.linear import FusedLinear
from headrace.models.native import attention as native_attention
from headrace.models.native import kernels_for
from headrace.models.packed import PackedRows, Stem

Angles = tuple[Tensor, Tensor]


def embed(embedding: Any, ids_N: Tensor) -> Tensor:
    """Rows of the embedding."""
    return _Embed.apply(embedding.weight, ids_N, embedding.padding_idx)  # type: ignore[no-any-return]


def normed_linear(x_ND: Tensor, norm: Any, linear: FusedLinear) -> Tensor:
    """All outputs of the linear layers on the normed input."""
    return _NormedLinear.apply(x_ND, norm, linear)  # type: ignore[no-any-return]


def linear_added(x_ND: Tensor, y_NE: Tensor, linear: FusedLinear) -> Tensor:
    """x + linear(y)."""
    return _LinearAdded.apply(x_ND, y_NE, linear)  # type: ignore[no-any-return]


def feed_forward(x_ND: Tensor, norm: Any, gate_up: FusedLinear, down: FusedLinear) -> Tensor:
    """x + down(silu(gate) * up) of the normed input."""
    return _FeedForward.apply(x_ND, norm, gate_up, down)  # type: ignore[no-any-return]


def chosen_logprobs(
    hidden_MD: Tensor, head: FusedLinear, targets_M: Tensor, temperatures_M: Tensor
) -> tuple[Tensor, Tensor]:
    """(log-probability of each target, entropy of each distribution, which has no gradient)."""
    return _ChosenLogprobs.apply(hidden_MD, head, targets_M, temperatures_M)  # type: ignore[no-any-return]


def tree_attention(qkv_NHd: Tensor, angles: Angles, rows: PackedRows, kv_heads: int) -> Tensor:
    """What each token sees of its own piece and of those that it hangs on.

    Queries, keys and values are stacked along the heads; queries and keys are turned by their angles first, in place.
    """
    return _TreeAttention.apply(qkv_NHd, angles, rows, kv_heads)  # type: ignore[no-any-return]


class _Embed(Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids_N: Tensor, padding: int | None) -> Tensor:
        ctx.weight, ctx.ids, ctx.padding = weight, ids_N, padding
        return F.embedding(ids_N, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[None, None, None]:  # type: ignore[override]
        weight = ctx.weight
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
        if ctx.padding is not None:  # an embedding that is not trained
            grad_ND = grad_ND.masked_fill((ctx.ids == ctx.padding)[:, None], 0.0)
        weight.grad.index_add_(0, ctx.ids, grad_ND)
        return None, None, None


class _NormedLinear(Function):
    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, norm: Any, linear: FusedLinear) -> Tensor:
        y_ND, inverse = normed(x_ND, norm)
        ctx.save_for_backward(x_ND, inverse)
        ctx.norm, ctx.linear = norm, linear
        return linear.product(y_ND)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NO: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        x_ND, inverse = ctx.saved_tensors
        ctx.linear.accumulate(grad_NO, normed(x_ND, ctx.norm)[0])
        return norm_backward(grad_NO @ ctx.linear.weight, x_ND, inverse, ctx.norm), None, None


class _LinearAdded(Function):
    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, y_NE: Tensor, linear: FusedLinear) -> Tensor:
        ctx.save_for_backward(y_NE)
        ctx.linear = linear
        return linear.product(y_NE).add_(x_ND)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        (y_NE,) = ctx.saved_tensors
        ctx.linear.accumulate(grad_ND, y_NE)
        return grad_ND, grad_ND @ ctx.linear.weight, None


class _FeedForward(Function):
    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, norm: Any, gate_up: FusedLinear, down: FusedLinear) -> Tensor:
        y_ND, inverse = normed(x_ND, norm)
        wide_N2W = gate_up.product(y_ND)
        ctx.save_for_backward(x_ND, inverse, wide_N2W)
        ctx.norm, ctx.gate_up, ctx.down = norm, gate_up, down
        return down.product(swiglu(wide_N2W)).add_(x_ND)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        x_ND, inverse, wide_N2W = ctx.saved_tensors
        grad_wide, opened_NW = swiglu_backward(grad_ND @ ctx.down.weight, wide_N2W)
        ctx.down.accumulate(grad_ND, opened_NW)
        ctx.gate_up.accumulate(grad_wide, normed(x_ND, ctx.norm)[0])
        back_ND = norm_backward(grad_wide @ ctx.gate_up.weight, x_ND, inverse, ctx.norm, grad_ND)
        return back_ND, None, None, None


class _TreeAttention(Function):
    @staticmethod
    def forward(ctx: Any, qkv_NHd: Tensor, angles: Angles, rows: PackedRows, kv_heads: int) -> Tensor:
        turn_(qkv_NHd, angles, qkv_NHd.shape[1] - kv_heads)
        out_NHd, sum_NH = _tree_forward(qkv_NHd, rows, kv_heads)
        ctx.save_for_backward(qkv_NHd, out_NHd, sum_NH)
        ctx.angles, ctx.rows, ctx.kv_heads = angles, rows, kv_heads
        return out_NHd

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NHd: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        qkv_NHd, out_NHd, sum_NH = ctx.saved_tensors
        back_NHd = _tree_backward(grad_NHd, qkv_NHd, out_NHd, sum_NH, ctx.rows, ctx.kv_heads)
        return turn_(back_NHd, ctx.angles, back_NHd.shape[1] - ctx.kv_heads, -1), None, None, None


def attention_with_past(
    qkv_NHd: Tensor, rows: PackedRows, kv_heads: int, past: Sequence[tuple[slice, Tensor, Tensor]]
) -> Tensor:
    """`tree_attention` without gradient, where tokens also see keys and values [heads, length, dim] from before."""
    out_NHd, sum_NH = _tree_forward(qkv_NHd, rows, kv_heads)
    for tokens, keys, values in past:
        q = qkv_NHd[tokens, : -2 * kv_heads].transpose(0, 1)[None]
        _weigh_in(out_NHd, sum_NH, tokens, *_flash(q, keys[None], values[None], 0.0, False))
    return out_NHd


def _tree_forward(qkv_NHd: Tensor, rows: PackedRows, kv_heads: int) -> tuple[Tensor, Tensor]:
    """(what each token sees, the logarithm of what its exponentials sum to)."""
    if kernels := kernels_for(qkv_NHd):
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


def _tree_backward(
    grad_NHd: Tensor, qkv_NHd: Tensor, out_NHd: Tensor, sum_NH: Tensor, rows: PackedRows, kv_heads: int
) -> Tensor:
    """The gradient of queries, keys and values. All that a part needs of the others is the sum of exponentials."""
    if kernels := kernels_for(qkv_NHd):
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
    out_NHd[tokens].lerp_(more_1HQd[0].transpose(0, 1), (more_QH - total_QH).exp_()[..., None])
    sum_NH[tokens] = total_QH


_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def _heads_first(qkv_RLHd: Tensor, kv_heads: int) -> list[Tensor]:
    heads = qkv_RLHd.shape[2] - 2 * kv_heads
    return [x.transpose(1, 2) for x in qkv_RLHd.split((heads, kv_heads, kv_heads), dim=2)]


def _stem_inputs(qkv_NHd: Tensor, stem: Stem, kv_heads: int) -> list[Tensor]:
    below, piece = (_heads_first(qkv_NHd[part][None], kv_heads) for part in (stem.below, stem.piece))
    return [below[0], piece[1], piece[2]]


class _ChosenLogprobs(Function):
    """Keeps the probabilities, from which logits' gradients are a product away."""

    @staticmethod
    def forward(
        ctx: Any, hidden_MD: Tensor, head: FusedLinear, targets_M: Tensor, temperatures_M: Tensor
    ) -> tuple[Tensor, Tensor]:
        probs_MV, chosen_M, entropy_M = probabilities(head.product(hidden_MD), targets_M, temperatures_M)
        ctx.save_for_backward(hidden_MD, probs_MV, targets_M, temperatures_M)
        ctx.head = head
        ctx.mark_non_differentiable(entropy_M)
        return chosen_M, entropy_M

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_M: Tensor, _: Any) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        hidden_MD, probs_MV, targets_M, temperatures_M = ctx.saved_tensors
        grad_M = grad_M / temperatures_M
        grad_MV = probs_MV.mul_(-grad_M[:, None])  # what is kept for one backward pass is used up by it
        grad_MV.scatter_add_(1, targets_M[:, None], grad_M[:, None])
        ctx.head.accumulate(grad_MV, hidden_MD)
        return grad_MV @ ctx.head.weight, None, None, None
