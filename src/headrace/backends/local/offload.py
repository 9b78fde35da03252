"""Optimizer state in host memory: on the device only while a step is made."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from headrace.models.device import CPU


class HostState:
    """Moves an optimizer's moments, and the wider copies that it updates, between device and (pinned) host memory.

    The host's memory is kept from step to step: pinning it costs more than copying.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, masters: Sequence[nn.Parameter], device: torch.device) -> None:
        self._optimizer, self._masters, self._device = optimizer, masters, device
        self._kept: dict[tuple[int, str], Tensor] = {}
        self.to_host()

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Everything is on the device within."""
        self._to_device()
        try:
            yield
        finally:
            self.to_host()

    def to_host(self) -> None:
        """Copy everything to the host; its memory on the device is free then."""
        for number, master in enumerate(self._masters):
            if master.device != CPU:
                _become(master, self._held((number, "master"), master.detach()))
        for number, (key, value) in enumerate(self._moments()):
            self._optimizer.state[key[0]][key[1]] = self._held((number, f"moment {key[1]}"), value)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # the copies run beside the host

    def _to_device(self) -> None:
        for master in self._masters:
            _become(master, master.detach().to(self._device, non_blocking=True))
        for (parameter, name), value in self._moments():
            self._optimizer.state[parameter][name] = value.to(self._device, non_blocking=True)

    def _moments(self) -> list[tuple[tuple[Tensor, str], Tensor]]:
        found = self._optimizer.state.items()
        return [((p, name), value) for p, state in found for name, value in state.items() if isinstance(value, Tensor)]

    def _held(self, key: tuple[int, str], value: Tensor) -> Tensor:
        if value.device == CPU:
            return value
        kept = self._kept.get(key)
        if kept is None or kept.shape != value.shape or kept.dtype != value.dtype:
            pin = self._device.type == "cuda"
            kept = self._kept[key] = torch.empty(value.shape, dtype=value.dtype, device=CPU, pin_memory=pin)
        return kept.copy_(value, non_blocking=True)


def _become(parameter: nn.Parameter, other: Tensor) -> None:
    """Let a parameter be another tensor, on whatever device: the optimizer knows it by its identity."""
    torch.utils.swap_tensors(parameter, nn.Parameter(other, requires_grad=parameter.requires_grad))
