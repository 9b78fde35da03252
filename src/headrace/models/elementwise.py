"""The small operations between matrix products, without autograd."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.models.linear import add_gradient


def normed(x_ND: Tensor, norm: Any) -> tuple[Tensor, Tensor]:
    """(RMS norm of the rows, what each was multiplied with)."""
    square_N1 = torch.linalg.vector_norm(x_ND, dim=-1, keepdim=True).square_()
    inverse_N1 = square_N1.div_(x_ND.shape[-1]).add_(norm.variance_epsilon).rsqrt_()
    return (x_ND * inverse_N1).mul_(norm.weight), inverse_N1


def norm_backward(grad_ND: Tensor, x_ND: Tensor, inverse_N1: Tensor, norm: Any) -> Tensor:
    """The gradient of x; that of the norm's weight is added where it belongs. Overwrites `grad_ND`."""
    unit_ND = x_ND * inverse_N1
    along_ND = grad_ND * unit_ND
    add_gradient(norm.weight, along_ND.sum(0))
    along_N1 = (along_ND @ norm.weight).div_(x_ND.shape[-1])[:, None]
    return grad_ND.mul_(norm.weight).addcmul_(unit_ND, along_N1, value=-1).mul_(inverse_N1)


def swiglu(wide_N2W: Tensor) -> Tensor:
    """silu(first half) * second half."""
    gate, up = wide_N2W.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def swiglu_backward(grad_NW: Tensor, wide_N2W: Tensor) -> tuple[Tensor, Tensor]:
    """(the gradient of both halves, `swiglu` once more). Overwrites `grad_NW`."""
    gate, up = wide_N2W.chunk(2, dim=-1)
    opened = F.silu(gate)
    grad_wide = torch.empty_like(wide_N2W)
    grad_gate, grad_up = grad_wide.chunk(2, dim=-1)
    torch.mul(grad_NW, opened, out=grad_up)
    torch.ops.aten.silu_backward.grad_input(grad_NW.mul_(up), gate, grad_input=grad_gate)
    return grad_wide, opened.mul_(up)


def turned(x_NHd: Tensor, cos_N1d: Tensor, sin_N1d: Tensor, direction: int = 1) -> Tensor:
    """Rotary positions: the halves of each head turned by their angles; back with direction -1."""
    half = x_NHd.shape[-1] // 2
    result = x_NHd * cos_N1d
    first, second = x_NHd.split(half, dim=-1)
    result[..., :half].addcmul_(second, sin_N1d[..., :half], value=-direction)
    result[..., half:].addcmul_(first, sin_N1d[..., half:], value=direction)
    return result


def probabilities(logits_MV: Tensor, targets_M: Tensor, temperatures_M: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(probabilities, the targets' log-probabilities, entropies). Overwrites `logits_MV`."""
    if bool((temperatures_M != 1).any()):
        logits_MV.div_(temperatures_M[:, None])
    logprobs_MV = torch.log_softmax(logits_MV, dim=-1)
    chosen_M = logprobs_MV.gather(1, targets_M[:, None]).squeeze(1)
    probs_MV = torch.exp(logprobs_MV, out=logits_MV)
    return probs_MV, chosen_M, -torch.linalg.vecdot(probs_MV, logprobs_MV)
