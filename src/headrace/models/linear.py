"""Linear layers that read the same input, merged: their weights are views of one buffer, and so are their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headrace.models.kernels.cpu import LEAST_OUTPUTS, kernels_for

_FEW = 128  # rows up to which the native product is faster


class FusedLinear:
    """Several linear layers that read the same input; one output each."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self._layers = tuple(layers)
        plain: list[Any] = [getattr(layer, "base_layer", layer) for layer in layers]
        self._plain = plain
        self.sizes = [layer.out_features for layer in plain]
        self.weight = _share(plain, "weight")
        self.bias = _share(plain, "bias") if plain[0].bias is not None else None
        self._adapted: list[tuple[int, Any]] = [
            (i, layer) for i, layer in enumerate(layers) if hasattr(layer, "lora_A")
        ]

    def apart(self, x_ND: Tensor) -> Tensor:
        """The layers one by one: autograd's gradients reach each parameter, and adapters obey peft's switches."""
        parts = [layer(x_ND) for layer in self._layers]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

    def fused(self, x_ND: Tensor, row_block: int = 0) -> Tensor:
        """All outputs end to end, without gradients; adapters are on, even if the learner has switched them off."""
        whole = self.product(x_ND, row_block)
        parts = whole.split(self.sizes, dim=-1) if self._adapted else ()
        for index, layer in self._adapted:
            for name in layer.active_adapters:
                down, up = layer.lora_A[name].weight, layer.lora_B[name].weight
                low = linear_by_blocks(x_ND.to(down.dtype), down, None, row_block)  # peft keeps adapters in float32
                parts[index].add_(layer.scaling[name] * linear_by_blocks(low, up, None, row_block))
        return whole

    def product(self, x_ND: Tensor, row_block: int = 0) -> Tensor:
        """All outputs end to end, without gradients or adapters."""
        kernels = kernels_for(x_ND) if x_ND.shape[0] <= _FEW and self.weight.shape[0] >= LEAST_OUTPUTS else None
        if kernels is not None:
            return kernels.few_rows(x_ND.contiguous(), self.weight, self.bias)
        return linear_by_blocks(x_ND, self.weight, self.bias, row_block)

    def accumulate(self, grad_NO: Tensor, x_ND: Tensor) -> None:
        """Add the gradient of `product` to that of the parameters, within the matrix product."""
        add_product([layer.weight for layer in self._plain], grad_NO, x_ND)
        if self.bias is not None:
            for layer, part in zip(self._plain, grad_NO.sum(0).split(self.sizes), strict=True):
                add_gradient(layer.bias, part)

    def add_weight_gradient(self, grad_OD: Tensor) -> None:
        """Add to the gradient of the weights, all of them end to end."""
        parameters = [layer.weight for layer in self._plain]
        held = [p.grad for p in parameters if p.grad is not None]
        if len(held) == len(parameters) and _end_to_end(held):
            _whole(held).add_(grad_OD)
            return
        for parameter, part in zip(parameters, grad_OD.split(self.sizes), strict=True):
            add_gradient(parameter, part)

    def read_for(self) -> dict[nn.Parameter, Tensor]:
        """The part of the shared buffers that `fused` reads for each parameter."""
        found = dict(zip((layer.weight for layer in self._plain), self.weight.split(self.sizes), strict=True))
        if self.bias is not None:
            found |= zip((layer.bias for layer in self._plain), self.bias.split(self.sizes), strict=True)
        return found


def add_gradient(parameter: Tensor, gradient: Tensor) -> None:
    """Add to what has accumulated."""
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad += gradient


def add_product(parameters: Sequence[Tensor], grad_NO: Tensor, x_ND: Tensor) -> None:
    """Add grad^T x to the gradients of parameters that stand end to end."""
    sizes = [p.shape[0] for p in parameters]
    gradients = [p.grad for p in parameters]
    held = [gradient for gradient in gradients if gradient is not None]
    if not held:
        for parameter, part in zip(parameters, (grad_NO.t() @ x_ND).split(sizes), strict=True):
            parameter.grad = part
    elif len(held) == len(parameters) and (len(held) == 1 or _end_to_end(held)):
        _whole(held).addmm_(grad_NO.t(), x_ND)
    else:
        for parameter, part in zip(parameters, grad_NO.split(sizes, dim=1), strict=True):
            add_gradient(parameter, part.t() @ x_ND)


def linear_by_blocks(x_ND: Tensor, weight: Tensor, bias: Tensor | None, block: int) -> Tensor:
    """A linear layer as products of exactly `block` rows each (0: one product of all rows).

    A matrix product rounds differently for different numbers of rows, but a row's result does not depend on its
    neighbours within a product of fixed shape.
    """
    if not block or x_ND.shape[0] == block:
        return F.linear(x_ND, weight, bias)
    return torch.cat([F.linear(part, weight, bias) for part in x_ND.split(block)])


def _share(layers: Sequence[Any], name: str) -> Tensor:
    """One buffer that holds the layers' tensors end to end, with the parameters turned into views of it."""
    parts = [getattr(layer, name).data for layer in layers]
    if len(parts) == 1 or _end_to_end(parts):  # laid out by an earlier call
        return _whole(parts)
    buffer = torch.cat(parts)
    start = 0
    for layer in layers:
        parameter = getattr(layer, name)
        parameter.data = buffer[start : start + parameter.shape[0]]
        start += parameter.shape[0]
    return buffer


def _whole(parts: Sequence[Tensor]) -> Tensor:
    rows = sum(part.shape[0] for part in parts)
    return parts[0].as_strided((rows, *parts[0].shape[1:]), parts[0].stride())


def _end_to_end(parts: Sequence[Tensor]) -> bool:
    return all(
        one.untyped_storage().data_ptr() == two.untyped_storage().data_ptr()
        and one.storage_offset() + one.numel() == two.storage_offset()
        for one, two in pairwise(parts)
    )
