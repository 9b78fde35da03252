"""Attention over a tree of pieces as native calls; the layout of their arguments follows attention.c."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from headrace.models.kernels.cpu import Kernels, kernels_for
from headrace.models.packed import Tree

_WIDE = 16


def attention_kernels(qkv_NHd: Tensor) -> Kernels | None:
    """The kernels, if there are any for heads of this size."""
    return kernels_for(qkv_NHd) if qkv_NHd.shape[-1] % _WIDE == 0 else None


class _Inputs(ctypes.Structure):
    _fields_ = (
        ("qkv", ctypes.c_void_p), ("stride", ctypes.c_int64), ("heads", ctypes.c_int64), ("kv_heads", ctypes.c_int64),
        ("dim", ctypes.c_int64),
    )  # fmt: skip

    @classmethod
    def of(cls, qkv_NHd: Tensor, kv_heads: int) -> _Inputs:
        _, stacked, dim = qkv_NHd.shape
        assert qkv_NHd.is_contiguous() and qkv_NHd.dtype == torch.float32 and dim % _WIDE == 0
        return cls(qkv_NHd.data_ptr(), stacked * dim, stacked - 2 * kv_heads, kv_heads, dim)


class _Tree(ctypes.Structure):
    _fields_ = (
        ("pieces", ctypes.c_int64), ("starts", ctypes.c_void_p), ("lengths", ctypes.c_void_p),
        ("ends", ctypes.c_void_p), ("first_above", ctypes.c_void_p), ("above", ctypes.c_void_p),
    )  # fmt: skip

    @classmethod
    def of(cls, tree: Tree) -> _Tree:
        arrays = (tree.starts, tree.lengths, tree.ends, tree.first_above, tree.above)
        return cls(len(tree.starts), *(array.ctypes.data for array in arrays))


def forward(kernels: Kernels, qkv_NHd: Tensor, tree: Tree, kv_heads: int) -> tuple[Tensor, Tensor]:
    """(what each token sees [N, heads, dim], the logarithm of what its exponentials sum to [N, heads])."""
    inputs = _Inputs.of(qkv_NHd, kv_heads)
    tokens, heads, dim = qkv_NHd.shape[0], inputs.heads, inputs.dim
    out_NHd, sum_NH = qkv_NHd.new_empty(tokens, heads, dim), qkv_NHd.new_empty(tokens, heads)
    _done(
        kernels.library.tree_attention(
            ctypes.byref(inputs), ctypes.byref(_Tree.of(tree)), tree.longest, out_NHd.data_ptr(), sum_NH.data_ptr(),
            torch.get_num_threads(),
        )
    )  # fmt: skip
    return out_NHd, sum_NH


def backward(
    kernels: Kernels, grad_NHd: Tensor, qkv_NHd: Tensor, out_NHd: Tensor, sum_NH: Tensor, tree: Tree, kv_heads: int
) -> Tensor:
    """The gradient of `qkv_NHd`."""
    inputs = _Inputs.of(qkv_NHd, kv_heads)
    grad_NHd = grad_NHd.contiguous()
    assert out_NHd.is_contiguous() and sum_NH.is_contiguous() and grad_NHd.shape == out_NHd.shape
    back_NHd = torch.empty_like(qkv_NHd)
    _done(
        kernels.library.tree_attention_backward(
            ctypes.byref(inputs), ctypes.byref(_Tree.of(tree)), grad_NHd.data_ptr(), out_NHd.data_ptr(),
            sum_NH.data_ptr(), back_NHd.data_ptr(), torch.get_num_threads(),
        )
    )  # fmt: skip
    return back_NHd


def _done(failed: int) -> None:
    if failed:
        raise MemoryError("no memory for the scores of one attention block")
