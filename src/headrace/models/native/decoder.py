"""One decoding step of a Llama-like model as a single native call; the layout of its arguments follows decoder.c."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from headrace.models.llama_cache import LlamaCache
from headrace.models.native import LEAST_OUTPUTS, Kernels

_LANES = 8


class _Linear(ctypes.Structure):
    _fields_ = (
        ("weight", ctypes.c_void_p), ("bias", ctypes.c_void_p), ("outputs", ctypes.c_int64), ("inputs", ctypes.c_int64),
    )  # fmt: skip

    @classmethod
    def of(cls, weight_OI: Tensor, bias_O: Tensor | None) -> _Linear:
        return cls(_address(weight_OI), None if bias_O is None else _address(bias_O), *weight_OI.shape)


class _Layer(ctypes.Structure):
    _fields_ = (
        ("qkv", _Linear), ("out", _Linear), ("gate_up", _Linear), ("down", _Linear), ("norm_1", ctypes.c_void_p),
        ("norm_2", ctypes.c_void_p), ("q_norm", ctypes.c_void_p), ("k_norm", ctypes.c_void_p),
    )  # fmt: skip

    @classmethod
    def of(cls, layer: Any) -> _Layer:
        linears = [_Linear.of(linear.weight, linear.bias) for linear in layer.linears]
        norms = (layer.norm_1, layer.norm_2, layer.q_norm, layer.k_norm)
        return cls(*linears, *(None if norm is None else _address(norm.weight) for norm in norms))


class _Shape(ctypes.Structure):
    _fields_ = (
        ("layers", ctypes.POINTER(_Layer)), ("depth", ctypes.c_int64), ("width", ctypes.c_int64),
        ("heads", ctypes.c_int64), ("kv_heads", ctypes.c_int64), ("dim", ctypes.c_int64),
        ("embedding", ctypes.c_void_p), ("norm", ctypes.c_void_p), ("eps", ctypes.c_float),
    )  # fmt: skip


class Decoder:
    """Reads the weights where they lie: they may change between two steps, but not move."""

    def __init__(
        self, kernels: Kernels, layers: Sequence[Any], heads: int, kv_heads: int, dim: int, embedding: Tensor, norm: Any
    ) -> None:
        self._kernels = kernels
        self._width = embedding.shape[1]
        self._shape = _Shape(
            (_Layer * len(layers))(*(_Layer.of(layer) for layer in layers)), len(layers), self._width,
            heads, kv_heads, dim, _address(embedding), _address(norm.weight), norm.variance_epsilon,
        )  # fmt: skip
        self._pointers = ctypes.c_void_p * len(layers)

    def decode(self, ids_B: Tensor, lengths_B: Tensor, angles_Pd: tuple[Tensor, Tensor], cache: LlamaCache) -> Tensor:
        """The normed states [B, D]; keys and values of the new tokens are written where the slots end."""
        keys, values = cache.keys, cache.values
        assert ids_B.dtype == lengths_B.dtype == torch.int64 and ids_B.is_contiguous() and lengths_B.is_contiguous()
        slots, capacity, threads = len(ids_B), keys[0].shape[2], torch.get_num_threads()
        assert keys[0].shape[0] >= slots and angles_Pd[0].shape[0] >= int(lengths_B.max()) + 1
        shape = ctypes.byref(self._shape)
        scratch = torch.empty(self._kernels.decode_scratch(shape, slots, threads))
        hidden_BD = torch.empty(slots, self._width)
        full = self._kernels.decode(
            shape, ids_B.data_ptr(), lengths_B.data_ptr(), *(_address(angles) for angles in angles_Pd),
            self._pointers(*map(_address, keys)), self._pointers(*map(_address, values)),
            cache.stem_slots.data_ptr(), cache.stem_lengths.data_ptr(), capacity, slots,
            scratch.data_ptr(), hidden_BD.data_ptr(), threads,
        )  # fmt: skip
        if full:
            raise IndexError(f"a slot has no room for one more token: capacity {capacity}, lengths {lengths_B}")
        return hidden_BD


def fits(layers: Sequence[Any], dim: int) -> bool:
    """Whether the kernel can read a model of this shape."""
    return dim % _LANES == 0 and all(min(linear.sizes) >= LEAST_OUTPUTS for one in layers for linear in one.linears)


def _address(x: Tensor) -> int:
    assert x.is_contiguous() and x.dtype == torch.float32
    return x.data_ptr()
