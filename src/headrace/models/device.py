"""Which device a model computes on, in which types, and how torch is set up for that."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from typing import Any

import torch

from headrace.config import ModelSection, OptimizerSection
from headrace.errors import ConfigError

CPU = torch.device("cpu")
_KINDS = ("cuda", "xpu", "mps")
"""Accelerators that torch has, in the order that "auto" looks for them."""
_WORKSPACE = ":4096:8"  # what cuBLAS needs for results that repeat


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator as torch reports it. `memory` and `free` are bytes; None where torch does not say."""

    device: torch.device
    name: str
    memory: int | None = None
    free: int | None = None
    capability: str = ""
    bfloat16: bool = True


def resolve_device(name: str) -> torch.device:
    """The device of a name such as "auto", "cpu" or "cuda:1"; ConfigError if this machine does not have it."""
    if name == "auto":
        found = torch.accelerator.current_accelerator(check_available=True)
        return CPU if found is None else torch.device(found.type, found.index or 0)
    kind, _, number = name.partition(":")
    if kind == "cpu":
        return CPU
    there = _count(kind)
    if not there:
        raise ConfigError(f'model.device = "{name}" is not available here: {_why_not(kind)}')
    index = int(number or 0)
    if index >= there:
        raise ConfigError(
            f'model.device = "{name}": this machine has {there} of them, counted from 0; the last is '
            f'"{kind}:{there - 1}"'
        )
    return torch.device(kind, index)


def accelerators() -> list[Device]:
    """All accelerators of this machine, the one of "auto" first."""
    kinds = [kind for kind in (*_KINDS, _registered()) if _count(kind)]
    return [describe(torch.device(kind, index)) for kind in kinds for index in range(_count(kind))]


def describe(device: torch.device) -> Device:
    """What torch knows of a device."""
    module: Any = torch.get_device_module(device)
    name = module.get_device_name(device) if hasattr(module, "get_device_name") else device.type.upper()
    free, memory = module.mem_get_info(device) if hasattr(module, "mem_get_info") else (None, None)
    capability = ""
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        capability = f"{major}.{minor}"
    elif device.type == "mps":
        memory = torch.mps.recommended_max_memory()
    bfloat16 = device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)
    return Device(device, name, memory, free, capability, bfloat16)


def likely_attention() -> str:
    """Which kernels `model.attention = "auto"` tries here; the first that is right for the model is used."""
    kernels = ["torch's attention, rows in bins of similar length (sdpa)", "right-padded batches (padded)"]
    if _count("cuda"):
        kernels.insert(0, "torch's kernel for rows of any length (varlen)")
        if importlib.util.find_spec("flash_attn") is not None:
            kernels.insert(0, "flash-attn's (flash_attn)")
    else:
        kernels.insert(0, "Headrace's own for models of the Llama family")
    return "; else ".join(kernels)


def forward_dtype(section: ModelSection) -> torch.dtype:
    """The type that the model computes in. "auto": bfloat16 on accelerators that multiply it, else float32."""
    if section.dtype != "auto":
        return getattr(torch, section.dtype)
    device = resolve_device(section.device)
    return torch.float32 if device == CPU or not describe(device).bfloat16 else torch.bfloat16


def master_dtype(model: ModelSection, optimizer: OptimizerSection) -> torch.dtype:
    """The type of what the optimizer updates, and of its moments. "auto": float32 on accelerators, or wider.

    On the CPU "auto" is the model's own type: there the parameters themselves are updated.
    """
    forward = forward_dtype(model)
    if optimizer.master_dtype == "auto":
        return forward if resolve_device(model.device) == CPU else torch.promote_types(forward, torch.float32)
    chosen = getattr(torch, optimizer.master_dtype)
    if torch.promote_types(chosen, forward) != chosen:
        raise ConfigError(
            f'optimizer.master_dtype = "{optimizer.master_dtype}" is narrower than the {_word(forward)} that the model '
            f'computes in; set it to "{_word(forward)}", or leave it at "auto"'
        )
    return chosen


def prepare(device: torch.device, tf32: bool, deterministic: bool) -> None:
    """Set torch up for an accelerator. On the CPU there is nothing to set."""
    if device == CPU:
        return
    if device.type == "cuda":
        # read when the first product is computed; a value of the user's own stays
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", _WORKSPACE)
        torch.set_float32_matmul_precision("high" if tf32 else "highest")
        torch.cuda.set_device(device)
    if deterministic:
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all that it was given: before a time is taken, or memory counted."""
    if device != CPU:
        torch.get_device_module(device).synchronize(device)


def _count(kind: str) -> int:
    try:
        module: Any = torch.get_device_module(kind)
    except (RuntimeError, AttributeError):
        return 0
    available = torch.backends.mps.is_available() if kind == "mps" else module.is_available()
    return int(module.device_count()) if available else 0


def _registered() -> str:
    """The name of a device that an extension of torch has brought; torch's own placeholder if none has."""
    return torch._C._get_privateuse1_backend_name()


def _why_not(kind: str) -> str:
    there = ", ".join(f'"{one.device}" ({one.name})' for one in accelerators())
    has = f"this machine has {there}" if there else "torch sees no accelerator"
    if kind not in (*_KINDS, _registered()):
        return f'there is no such device; use "auto", "cpu", {", ".join(map(repr, _KINDS))}'.replace("'", '"')
    hint = ""
    if kind == "cuda" and torch.version.cuda is None:
        hint = " (this torch is built without CUDA; docs/gpu.md says what to install)"
    return f'{has}{hint}; set model.device = "auto" or "cpu"'


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
