"""Parts of a narrow model's layers as native calls: those whose weights stay in a core's cache.

The layout of their arguments follows narrow.c. Forward functions give what their backward ones are given again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from headrace.models.kernels.cpu import LEAST_OUTPUTS, Kernels, kernels_for

_MOST_WEIGHTS = 192 * 1024  # of a part: weights and their gradients share a second-level cache of 2 MB
_WIDE = 16


def narrow_kernels(x_ND: Tensor, *linears: Any) -> Kernels | None:
    """The kernels, if these linear layers are a narrow part of a model."""
    aligned = all(size % _WIDE == 0 for linear in linears for size in linear.weight.shape)
    return _kernels(x_ND, linears) if aligned else None


def narrow_head_kernels(x_ND: Tensor, head: Any) -> Kernels | None:
    """The kernels, if this is a narrow model's output layer, which may have any number of outputs."""
    outputs, inputs = head.weight.shape
    return _kernels(x_ND, [head]) if outputs >= LEAST_OUTPUTS and inputs % _WIDE == 0 else None


def _kernels(x_ND: Tensor, linears: Sequence[Any]) -> Kernels | None:
    small = sum(linear.weight.numel() for linear in linears) <= _MOST_WEIGHTS
    plain = all(linear.bias is None for linear in linears)
    return kernels_for(x_ND) if small and plain and x_ND.shape[0] >= LEAST_OUTPUTS else None


def normed_linear(kernels: Kernels, x_ND: Tensor, norm: Any, weight_OD: Tensor) -> tuple[Tensor, Tensor]:
    """(linear(norm(x)), what the norm multiplied each row with)."""
    out_NO, inverse_N = x_ND.new_empty(x_ND.shape[0], weight_OD.shape[0]), x_ND.new_empty(x_ND.shape[0])
    scratch = _scratch(kernels, weight_OD)
    kernels.library.narrow_normed_linear(
        *_rows(x_ND), norm.weight.data_ptr(), norm.variance_epsilon, weight_OD.data_ptr(), *weight_OD.shape, len(x_ND),
        out_NO.data_ptr(), inverse_N.data_ptr(), scratch.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return out_NO, inverse_N


def normed_linear_backward(
    kernels: Kernels, grad_NO: Tensor, x_ND: Tensor, inverse_N: Tensor, norm: Any, weight_OD: Tensor, more_ND: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x (and `more_ND`), of the norm's weight and of the weight."""
    back_ND, grad_D, grad_OD = (torch.empty_like(x) for x in (x_ND, norm.weight.data, weight_OD))
    scratch = _scratch(kernels, weight_OD)
    kernels.library.narrow_normed_linear_backward(
        *_rows(grad_NO, more_ND, x_ND, inverse_N), norm.weight.data_ptr(), weight_OD.data_ptr(), *weight_OD.shape,
        len(x_ND),
        *_rows(back_ND, grad_D, grad_OD), scratch.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return back_ND, grad_D, grad_OD


def linear_added(kernels: Kernels, x_ND: Tensor, y_NE: Tensor, weight_DE: Tensor) -> Tensor:
    """x + linear(y)."""
    out_ND = torch.empty_like(x_ND)
    scratch = _scratch(kernels, weight_DE)
    kernels.library.narrow_linear_added(
        *_rows(x_ND, y_NE), weight_DE.data_ptr(), *weight_DE.shape, len(x_ND), out_ND.data_ptr(),
        scratch.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return out_ND


def linear_added_backward(kernels: Kernels, grad_ND: Tensor, y_NE: Tensor, weight_DE: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of y and of the weight."""
    back_NE, grad_DE = torch.empty_like(y_NE), torch.empty_like(weight_DE)
    scratch = _scratch(kernels, weight_DE)
    kernels.library.narrow_linear_added_backward(
        *_rows(grad_ND, y_NE), weight_DE.data_ptr(), *weight_DE.shape, len(y_NE), *_rows(back_NE, grad_DE),
        scratch.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return back_NE, grad_DE


def feed_forward(
    kernels: Kernels, x_ND: Tensor, norm: Any, gate_up_WD: Tensor, down_DI: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(x + down(silu(gate) * up) of the normed x, what the norm multiplied each row with, gate and up)."""
    tokens, (width, inner) = len(x_ND), down_DI.shape
    out_ND, inverse_N = torch.empty_like(x_ND), x_ND.new_empty(tokens)
    opened_NW = x_ND.new_empty(tokens, 2 * inner)
    scratch = _scratch(kernels, gate_up_WD, down_DI)
    kernels.library.narrow_feed_forward(
        *_rows(x_ND), norm.weight.data_ptr(), norm.variance_epsilon, gate_up_WD.data_ptr(), down_DI.data_ptr(),
        width, inner, tokens, *_rows(out_ND, inverse_N, opened_NW), scratch.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return out_ND, inverse_N, opened_NW


def feed_forward_backward(
    kernels: Kernels,
    grad_ND: Tensor,
    x_ND: Tensor,
    inverse_N: Tensor,
    opened_NW: Tensor,
    norm: Any,
    gate_up_WD: Tensor,
    down_DI: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of x, of the norm's weight and of both weights."""
    back_ND, grad_D = torch.empty_like(x_ND), torch.empty_like(norm.weight.data)
    grad_WD, grad_DI = torch.empty_like(gate_up_WD), torch.empty_like(down_DI)
    scratch = _scratch(kernels, gate_up_WD, down_DI)
    kernels.library.narrow_feed_forward_backward(
        *_rows(grad_ND, x_ND, inverse_N, opened_NW), norm.weight.data_ptr(), gate_up_WD.data_ptr(), down_DI.data_ptr(),
        *down_DI.shape, len(x_ND), *_rows(back_ND, grad_D, grad_WD, grad_DI), scratch.data_ptr(),
        torch.get_num_threads(),
    )  # fmt: skip
    return back_ND, grad_D, grad_WD, grad_DI


def chosen_logprobs(
    kernels: Kernels, x_MD: Tensor, weight_VD: Tensor, targets_M: Tensor, temperatures_M: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(log-probabilities of the targets, entropies, probabilities with some room after each row)."""
    tokens, (outputs, inputs) = len(x_MD), weight_VD.shape
    probs_MV = x_MD.new_empty(tokens, kernels.library.narrow_probs_row(outputs))
    logprobs_M, entropies_M = x_MD.new_empty(tokens), x_MD.new_empty(tokens)
    scratch = _scratch(kernels, weight_VD)
    kernels.library.narrow_chosen_logprobs(
        *_rows(x_MD, weight_VD), outputs, inputs, tokens, _ids(targets_M, tokens), *_rows(temperatures_M, probs_MV),
        *_rows(logprobs_M, entropies_M), scratch.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return logprobs_M, entropies_M, probs_MV


def chosen_logprobs_backward(
    kernels: Kernels, grad_M: Tensor, x_MD: Tensor, probs_MV: Tensor, targets_M: Tensor, weight_VD: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of x and of the weight; `grad_M` is that of the log-probabilities, over the temperatures."""
    back_MD, grad_VD = torch.empty_like(x_MD), torch.empty_like(weight_VD)
    scratch = _scratch(kernels, weight_VD)
    kernels.library.narrow_chosen_logprobs_backward(
        *_rows(grad_M, x_MD, probs_MV), _ids(targets_M, len(x_MD)), *_rows(weight_VD), *weight_VD.shape, len(x_MD),
        *_rows(back_MD, grad_VD), scratch.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return back_MD, grad_VD


def _ids(ids_M: Tensor, count: int) -> int:
    assert ids_M.is_contiguous() and ids_M.dtype == torch.int64 and len(ids_M) == count
    return ids_M.data_ptr()


def _rows(*tensors: Tensor) -> list[int]:
    assert all(tensor.is_contiguous() and tensor.dtype == torch.float32 for tensor in tensors)
    return [tensor.data_ptr() for tensor in tensors]


def _scratch(kernels: Kernels, *weights: Tensor) -> Tensor:
    features = sum(sum(weight.shape) for weight in weights)
    floats = sum(weight.numel() for weight in weights)
    return torch.empty(kernels.library.narrow_scratch(floats, features, torch.get_num_threads()))
