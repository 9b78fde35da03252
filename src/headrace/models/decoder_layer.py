"""A decoder's layers with their backward passes written out, for training all weights.

Autograd keeps every intermediate, makes a tensor for each weight's gradient and adds it to the last one in another
pass over memory. These keep what is dear to compute, compute again what is cheap, and add to `.grad` within the matrix
product; the parameters are no inputs of theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from headrace.models.elementwise import norm_backward, normed, probabilities, swiglu, swiglu_backward, turn_
from headrace.models.kernels.cpu import narrow
from headrace.models.kernels.cpu.narrow import narrow_head_kernels, narrow_kernels
from headrace.models.linear import FusedLinear, add_gradient
from headrace.models.packed import PackedRows
from headrace.models.tree_attention import Angles, tree_backward, tree_forward

Attend = Callable[[Tensor, PackedRows, int], tuple[Tensor, Tensor]]


def embed(embedding: Any, ids_N: Tensor) -> Tensor:
    """Rows of the embedding."""
    return _Embed.apply(embedding.weight, ids_N, embedding.padding_idx)  # type: ignore[no-any-return]


def layer(
    x_ND: Tensor, parts: Any, angles: Angles, rows: PackedRows, kv_heads: int, attend: Attend = tree_forward
) -> Tensor:
    """All of one decoder layer; `parts` has its linear layers and norms. With another `attend` there is no gradient."""
    return _Layer.apply(x_ND, parts, angles, rows, kv_heads, attend)  # type: ignore[no-any-return]


def last_norm(x_ND: Tensor, norm: Any) -> Tensor:
    """The norm after all layers."""
    return _Norm.apply(x_ND, norm)  # type: ignore[no-any-return]


def chosen_logprobs(
    hidden_MD: Tensor, head: FusedLinear, targets_M: Tensor, temperatures_M: Tensor
) -> tuple[Tensor, Tensor]:
    """(log-probability of each target, entropy of each distribution, which has no gradient)."""
    return _ChosenLogprobs.apply(hidden_MD, head, targets_M, temperatures_M)  # type: ignore[no-any-return]


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


class _Layer(Function):
    @staticmethod
    def forward(
        ctx: Any, x_ND: Tensor, parts: Any, angles: Angles, rows: PackedRows, kv_heads: int, attend: Attend
    ) -> Tensor:
        qkv_ND, inverse_1 = _normed_linear(x_ND, parts.norm_1, parts.qkv)
        qkv_NHd = qkv_ND.unflatten(-1, (-1, angles[0].shape[-1]))
        plain_NHd = None
        if parts.q_norm is not None:
            plain_NHd, qkv_NHd = qkv_NHd, _norm_heads(qkv_NHd, parts, kv_heads)
        turn_(qkv_NHd, angles, qkv_NHd.shape[1] - kv_heads)
        mixed_NHd, sum_NH = attend(qkv_NHd, rows, kv_heads)
        y_ND = _linear_added(x_ND, mixed_NHd.flatten(1), parts.out)
        out_ND, inverse_2, wide_N2W = _feed_forward(y_ND, parts)
        ctx.save_for_backward(x_ND, inverse_1, plain_NHd, qkv_NHd, mixed_NHd, sum_NH, y_ND, inverse_2, wide_N2W)
        ctx.parts, ctx.angles, ctx.rows, ctx.kv_heads = parts, angles, rows, kv_heads
        return out_ND

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor, None, None, None, None, None]:  # type: ignore[override]
        x_ND, inverse_1, plain_NHd, qkv_NHd, mixed_NHd, sum_NH, y_ND, inverse_2, wide_N2W = ctx.saved_tensors
        parts, kv_heads = ctx.parts, ctx.kv_heads
        grad_ND = _feed_forward_backward(grad_ND.contiguous(), y_ND, inverse_2, wide_N2W, parts)
        grad_mixed = _linear_added_backward(grad_ND, mixed_NHd.flatten(1), parts.out).view_as(mixed_NHd)
        grad_NHd = tree_backward(grad_mixed, qkv_NHd, mixed_NHd, sum_NH, ctx.rows, kv_heads)
        turn_(grad_NHd, ctx.angles, grad_NHd.shape[1] - kv_heads, -1)
        if plain_NHd is not None:
            _norm_heads_backward(grad_NHd, plain_NHd, parts, kv_heads)
        back_ND = _normed_linear_backward(grad_NHd.flatten(1), x_ND, inverse_1, parts.norm_1, parts.qkv, grad_ND)
        return back_ND, None, None, None, None, None


class _Norm(Function):
    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, norm: Any) -> Tensor:
        y_ND, inverse = normed(x_ND, norm)
        ctx.save_for_backward(x_ND, inverse)
        ctx.norm = norm
        return y_ND

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        x_ND, inverse = ctx.saved_tensors
        return norm_backward(grad_ND.contiguous(), x_ND, inverse, ctx.norm), None


def _normed_linear(x_ND: Tensor, norm: Any, linear: FusedLinear) -> tuple[Tensor, Tensor]:
    """(the linear layer on the normed x, what the norm multiplied each row with)."""
    if kernels := narrow_kernels(x_ND, linear):
        return narrow.normed_linear(kernels, x_ND, norm, linear.weight)
    y_ND, inverse = normed(x_ND, norm)
    return linear.product(y_ND), inverse


def _normed_linear_backward(
    grad_NO: Tensor, x_ND: Tensor, inverse: Tensor, norm: Any, linear: FusedLinear, more_ND: Tensor
) -> Tensor:
    """The gradient of x, and `more_ND`."""
    if kernels := narrow_kernels(x_ND, linear):
        given = (grad_NO, x_ND, inverse, norm, linear.weight, more_ND)
        back_ND, grad_D, grad_OD = narrow.normed_linear_backward(kernels, *given)
        add_gradient(norm.weight, grad_D)
        linear.add_weight_gradient(grad_OD)
        return back_ND
    linear.accumulate(grad_NO, normed(x_ND, norm)[0])
    return norm_backward(grad_NO @ linear.weight, x_ND, inverse, norm, more_ND)


def _linear_added(x_ND: Tensor, y_NE: Tensor, linear: FusedLinear) -> Tensor:
    if kernels := narrow_kernels(x_ND, linear):
        return narrow.linear_added(kernels, x_ND, y_NE, linear.weight)
    return linear.product(y_NE).add_(x_ND)


def _linear_added_backward(grad_ND: Tensor, y_NE: Tensor, linear: FusedLinear) -> Tensor:
    """The gradient of y; that of x is `grad_ND` itself."""
    if kernels := narrow_kernels(grad_ND, linear):
        back_NE, grad_DE = narrow.linear_added_backward(kernels, grad_ND, y_NE, linear.weight)
        linear.add_weight_gradient(grad_DE)
        return back_NE
    linear.accumulate(grad_ND, y_NE)
    return grad_ND @ linear.weight


def _feed_forward(x_ND: Tensor, parts: Any) -> tuple[Tensor, Tensor, Tensor]:
    """(x + down(silu(gate) * up) of the normed x, what the norm multiplied each row with, gate and up)."""
    norm, gate_up, down = parts.norm_2, parts.gate_up, parts.down
    if kernels := narrow_kernels(x_ND, gate_up, down):
        return narrow.feed_forward(kernels, x_ND, norm, gate_up.weight, down.weight)
    y_ND, inverse = normed(x_ND, norm)
    wide_N2W = gate_up.product(y_ND)
    return down.product(swiglu(wide_N2W)).add_(x_ND), inverse, wide_N2W


def _feed_forward_backward(grad_ND: Tensor, x_ND: Tensor, inverse: Tensor, wide_N2W: Tensor, parts: Any) -> Tensor:
    norm, gate_up, down = parts.norm_2, parts.gate_up, parts.down
    if kernels := narrow_kernels(x_ND, gate_up, down):
        given = (grad_ND, x_ND, inverse, wide_N2W, norm, gate_up.weight, down.weight)
        back_ND, grad_D, grad_WD, grad_DI = narrow.feed_forward_backward(kernels, *given)
        add_gradient(norm.weight, grad_D)
        gate_up.add_weight_gradient(grad_WD)
        down.add_weight_gradient(grad_DI)
        return back_ND
    grad_wide, opened_NW = swiglu_backward(grad_ND @ down.weight, wide_N2W)
    down.accumulate(grad_ND, opened_NW)
    gate_up.accumulate(grad_wide, normed(x_ND, norm)[0])
    return norm_backward(grad_wide @ gate_up.weight, x_ND, inverse, norm, grad_ND)


def _norm_heads(qkv_NHd: Tensor, parts: Any, kv_heads: int) -> Tensor:
    """Queries and keys with their heads normed, values as they are."""
    out_NHd = qkv_NHd.clone()
    for norm, part, to in _normed_heads(parts, kv_heads, qkv_NHd, out_NHd):
        to.copy_(normed(part.flatten(0, 1), norm)[0].view_as(part))
    return out_NHd


def _norm_heads_backward(grad_NHd: Tensor, qkv_NHd: Tensor, parts: Any, kv_heads: int) -> None:
    """In place."""
    for norm, part, grad in _normed_heads(parts, kv_heads, qkv_NHd, grad_NHd):
        flat = part.flatten(0, 1)
        back = norm_backward(grad.flatten(0, 1), flat, normed(flat, norm)[1], norm)
        grad.copy_(back.view_as(grad))


def _normed_heads(parts: Any, kv_heads: int, *tensors_NHd: Tensor) -> Iterator[tuple[Any, Tensor, Tensor]]:
    heads = tensors_NHd[0].shape[1] - 2 * kv_heads
    for norm, where in ((parts.q_norm, slice(0, heads)), (parts.k_norm, slice(heads, heads + kv_heads))):
        one, other = (tensor[:, where] for tensor in tensors_NHd)
        yield norm, one, other


class _ChosenLogprobs(Function):
    """Keeps the probabilities, from which logits' gradients are a product away."""

    @staticmethod
    def forward(
        ctx: Any, hidden_MD: Tensor, head: FusedLinear, targets_M: Tensor, temperatures_M: Tensor
    ) -> tuple[Tensor, Tensor]:
        if kernels := narrow_head_kernels(hidden_MD, head):
            given = (hidden_MD, head.weight, targets_M, temperatures_M)
            chosen_M, entropy_M, probs_MV = narrow.chosen_logprobs(kernels, *given)
        else:
            probs_MV, chosen_M, entropy_M = probabilities(head.product(hidden_MD), targets_M, temperatures_M)
        ctx.save_for_backward(hidden_MD, probs_MV, targets_M, temperatures_M)
        ctx.head = head
        ctx.mark_non_differentiable(entropy_M)
        return chosen_M, entropy_M

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_M: Tensor, _: Any) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        hidden_MD, probs_MV, targets_M, temperatures_M = ctx.saved_tensors
        head, grad_M = ctx.head, grad_M / temperatures_M
        if kernels := narrow_head_kernels(hidden_MD, head):
            given = (grad_M, hidden_MD, probs_MV, targets_M, head.weight)
            back_MD, grad_VD = narrow.chosen_logprobs_backward(kernels, *given)
            head.add_weight_gradient(grad_VD)
            return back_MD, None, None, None
        grad_MV = probs_MV.mul_(-grad_M[:, None])  # what is kept for one backward pass is used up by it
        grad_MV.scatter_add_(1, targets_M[:, None], grad_M[:, None])
        head.accumulate(grad_MV, hidden_MD)
        return grad_MV @ head.weight, None, None, None
