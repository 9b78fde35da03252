"""Memory of an accelerator: its peak in each phase, and what to say when there is not enough of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from headrace.config import BackendSection
from headrace.errors import DeviceMemoryError
from headrace.models.device import CPU

_MB = 2**20


class DeviceMemory:
    """Peaks of the phases that take turns on one device: sampling, and training."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = None if device == CPU else torch.get_device_module(device)
        if not hasattr(self._module, "max_memory_allocated"):
            self._module = None
        self._training = False
        self._sampled_mb: float | None = None

    def begin_training(self) -> None:
        """Sampling has ended. What it has given back can be used in pieces of another size."""
        if self._module is None or self._training:
            return
        self._training = True
        self._sampled_mb = self._peak_mb()
        self._module.empty_cache()
        self._module.reset_peak_memory_stats(self._device)

    def end_training(self) -> dict[str, float]:
        """Peaks in megabytes, by metric; nothing where the device does not say."""
        if self._module is None or self._sampled_mb is None:
            return {}
        found = {"memory/device_generate_peak_mb": self._sampled_mb, "memory/device_train_peak_mb": self._peak_mb()}
        self._training = False
        self._module.empty_cache()
        self._module.reset_peak_memory_stats(self._device)
        return found

    def _peak_mb(self) -> float:
        return self._module.max_memory_allocated(self._device) / _MB


@contextmanager
def explained(device: torch.device, backend: BackendSection, doing: str, largest: int = 0) -> Iterator[None]:
    """Turn the device's "out of memory" into an error that says what to lower. `largest`: tokens of a micro-batch."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise DeviceMemoryError(
            f"{device} has not enough memory for {doing}{_numbers(device)}: {_remedies(backend, largest)}. "
            "The run can be resumed from its last checkpoint with the same command"
        ) from error


def _numbers(device: torch.device) -> str:
    module: Any = torch.get_device_module(device)
    if not hasattr(module, "mem_get_info"):
        return ""
    free, total = module.mem_get_info(device)
    return f" ({total / 2**30:.1f} GiB, of which {free / 2**30:.1f} GiB are free)"


def _remedies(backend: BackendSection, largest: int) -> str:
    tokens = max(1, min(backend.micro_batch_tokens, largest or backend.micro_batch_tokens) // 2)
    found = [
        f"set backend.micro_batch_tokens = {tokens} (now {backend.micro_batch_tokens}"
        f"{f', and a micro-batch of {largest} tokens was run' if largest else ''})"
    ]
    if not backend.gradient_checkpointing:
        found.append("backend.gradient_checkpointing = true")
    elif backend.checkpoint_every > 1:
        found.append(f"backend.checkpoint_every = 1 (now {backend.checkpoint_every})")
    found.append(f"backend.logits_chunk = {max(1, backend.logits_chunk // 4)} (now {backend.logits_chunk})")
    offload = "backend.cpu_offload" if backend.name == "fsdp" else "optimizer.offload"
    found.append(f"{offload} = true, or train adapters (model.lora.rank)")
    return ", ".join(found)
