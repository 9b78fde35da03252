"""C kernels: decoding steps, attention, and what stands between matrix products; float32 on the CPU.

`kernels()` returns None where they are not available; callers then use torch's operations. Inputs may be slices of
wider tensors as long as the last axis is contiguous. The number of threads is torch's, as set in the calling thread.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os

import torch
from torch import Tensor

from headrace.models.kernels.cpu.build import Build, BuildError, load_library

_log = logging.getLogger(__name__)
_SCRATCH_CHUNKS = 32
_MOST_COLUMNS = 32
LEAST_OUTPUTS = 3  # of a product: the kernels reach its rows as triples

_P, _I, _F, _T = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int
_ARGUMENTS = {
    "rms_norm": (_P, _I, _P, _P, _P, _I, _I, _F, _T),
    "rms_norm_backward": (_P, _I, _P, _I, _P, _P, _P, _I, _P, _P, _P, _I, _I, _I, _T),
    "swiglu": (_P, _I, _P, _I, _I, _T),
    "swiglu_backward": (_P, _I, _P, _I, _P, _P, _I, _I, _T),
    "rope": (_P, _I, _P, _P, _I, _I, _I, _I, _F, _T),
    "decode_attention": (_P, _I, _P, _P, _I, _P, _P, _P, _P, _I, _I, _I, _I, _I, _T),
    "chosen_logprobs": (_P, _I, _P, _P, _P, _P, _I, _I, _T),
    "sample": (_P, _I, _P, _P, _P, _I, _I, _T),
    "few_rows": (_P, _P, _I, _I, _P, _P, _I, _P, _T),
    "decode_scratch": (_P, _I, _T),
    "decode": (_P, _P, _P, _P, _P, _T),
    "head_logits": (_P, _P, _P, _I, _P, _T),
    "shrink": (_P, _T),
    "decode_and_sample": (_P, _P, _P, _P, _P, _P, _I, _I, _P, _P, _P, _P, _T),
    "tree_attention": (_P, _P, _I, _P, _P, _T),
    "tree_attention_backward": (_P, _P, _P, _P, _P, _P, _T),
    "narrow_scratch": (_I, _I, _T),
    "narrow_normed_linear": (_P, _P, _F, _P, _I, _I, _I, _P, _P, _P, _T),
    "narrow_normed_linear_backward": (_P, _P, _P, _P, _P, _P, _I, _I, _I, _P, _P, _P, _P, _T),
    "narrow_linear_added": (_P, _P, _P, _I, _I, _I, _P, _P, _T),
    "narrow_linear_added_backward": (_P, _P, _P, _I, _I, _I, _P, _P, _P, _T),
    "narrow_feed_forward": (_P, _P, _F, _P, _P, _I, _I, _I, _P, _P, _P, _P, _T),
    "narrow_chosen_logprobs": (_P, _P, _I, _I, _I, _P, _P, _P, _P, _P, _P, _T),
    "narrow_chosen_logprobs_backward": (_P, _P, _P, _P, _P, _I, _I, _I, _P, _P, _P, _T),
    "narrow_probs_row": (_I,),
    "narrow_feed_forward_backward": (_P, _P, _P, _P, _P, _P, _P, _I, _I, _I, _P, _P, _P, _P, _P, _T),
}
_RETURNS = {
    "decode_attention": _T, "decode": _T, "decode_scratch": _I, "decode_and_sample": _I, "tree_attention": _T,
    "tree_attention_backward": _T, "narrow_scratch": _I, "narrow_probs_row": _I,
}  # fmt: skip


@functools.cache
def kernels() -> Kernels | None:
    """The kernels, compiled at the first call; None without a compiler or with HEADRACE_NATIVE=0."""
    if os.environ.get("HEADRACE_NATIVE") == "0":
        _log.debug("native kernels are off (HEADRACE_NATIVE=0)")
        return None
    try:
        return Kernels(*load_library())
    except BuildError as error:
        _log.debug("no native kernels, torch's operations are used: %s", error)
        return None


def kernels_for(x: Tensor) -> Kernels | None:
    """The kernels, if there are any for such tensors."""
    return kernels() if x.dtype == torch.float32 and x.device.type == "cpu" else None


class Kernels:
    """One method for each kernel. Shapes are in the names, as everywhere: N rows, D features, W the MLP's width."""

    def __init__(self, library: ctypes.CDLL, build: Build) -> None:
        for name, arguments in _ARGUMENTS.items():
            function = getattr(library, name)
            function.argtypes = arguments
            function.restype = _RETURNS.get(name)
        self._rms_norm = library.rms_norm
        self._rms_norm_backward = library.rms_norm_backward
        self._swiglu = library.swiglu
        self._swiglu_backward = library.swiglu_backward
        self._rope = library.rope
        self._decode_attention = library.decode_attention
        self._chosen_logprobs = library.chosen_logprobs
        self._sample = library.sample
        self._few_rows = library.few_rows
        self.build = build
        self.library = library
        """For the modules beside this one, which lay out the arguments of what is not here."""

    def rms_norm(self, x_ND: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(the normalised rows times the weight, what each row was multiplied by)."""
        assert _rows(x_ND) and _rows(weight_D)
        rows, size = x_ND.shape
        assert weight_D.shape[0] == size
        out_ND, inverse_N = torch.empty(rows, size, dtype=torch.float32), torch.empty(rows, dtype=torch.float32)
        self._rms_norm(
            x_ND.data_ptr(), x_ND.stride(0), weight_D.data_ptr(), out_ND.data_ptr(), inverse_N.data_ptr(),
            rows, size, eps, torch.get_num_threads(),
        )  # fmt: skip
        return out_ND, inverse_N

    def rms_norm_backward(
        self, grad_ND: Tensor, x_ND: Tensor, inverse_N: Tensor, weight_D: Tensor, add_ND: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """(the gradient of x, plus `add_ND` if given; the gradient of the weight)."""
        assert _rows(grad_ND) and _rows(x_ND) and _rows(inverse_N) and _rows(weight_D)
        assert add_ND is None or (_rows(add_ND) and add_ND.shape == x_ND.shape)
        rows, size = x_ND.shape
        assert grad_ND.shape == x_ND.shape and inverse_N.shape[0] == rows and weight_D.shape[0] == size
        # chunks depend on the shape alone, so that the sum is the same for any number of threads
        chunk_rows = max(_SCRATCH_CHUNKS, -(-rows // _SCRATCH_CHUNKS))
        partial = torch.empty(-(-rows // chunk_rows), size, dtype=torch.float32)
        grad_x_ND, grad_weight_D = torch.empty(rows, size, dtype=torch.float32), torch.empty(size, dtype=torch.float32)
        add, add_stride = (None, 0) if add_ND is None else (add_ND.data_ptr(), add_ND.stride(0))
        self._rms_norm_backward(
            grad_ND.data_ptr(), grad_ND.stride(0), x_ND.data_ptr(), x_ND.stride(0), inverse_N.data_ptr(),
            weight_D.data_ptr(), add, add_stride, grad_x_ND.data_ptr(), partial.data_ptr(), grad_weight_D.data_ptr(),
            rows, size, chunk_rows, torch.get_num_threads(),
        )  # fmt: skip
        return grad_x_ND, grad_weight_D

    def swiglu(self, gate_up_N2W: Tensor) -> Tensor:
        """silu(gate) * up, where the gate is the first half of each row."""
        assert _rows(gate_up_N2W)
        rows, width = gate_up_N2W.shape[0], gate_up_N2W.shape[1] // 2
        out_NW = torch.empty(rows, width, dtype=torch.float32)
        self._swiglu(
            gate_up_N2W.data_ptr(), gate_up_N2W.stride(0), out_NW.data_ptr(), rows, width, torch.get_num_threads()
        )
        return out_NW

    def swiglu_backward(self, grad_NW: Tensor, gate_up_N2W: Tensor) -> tuple[Tensor, Tensor]:
        """(the gradient of gate and up, silu(gate) * up computed again)."""
        assert _rows(grad_NW) and _rows(gate_up_N2W)
        rows, width = grad_NW.shape
        assert gate_up_N2W.shape == (rows, 2 * width)
        grad_gate_up_N2W, out_NW = (
            torch.empty(rows, 2 * width, dtype=torch.float32),
            torch.empty(rows, width, dtype=torch.float32),
        )
        self._swiglu_backward(
            grad_NW.data_ptr(), grad_NW.stride(0), gate_up_N2W.data_ptr(), gate_up_N2W.stride(0),
            grad_gate_up_N2W.data_ptr(), out_NW.data_ptr(), rows, width, torch.get_num_threads(),
        )  # fmt: skip
        return grad_gate_up_N2W, out_NW

    def rope_(self, x: Tensor, cos_Nd: Tensor, sin_Nd: Tensor, heads: int, direction: int = 1) -> None:
        """Rotate the first `heads` heads of each row of x in place; direction -1 rotates back."""
        assert _rows(x) and _rows(cos_Nd) and _rows(sin_Nd)
        rows, dim = cos_Nd.shape
        assert x.shape[0] == rows and x.shape[1] >= heads * dim and dim % 2 == 0
        assert sin_Nd.shape == cos_Nd.shape and sin_Nd.stride(0) == cos_Nd.stride(0)
        self._rope(
            x.data_ptr(), x.stride(0), cos_Nd.data_ptr(), sin_Nd.data_ptr(), cos_Nd.stride(0),
            rows, heads, dim, direction, torch.get_num_threads(),
        )  # fmt: skip

    def decode_attention(
        self,
        qkv_B: Tensor,
        cos_Bd: Tensor,
        sin_Bd: Tensor,
        keys: Tensor,
        values: Tensor,
        lengths_B: Tensor,
        heads: int,
        kv_heads: int,
    ) -> Tensor:
        """Attention of one new token in each of the first B slots; rows of qkv hold its queries, keys and values.

        Writes the token's rotated key and its value at position lengths_B (int64) of keys and values
        [slots, kv_heads, capacity, d]; `lengths_B` itself is left as it is.
        """
        assert _rows(qkv_B) and _rows(cos_Bd) and _rows(sin_Bd) and _rows(keys) and _rows(values)
        slots, capacity, dim = qkv_B.shape[0], keys.shape[2], keys.shape[3]
        assert keys.is_contiguous() and values.is_contiguous() and keys.shape == values.shape
        assert keys.shape[0] >= slots and keys.shape[1] == kv_heads and heads % kv_heads == 0 and dim % 8 == 0
        assert qkv_B.shape[1] >= (heads + 2 * kv_heads) * dim
        assert cos_Bd.shape == sin_Bd.shape == (slots, dim) and cos_Bd.stride(0) == sin_Bd.stride(0)
        assert lengths_B.dtype == torch.int64 and lengths_B.is_contiguous() and lengths_B.shape[0] == slots
        out_B = torch.empty(slots, heads * dim, dtype=torch.float32)
        full = self._decode_attention(
            qkv_B.data_ptr(), qkv_B.stride(0), cos_Bd.data_ptr(), sin_Bd.data_ptr(), cos_Bd.stride(0),
            keys.data_ptr(), values.data_ptr(), lengths_B.data_ptr(), out_B.data_ptr(),
            slots, heads, kv_heads, capacity, dim, torch.get_num_threads(),
        )  # fmt: skip
        if full:
            raise IndexError(f"a slot has no room for one more token: capacity {capacity}, lengths {lengths_B}")
        return out_B

    def chosen_logprobs_(self, logits_MV: Tensor, targets_M: Tensor, temperatures_M: Tensor) -> tuple[Tensor, Tensor]:
        """(log-probability of each target, entropy); the logits become the probabilities softmax(logits / T)."""
        assert _rows(logits_MV) and _rows(temperatures_M)
        assert targets_M.dtype == torch.int64 and targets_M.is_contiguous()
        rows, size = logits_MV.shape
        assert targets_M.shape[0] == temperatures_M.shape[0] == rows
        logprob_M, entropy_M = torch.empty(rows, dtype=torch.float32), torch.empty(rows, dtype=torch.float32)
        self._chosen_logprobs(
            logits_MV.data_ptr(), logits_MV.stride(0), targets_M.data_ptr(), temperatures_M.data_ptr(),
            logprob_M.data_ptr(), entropy_M.data_ptr(), rows, size, torch.get_num_threads(),
        )  # fmt: skip
        return logprob_M, entropy_M

    def sample(self, logits_BV: Tensor, uniforms_B: Tensor) -> tuple[Tensor, Tensor]:
        """(the token that each uniform number in [0, 1), float64, falls on; its log-probability), at temperature 1."""
        assert _rows(logits_BV) and uniforms_B.dtype == torch.float64 and uniforms_B.is_contiguous()
        rows, size = logits_BV.shape
        assert uniforms_B.shape[0] == rows
        tokens_B, logprob_B = torch.empty(rows, dtype=torch.int64), torch.empty(rows, dtype=torch.float32)
        self._sample(
            logits_BV.data_ptr(), logits_BV.stride(0), uniforms_B.data_ptr(), tokens_B.data_ptr(),
            logprob_B.data_ptr(), rows, size, torch.get_num_threads(),
        )  # fmt: skip
        return tokens_B, logprob_B

    def few_rows(self, x_ND: Tensor, weight_OD: Tensor, bias_O: Tensor | None) -> Tensor:
        """A linear layer on few rows: reads the weight once, and rounds a row the same whatever the others are."""
        assert _rows(x_ND) and x_ND.is_contiguous() and _rows(weight_OD) and weight_OD.is_contiguous()
        (rows, inputs), outputs, threads = x_ND.shape, weight_OD.shape[0], torch.get_num_threads()
        assert weight_OD.shape[1] == inputs and outputs >= LEAST_OUTPUTS
        out_NO = torch.empty(rows, outputs, dtype=torch.float32)
        scratch = torch.empty(threads * inputs * (rows + _MOST_COLUMNS), dtype=torch.float32)
        self._few_rows(
            weight_OD.data_ptr(), None if bias_O is None else bias_O.data_ptr(), outputs, inputs, x_ND.data_ptr(),
            out_NO.data_ptr(), rows, scratch.data_ptr(), threads,
        )  # fmt: skip
        return out_NO


def _rows(x: Tensor) -> bool:
    return x.dtype is torch.float32 and x.is_cpu and x.stride()[-1] == 1
