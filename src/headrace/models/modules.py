"""New modules over given parameters: for sampling concurrently with the learner, a private copy, or other memory."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

ALIGNMENT = 64  # bytes; as the tensor library aligns what it allocates


def copy_modules(hf_model: Any, replaced: Mapping[nn.Parameter, nn.Parameter] | None = None) -> Any:
    """Modules of their own, in evaluation mode, on the same tensors save for the replaced parameters."""
    memo = {id(tensor): tensor for tensor in (*hf_model.parameters(), *hf_model.buffers())}
    memo |= {id(old): new for old, new in (replaced or {}).items()}
    return copy.deepcopy(hf_model, memo).eval()


def copy_weights(hf_model: Any, trained: Sequence[nn.Parameter]) -> Any:
    """Modules with their own copy of the trained parameters; what never changes is shared."""
    return copy_modules(hf_model, {p: nn.Parameter(p.detach().clone()) for p in trained})


def trained_parameters(hf_model: Any) -> list[nn.Parameter]:
    """What is trained and synced, in the order that its digest is taken in."""
    return [parameter for parameter in hf_model.parameters() if parameter.requires_grad]


def align(hf_model: Any) -> None:
    """Move parameters off odd places, as they have in a mapped file: there, products are rounded otherwise."""
    for parameter in hf_model.parameters():
        if parameter.data_ptr() % ALIGNMENT:
            parameter.data = parameter.data.clone()


def lay_end_to_end(hf_model: Any) -> None:
    """Move the trained parameters into one piece of memory, which is copied twice as fast as many small ones."""
    trained = trained_parameters(hf_model)
    starts, size = [], 0
    for parameter in trained:
        starts.append(size)
        size += -(-parameter.nbytes // ALIGNMENT) * ALIGNMENT
    whole = trained[0].new_empty(size, dtype=torch.uint8)
    for parameter, start in zip(trained, starts, strict=True):
        place = whole[start : start + parameter.nbytes].view(parameter.dtype).view(parameter.shape)
        parameter.data = place.copy_(parameter.data)
