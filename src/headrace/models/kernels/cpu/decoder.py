"""Decoding steps of a Llama-like model as a single native call; the layout of its arguments follows decoder.c."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.config import Weights
from headrace.models.causal import Draws
from headrace.models.kernels.cpu import LEAST_OUTPUTS, Kernels
from headrace.models.llama_cache import LlamaCache

_LANES = 8
SMALL_INPUTS = 16
"""What inputs must be a multiple of for weights in fewer bits."""


@dataclass(frozen=True, slots=True)
class _Rounded:
    """Room for a weight that is rounded to fewer bits."""

    weight_OI: Tensor
    """As floats, for many slots: these are no slower then, and need no conversion."""
    small_OI: Tensor
    """In those bits, for few slots, where reading the weights is what takes time."""
    scales_O: Tensor | None
    """Of bytes."""

    @classmethod
    def like(cls, weight_OI: Tensor, weights: Weights) -> _Rounded | None:
        """None for the weights as they are."""
        if weights == "float32":
            return None
        scales_O = torch.empty(weight_OI.shape[0]) if weights == "int8" else None
        return cls(torch.empty(weight_OI.shape), torch.empty(weight_OI.shape, dtype=getattr(torch, weights)), scales_O)


class _Linear(ctypes.Structure):
    _fields_ = (
        ("weight", ctypes.c_void_p), ("bias", ctypes.c_void_p), ("outputs", ctypes.c_int64), ("inputs", ctypes.c_int64),
        ("original", ctypes.c_void_p), ("small", ctypes.c_void_p), ("scales", ctypes.c_void_p),
    )  # fmt: skip

    @classmethod
    def of(cls, linear: Any, rounded: _Rounded | None) -> _Linear:
        weight, bias = _address(linear.weight), None if linear.bias is None else _address(linear.bias)
        shape = linear.weight.shape
        if rounded is None:
            return cls(weight, bias, *shape, None, None, None)
        scales = None if rounded.scales_O is None else _address(rounded.scales_O)
        return cls(_address(rounded.weight_OI), bias, *shape, weight, rounded.small_OI.data_ptr(), scales)


class _Layer(ctypes.Structure):
    _fields_ = (
        ("qkv", _Linear), ("out", _Linear), ("gate_up", _Linear), ("down", _Linear), ("norm_1", ctypes.c_void_p),
        ("norm_2", ctypes.c_void_p), ("q_norm", ctypes.c_void_p), ("k_norm", ctypes.c_void_p),
    )  # fmt: skip

    @classmethod
    def of(cls, layer: Any, rounded: Sequence[_Rounded | None]) -> _Layer:
        linears = [_Linear.of(*given) for given in zip(layer.linears, rounded, strict=True)]
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
    """Reads the weights where they lie: they may change between two calls, but not move.

    Or reads them rounded to fewer bits, as they were at the last call of `shrink`.
    """

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
        weights: Weights = "float32",
    ) -> None:
        self._library = kernels.library
        self._width = embedding.shape[1]
        self._rounded = [[_Rounded.like(linear.weight, weights) for linear in layer.linears] for layer in layers]
        self._rounded_head = _Rounded.like(head.weight, weights)
        each = [_Layer.of(*given) for given in zip(layers, self._rounded, strict=True)]
        self._shape = _Shape(
            (_Layer * len(layers))(*each), len(layers), self._width, heads, kv_heads, dim, _address(embedding),
            _address(norm.weight), _Linear.of(head, self._rounded_head), norm.variance_epsilon,
        )  # fmt: skip
        self._pointers = ctypes.c_void_p * len(layers)
        self.shrink()

    def shrink(self) -> None:
        """Round the weights again, if they are rounded."""
        if self._rounded_head is not None:
            self._library.shrink(ctypes.byref(self._shape), torch.get_num_threads())

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

    def logits(self, hidden_BD: Tensor) -> Tensor:
        """Of what `decode` returned."""
        slots, scratch = len(hidden_BD), self._scratch(len(hidden_BD))
        logits_BV = torch.empty(slots, self._shape.head.outputs)
        self._library.head_logits(
            ctypes.byref(self._shape), _address(hidden_BD), logits_BV.data_ptr(), slots, scratch.data_ptr(),
            torch.get_num_threads(),
        )  # fmt: skip
        return logits_BV

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
    return dim % _LANES == 0 and all(min(linear.sizes) >= LEAST_OUTPUTS for linear in _linears(layers, head))


def fits_small(layers: Sequence[Any], head: Any) -> bool:
    """Whether it can with weights in fewer bits, too."""
    return all(linear.weight.shape[1] % SMALL_INPUTS == 0 for linear in _linears(layers, head))


def _linears(layers: Sequence[Any], head: Any) -> list[Any]:
    return [head, *(linear for layer in layers for linear in layer.linears)]


def _address(x: Tensor) -> int:
    assert x.is_contiguous() and x.dtype == torch.float32
    return x.data_ptr()
