"""What the optimizer updates where the model computes in a narrower type: wider copies of its parameters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class MasterWeights:
    """A copy in a wider type of every parameter that is narrower; gradients are added up in the wider type, too.

    A step of 1e-5 is lost in a bfloat16 weight of 1, and so is a small gradient in a large sum.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], dtype: torch.dtype) -> None:
        narrow = [p for p in parameters if torch.promote_types(p.dtype, dtype) != p.dtype]
        self._dtype = dtype
        self._masters = {p: nn.Parameter(p.detach().to(dtype)) for p in narrow}
        self._sums: dict[nn.Parameter, Tensor] = {}
        self.optimized = [self._masters.get(p, p) for p in parameters]
        """What the optimizer is given, in the order of the parameters."""
        for parameter in narrow:
            parameter.register_post_accumulate_grad_hook(self._add)

    def of(self, parameter: Tensor) -> Tensor:
        """What the optimizer updates for a parameter: its copy, or itself."""
        return self._masters.get(parameter, parameter)  # type: ignore[call-overload]

    def _add(self, parameter: Tensor) -> None:
        """Called by autograd for every gradient that is complete."""
        assert isinstance(parameter, nn.Parameter) and parameter.grad is not None
        if parameter in self._sums:
            self._sums[parameter] += parameter.grad
        else:
            self._sums[parameter] = parameter.grad.to(self._dtype)
        parameter.grad = None

    def take_gradients(self) -> dict[Tensor, Tensor]:
        """The gradient of each that is optimized. It forgets those of the copies."""
        sums = {id(self._masters[parameter]): total for parameter, total in self._sums.items()}
        self._sums.clear()
        found = ((p, sums.get(id(p), p.grad)) for p in self.optimized)
        return {p: gradient for p, gradient in found if gradient is not None}

    def clear(self) -> None:
        """Forget the gradients."""
        self._sums.clear()

    @torch.no_grad()
    def write_back(self) -> None:
        """Round the copies into the parameters."""
        for parameter, master in self._masters.items():  # which may be in host memory
            parameter.copy_(master)

    def tensors(self) -> list[nn.Parameter]:
        """The copies."""
        return list(self._masters.values())
