"""The small operations between matrix products, without autograd: native kernels where they serve, else torch's."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.models.kernels.cpu import kernels_for
from headrace.models.linear import add_gradient


def normed(x_ND: Tensor, norm: Any) -> tuple[Tensor, Tensor]:
    """(RMS norm of the rows, what each was multiplied with)."""
    if kernels := kernels_for(x_ND):
        return kernels.rms_norm(x_ND, norm.weight, norm.variance_epsilon)
    square_N1 = torch.linalg.vector_norm(x_ND, dim=-1, keepdim=True).square_()
    inverse_N1 = square_N1.div_(x_ND.shape[-1]).add_(norm.variance_epsilon).rsqrt_()
    return (x_ND * inverse_N1).mul_(norm.weight), inverse_N1


def norm_backward(grad_ND: Tensor, x_ND: Tensor, inverse_N: Tensor, norm: Any, more_ND: Tensor | None = None) -> Tensor:
    """The gradient of x, and `more_ND`; that of the norm's weight is added where it belongs. Overwrites `grad_ND`."""
    if kernels := kernels_for(x_ND):
        back_ND, grad_D = kernels.rms_norm_backward(grad_ND, x_ND, inverse_N, norm.weight, more_ND)
        add_gradient(norm.weight, grad_D)
        return back_ND
    unit_ND = x_ND * inverse_N
    along_ND = grad_ND * unit_ND
    add_gradient(norm.weight, along_ND.sum(0))
    along_N1 = (along_ND @ norm.weight).div_(x_ND.shape[-1])[:, None]
    back_ND = grad_ND.mul_(norm.weight).addcmul_(unit_ND, along_N1, value=-1).mul_(inverse_N)
    return back_ND if more_ND is None else back_ND.add_(more_ND)


def swiglu(wide_N2W: Tensor) -> Tensor:
    """silu(first half) * second half."""
    if kernels := kernels_for(wide_N2W):
        return kernels.swiglu(wide_N2W)
    gate, up = wide_N2W.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def swiglu_backward(grad_NW: Tensor, wide_N2W: Tensor) -> tuple[Tensor, Tensor]:
    """(the gradient of both halves, `swiglu` once more). Overwrites `grad_NW`."""
    if kernels := kernels_for(wide_N2W):
        return kernels.swiglu_backward(grad_NW, wide_N2W)
    gate, up = wide_N2W.chunk(2, dim=-1)
    opened = F.silu(gate)
    grad_wide = torch.empty_like(wide_N2W)
    grad_gate, grad_up = grad_wide.chunk(2, dim=-1)
    torch.mul(grad_NW, opened, out=grad_up)
    torch.ops.aten.silu_backward.grad_input(grad_NW.mul_(up), gate, grad_input=grad_gate)
    return grad_wide, opened.mul_(up)


def turn_(x_NHd: Tensor, angles: tuple[Tensor, Tensor], heads: int, direction: int = 1) -> Tensor:
    """Rotary positions, in place: the halves of the first heads turned by their angles; back with direction -1."""
    if kernels := kernels_for(x_NHd):
        cos_Nd, sin_Nd = (x.squeeze(1) for x in angles)
        kernels.rope_(x_NHd.flatten(1), cos_Nd, sin_Nd, heads, direction)
        return x_NHd
    cos_N1d, sin_N1d = angles
    half = x_NHd.shape[-1] // 2
    first, second = x_NHd[:, :heads].clone().split(half, dim=-1)
    x_NHd[:, :heads] *= cos_N1d
    x_NHd[:, :heads, :half].addcmul_(second, sin_N1d[..., :half], value=-direction)
    x_NHd[:, :heads, half:].addcmul_(first, sin_N1d[..., half:], value=direction)
    return x_NHd


def probabilities(logits_MV: Tensor, targets_M: Tensor, temperatures_M: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(probabilities, the targets' log-probabilities, entropies). Overwrites `logits_MV`."""
    if kernels := kernels_for(logits_MV):
        return logits_MV, *kernels.chosen_logprobs_(logits_MV, targets_M, temperatures_M)
    if bool((temperatures_M != 1).any()):
        logits_MV.div_(temperatures_M[:, None])
    logprobs_MV = torch.log_softmax(logits_MV, dim=-1)
    chosen_M = logprobs_MV.gather(1, targets_M[:, None]).squeeze(1)
    probs_MV = torch.exp(logprobs_MV, out=logits_MV)
    return probs_MV, chosen_M, -torch.linalg.vecdot(probs_MV, logprobs_MV)
