"""Decoding steps of a Llama-like model as a single native call; the layout of its arguments follows decoder.c."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.models.causal import Draws
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
        ("embedding", ctypes.c_void_p), ("norm", ctypes.c_void_p), ("head", _Linear), ("eps", ctypes.c_float),
    )  # fmt: skip


class _Batch(ctypes.Structure):
    _fields_ = (
        ("lengths", ctypes.c_void_p), ("stem_slots", ctypes.c_void_p), ("stem_lengths", ctypes.c_void_p),
        ("cosine", ctypes.c_void_p), ("sine", ctypes.c_void_p), ("keys", ctypes.POINTER(ctypes.c_void_p)),
        ("values", ctypes.POINTER(ctypes.c_void_p)), ("capacity", ctypes.c_int64), ("slots", ctypes.c_int64),
        ("first", ctypes.c_int64),
    )  # fmt: skip


Angles = tuple[Tensor, Tensor]


class Decoder:
    """Reads the weights where they lie: they may change between two calls, but not move."""

    def __init__(
        self,
        kernels: Kernels,
        layers: Sequence[Any],
        heads: int,
        kv_heads: int,
        dim: int,
        embedding: Tensor,
        norm: Any,
        head: Any,
    ) -> None:
        self._library = kernels.library
        self._width = embedding.shape[1]
        self._shape = _Shape(
            (_Layer * len(layers))(*(_Layer.of(layer) for layer in layers)), len(layers), self._width, heads, kv_heads,
            dim, _address(embedding), _address(norm.weight), _Linear.of(head.weight, head.bias), norm.variance_epsilon,
        )  # fmt: skip
        self._pointers = ctypes.c_void_p * len(layers)

    def decode(self, ids_B: Tensor, lengths_B: Tensor, angles_Pd: Angles, cache: LlamaCache) -> Tensor:
        """The normed states [B, D]; keys and values of the new tokens are written where the slots end."""
        slots, threads = len(ids_B), torch.get_num_threads()
        shape, scratch = ctypes.byref(self._shape), self._scratch(slots)
        hidden_BD = torch.empty(slots, self._width)
        full = self._library.decode(
            shape, self._batch(lengths_B, angles_Pd, cache, 1), _whole_numbers(ids_B), scratch.data_ptr(),
            hidden_BD.data_ptr(), threads,
        )  # fmt: skip
        _require_room(not full, cache, lengths_B)
        return hidden_BD

    def decode_and_sample(
        self, ids_B: Tensor, lengths_B: Tensor, angles_Pd: Angles, cache: LlamaCache, draws: Draws
    ) -> tuple[Tensor, Tensor]:
        """(tokens, their log-probabilities), both [S, B], S at most as many steps as were asked for."""
        slots, steps = len(ids_B), draws.steps
        scratch, logits_BV = self._scratch(slots), torch.empty(slots, self._shape.head.outputs)
        tokens_SB, logprob_SB = torch.empty(steps, slots, dtype=torch.int64), torch.empty(steps, slots)
        seeds_B, positions_B = np.array(draws.seeds, np.uint64), np.array(draws.positions, np.int64)
        stops = np.array(list(draws.stop_ids), np.int64)
        assert len(seeds_B) == len(positions_B) == slots
        made = self._library.decode_and_sample(
            ctypes.byref(self._shape), self._batch(lengths_B, angles_Pd, cache, steps), _whole_numbers(ids_B),
            seeds_B.ctypes.data, positions_B.ctypes.data, stops.ctypes.data, len(stops), steps, scratch.data_ptr(),
            logits_BV.data_ptr(), tokens_SB.data_ptr(), logprob_SB.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        _require_room(made >= 0, cache, lengths_B)
        return tokens_SB[:made], logprob_SB[:made]

    def _scratch(self, slots: int) -> Tensor:
        return torch.empty(self._library.decode_scratch(ctypes.byref(self._shape), slots, torch.get_num_threads()))

    def _batch(self, lengths_B: Tensor, angles_Pd: Angles, cache: LlamaCache, steps: int) -> Any:
        keys, values, slots = cache.keys, cache.values, len(lengths_B)
        assert keys[0].shape[0] >= slots and angles_Pd[0].shape[0] >= int(lengths_B.max()) + steps
        batch = _Batch(
            _whole_numbers(lengths_B), _whole_numbers(cache.stem_slots), _whole_numbers(cache.stem_lengths),
            *map(_address, angles_Pd), *(self._pointers(*map(_address, x)) for x in (keys, values)), keys[0].shape[2],
            slots, 0,
        )  # fmt: skip
        return ctypes.byref(batch)


def _require_room(there: bool, cache: LlamaCache, lengths_B: Tensor) -> None:
    if not there:
        raise IndexError(f"a slot has no room for one more token: capacity {cache.length}, lengths {lengths_B}")


def _whole_numbers(x: Tensor) -> int:
    assert x.is_contiguous() and x.dtype == torch.int64
    return x.data_ptr()


def fits(layers: Sequence[Any], head: Any, dim: int) -> bool:
    """Whether the kernel can decode with such layers."""
    linears = [head, *(linear for layer in layers for linear in layer.linears)]
    return dim % _LANES == 0 and all(min(linear.sizes) >= LEAST_OUTPUTS for linear in linears)


def _address(x: Tensor) -> int:
    assert x.is_contiguous() and x.dtype == torch.float32
    return x.data_ptr()
