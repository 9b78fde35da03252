"""Optimizer state in host memory: a part of it is on the device while that part is updated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from headrace.models.device import CPU

_PART = 2**28
"""Numbers that are updated at once: with two moments and a copy of the parameters in float32, 3 GiB."""


class HostState:
    """An optimizer whose moments, and the wider copies that it updates, are in (pinned) host memory.

    The host's memory is kept from step to step: pinning it costs more than copying.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, masters: Sequence[nn.Parameter], device: torch.device, part: int = _PART
    ) -> None:
        self._optimizer, self._device, self._part = optimizer, device, part
        self._masters = {id(master) for master in masters}
        self._kept: dict[tuple[int, str], Tensor] = {}
        self.to_host()

    def step(self, gradients: Mapping[Tensor, Tensor]) -> None:
        """Update what has a gradient, part by part."""
        for part in self._parts(gradients):
            for parameter in part:
                self._to_device(parameter)
                parameter.grad = gradients[parameter]
            self._optimizer.step()
            for parameter in part:
                parameter.grad = None
                self._to_host(parameter)
        self._wait()

    def to_host(self) -> None:
        """Copy everything to the host; its memory on the device is free then."""
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                self._to_host(parameter)
        self._wait()

    def _parts(self, gradients: Mapping[Tensor, Tensor]) -> Iterator[list[Tensor]]:
        part, size = [], 0
        for parameter in gradients:
            if part and size + parameter.numel() > self._part:
                yield part
                part, size = [], 0
            part.append(parameter)
            size += parameter.numel()
        if part:
            yield part

    def _to_device(self, parameter: Tensor) -> None:
        if id(parameter) in self._masters:
            _become(parameter, parameter.detach().to(self._device, non_blocking=True))
        state = self._optimizer.state.get(parameter, {})
        for name, value in state.items():
            state[name] = value.to(self._device, non_blocking=True)

    def _to_host(self, parameter: Tensor) -> None:
        if id(parameter) in self._masters:
            _become(parameter, self._held(parameter, "itself", parameter.detach()))
        state = self._optimizer.state.get(parameter, {})
        for name, value in state.items():
            state[name] = self._held(parameter, name, value)

    def _held(self, parameter: Tensor, name: str, value: Tensor) -> Tensor:
        if value.device == CPU:
            return value
        key = (id(parameter), name)
        kept = self._kept.get(key)
        if kept is None or kept.shape != value.shape or kept.dtype != value.dtype:
            pin = self._device.type == "cuda"
            kept = self._kept[key] = torch.empty(value.shape, dtype=value.dtype, device=CPU, pin_memory=pin)
        return kept.copy_(value, non_blocking=True)

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # the copies run beside the host


def _become(parameter: Tensor, other: Tensor) -> None:
    """Let a parameter be another tensor, on whatever device: the optimizer knows it by its identity."""
    torch.utils.swap_tensors(parameter, nn.Parameter(other, requires_grad=parameter.requires_grad))
