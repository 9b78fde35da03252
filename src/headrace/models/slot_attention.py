"""Masks and attention for rows at different positions, through the interfaces that transformers has for them.

A model builds its masks from functions of (row, head, query position, key position): causal, of a window, of chunks.
Here the query positions are each row's own, so slots of any length are decoded together, and the model itself still
says what may be seen.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface

from headrace.models.row_attention import needs_own_attention

GROUPED, EAGER = "headrace_grouped", "headrace_eager"
"""Attention for models whose attention torch's covers, and for others: a model's own, with caps or sinks."""


def use_slot_attention(hf_model: Any) -> None:
    """Let the model's attention work on slots; it computes what it computed before."""
    hf_model.config._attn_implementation = EAGER if needs_own_attention(hf_model) else GROUPED


def _slot_mask(
    batch_size: int, q_length: int, kv_length: int, q_offset: Any, mask_function: Callable[..., Tensor],
    dtype: torch.dtype, device: torch.device, local_size: int | None = None, **_: Any,
) -> Tensor:  # fmt: skip
    """What to add to scores [rows, 1, queries, keys]: 0, or the smallest number there is."""
    rows_R = torch.arange(batch_size, device=device)
    heads_H = torch.zeros(1, dtype=torch.long, device=device)
    positions_RL = q_offset[:, None] + torch.arange(q_length, device=device)
    keys_K = torch.arange(kv_length, device=device)
    seen = mask_function(
        rows_R[:, None, None, None], heads_H[None, :, None, None], positions_RL[:, None, :, None], keys_K
    ).expand(batch_size, 1, q_length, kv_length)
    return torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, torch.finfo(dtype).min)


def _grouped_mask(q_length: int, kv_length: int, local_size: int | None = None, **given: Any) -> Tensor | None:
    """None where rows see themselves alone, and no window cuts anything off: torch's causal attention is faster."""
    if q_length == kv_length > 1 and (local_size is None or local_size >= kv_length):
        return None
    return _slot_mask(q_length=q_length, kv_length=kv_length, **given)


def _grouped_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float | None = None, **given: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    if query.shape[2] > 1:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **given)
    # the query heads of a kv head stand where query positions do: no key is repeated
    q_RHGd = query.view(query.shape[0], key.shape[1], -1, query.shape[3])
    if query.device.type == "cpu":  # faster than the below for so few queries
        scores = (q_RHGd * (scaling or query.shape[3] ** -0.5)) @ key.transpose(-1, -2)
        mixed = (scores if attention_mask is None else scores.add_(attention_mask)).softmax(-1) @ value
    else:
        mixed = F.scaled_dot_product_attention(q_RHGd, key, value, attn_mask=attention_mask, scale=scaling)
    return mixed.flatten(1, 2)[:, None], None


def _own_attention(module: Any, *given: Any, **settings: Any) -> Any:
    """What the model's own file calls eager: with caps, sinks, or whatever else it needs."""
    return sys.modules[type(module).__module__].eager_attention_forward(module, *given, **settings)


AttentionInterface.register(GROUPED, _grouped_attention)
AttentionInterface.register(EAGER, _own_attention)
AttentionMaskInterface.register(GROUPED, _grouped_mask)
AttentionMaskInterface.register(EAGER, _slot_mask)
