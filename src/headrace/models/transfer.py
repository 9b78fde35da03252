"""Between host and device: many arrays in one transfer, because each is a stall that costs more than its bytes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_ALIGNED = 64  # bytes; every type can be read there


def upload(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """Arrays as tensors on a device, in one transfer; on the CPU they share the arrays' memory."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    starts, size = [], 0
    for array in arrays:
        starts.append(size)
        size += -(-array.nbytes // _ALIGNED) * _ALIGNED
    # pinned memory is copied while the host continues
    whole = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=device.type == "cuda")
    content = whole.numpy()
    for array, start in zip(arrays, starts, strict=True):
        content[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    moved = whole.to(device, non_blocking=True)
    return [
        moved[start : start + array.nbytes].view(torch.from_numpy(array[:0]).dtype).view(array.shape)
        for array, start in zip(arrays, starts, strict=True)
    ]


def download(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Tensors of the device on the host, in one transfer. The one place of a micro-batch where the host waits.

    They come as float64, which holds every number of the types that are computed in.
    """
    if not tensors or tensors[0].device.type == "cpu":
        return [tensor.detach() for tensor in tensors]
    sizes = [tensor.numel() for tensor in tensors]
    wide = torch.float64 if tensors[0].device.type != "mps" else torch.float32  # which has no float64
    flat = torch.cat([tensor.detach().reshape(-1).to(wide) for tensor in tensors]).cpu()
    return [part.view(tensor.shape) for part, tensor in zip(flat.split(sizes), tensors, strict=True)]
