"""Packed rows in the attention of any transformers model, through the interface that it has for that.

All layers but attention work token by token, so they run once over the distinct tokens of all rows. Attention brings
every row's tokens together: in right-padded bins of similar length with torch's attention (causality alone keeps
padding from what comes before it), or end to end with a kernel for rows of any length. No token sees another row, and
a prefix that rows share is computed once everywhere else.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, eager_mask, sdpa_mask

from headrace.models.packed import PackedRows

NAME, OWN_NAME = "headrace_rows", "headrace_rows_own"
"""Attention by torch, and by the model's own function, which has caps or sinks."""


def needs_own_attention(hf_model: Any) -> bool:
    """Whether only the model's own function computes its attention: torch's knows no caps and no sinks."""
    config = hf_model.config
    capped = getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None
    return capped or config._attn_implementation in ("eager", OWN_NAME) or not hf_model._supports_sdpa


@dataclass(frozen=True, slots=True)
class Window:
    """What a layer's mask says beyond causality: how many tokens back it sees; None for all.

    `given` is what the model makes masks from, for whoever calls it without packed rows.
    """

    size: int | None
    given: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a forward pass, and the kernel that they attend with."""

    packed: PackedRows
    kernel: str


def attend_rows(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, scaling: float | None = None,
    headrace_rows: Rows | None = None, **given: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """What a layer calls: queries, keys and values [1, heads, N, dim] of the distinct tokens; [1, N, heads, dim]."""
    own = module.config._attn_implementation == OWN_NAME
    if headrace_rows is None:
        return _without_rows(own, module, query, key, value, attention_mask, scaling, given)
    if not isinstance(attention_mask, Window):
        raise ValueError("the model makes its masks in a way of its own")
    if headrace_rows.kernel == "sdpa":
        attend = _own if own else _sdpa
        return _in_bins(attend, module, query, key, value, attention_mask, scaling, headrace_rows, given), None
    return _end_to_end(query, key, value, attention_mask, scaling, headrace_rows, given.get("softcap")), None


def _without_rows(
    own: bool, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any,
    scaling: float | None, given: dict[str, Any],
) -> tuple[Tensor, Any]:  # fmt: skip
    """As transformers computes it, for a batch that somebody else gave the model."""
    if isinstance(mask, Window):
        local = {} if mask.size is None else {"local_size": mask.size}
        make: Any = eager_mask if own else sdpa_mask
        mask = make(**mask.given, **local)
    function = _own_function(module) if own else sdpa_attention_forward
    return function(module, query, key, value, mask, scaling=scaling, **given)


def _own_function(module: Any) -> Callable[..., Any]:
    """What the model's own file calls eager: with caps, sinks, or whatever it needs."""
    return sys.modules[type(module).__module__].eager_attention_forward


def _in_bins(
    attend: Callable[..., Tensor], module: Any, query: Tensor, key: Tensor, value: Tensor, window: Window,
    scaling: float | None, rows: Rows, given: dict[str, Any],
) -> Tensor:  # fmt: skip
    bins = rows.packed.attention
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    if not bins.plain:
        q, k, v = (x.index_select(0, bins.source_P) for x in (q, k, v))
    sizes = [count * longest for count, longest in bins.shapes]
    parts = []
    for shape, *heads_first in zip(bins.shapes, *(x.split(sizes) for x in (q, k, v)), strict=True):
        inputs = [x.unflatten(0, shape).transpose(1, 2) for x in heads_first]
        parts.append(attend(module, *inputs, window.size, scaling, given).flatten(0, 1))
    mixed = parts[0] if len(parts) == 1 else torch.cat(parts)
    return (mixed if bins.plain else mixed.index_select(0, bins.place_N))[None]


def _sdpa(
    module: Any, q_RHLd: Tensor, k: Tensor, v: Tensor, window: int | None, scaling: float | None, given: dict[str, Any]
) -> Tensor:
    """[rows, length, heads, dim], by torch's attention."""
    length = q_RHLd.shape[2]
    cut = window is not None and window < length
    mixed = F.scaled_dot_product_attention(
        q_RHLd, k, v, attn_mask=_band(length, window, q_RHLd.device) if cut else None, is_causal=not cut, scale=scaling,
        enable_gqa=q_RHLd.shape[1] != k.shape[1],
    )  # fmt: skip
    return mixed.transpose(1, 2)


def _own(
    module: Any, q_RHLd: Tensor, k: Tensor, v: Tensor, window: int | None, scaling: float | None, given: dict[str, Any]
) -> Tensor:
    """[rows, length, heads, dim], by the model's own function."""
    seen = _band(q_RHLd.shape[2], window, q_RHLd.device)
    mask = torch.zeros_like(seen, dtype=q_RHLd.dtype).masked_fill_(~seen, torch.finfo(q_RHLd.dtype).min)
    return _own_function(module)(module, q_RHLd, k, v, mask[None, None], scaling=scaling, **given)[0]


def _band(length: int, window: int | None, device: torch.device) -> Tensor:
    """Which keys [length, length] each query sees."""
    seen = torch.ones(length, length, dtype=torch.bool, device=device).tril_()
    return seen if window is None else seen.triu_(1 - window)


def _end_to_end(
    query: Tensor, key: Tensor, value: Tensor, window: Window, scaling: float | None, rows: Rows,
    softcap: float | None,
) -> Tensor:  # fmt: skip
    packed, bins = rows.packed, rows.packed.attention
    q, k, v = (x[0].transpose(0, 1).index_select(0, packed.where_T) for x in (query, key, value))
    back = -1 if window.size is None else window.size - 1
    mixed = VARLEN[rows.kernel](q, k, v, bins.ends_R, max(packed.lengths), scaling, back, softcap)
    return mixed.index_select(0, bins.first_N)[None]


def _torch_varlen(
    q: Tensor, k: Tensor, v: Tensor, ends_R: Tensor, longest: int, scaling: float | None, back: int,
    softcap: float | None,
) -> Tensor:  # fmt: skip
    from torch.nn.attention.varlen import varlen_attn

    if softcap is not None:
        raise ValueError("torch's kernel for rows of any length knows no soft cap")
    mixed: Any = varlen_attn(
        q, k, v, ends_R, ends_R, longest, longest, scale=scaling, window_size=(back, 0),
        enable_gqa=q.shape[1] != k.shape[1],
    )  # fmt: skip
    return mixed


def _flash_attn(
    q: Tensor, k: Tensor, v: Tensor, ends_R: Tensor, longest: int, scaling: float | None, back: int,
    softcap: float | None,
) -> Tensor:  # fmt: skip
    from flash_attn import flash_attn_varlen_func  # type: ignore[import-not-found]

    return flash_attn_varlen_func(
        q, k, v, ends_R, ends_R, longest, longest, softmax_scale=scaling, causal=True, window_size=(back, 0),
        softcap=softcap or 0.0,
    )  # fmt: skip


VARLEN: dict[str, Callable[..., Tensor]] = {"varlen": _torch_varlen, "flash_attn": _flash_attn}
"""Kernels for rows end to end: (q, k, v [T, heads, dim], ends_R, longest, scaling, tokens seen back, softcap)."""


def _mask(local_size: int | None = None, **given: Any) -> Window:
    if given.get("use_vmap"):
        raise ValueError("the model has a mask of its own beside causality and windows")
    return Window(local_size, given)


for _name in (NAME, OWN_NAME):
    AttentionInterface.register(_name, attend_rows)  # type: ignore[arg-type]
    AttentionMaskInterface.register(_name, _mask)  # type: ignore[arg-type]
