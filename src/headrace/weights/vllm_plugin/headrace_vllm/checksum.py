"""A checksum of a tensor's bytes, the same on every device. Both ends of a transport compute it."""

import torch

_BLOCK = 1 << 20  # of 8 bytes each
_FACTOR = 0x9E3779B97F4A7C15 - (1 << 64)  # an odd number of 64 bits


def checksum(tensor: torch.Tensor) -> int:
    """Changes whenever one element does, and nearly always when elements change places. A signed number of 64 bits."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    total = flat.numel()
    if rest := total % 8:
        flat = torch.nn.functional.pad(flat, (0, 8 - rest))
    elif flat.storage_offset() % 8:
        flat = flat.clone()  # a view as 64-bit numbers must be aligned
    numbers = flat.view(torch.int64)
    odd = torch.arange(1, 2 * min(_BLOCK, len(numbers)), 2, device=flat.device)
    for block in numbers.split(_BLOCK):
        # arithmetic modulo 2**64: an odd factor has an inverse, so no change of one element can cancel
        total = _signed(total * _FACTOR + int((block * odd[: len(block)]).sum()))
    return total


def _signed(number: int) -> int:
    number &= (1 << 64) - 1
    return number - (1 << 64) if number >> 63 else number
