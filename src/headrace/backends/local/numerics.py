"""What the bits of the local backend's results depend on, apart from the configuration."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch

from headrace.config import RunConfig
from headrace.engines.placement import learner_threads
from headrace.models.device import CPU, describe, resolve_device
from headrace.models.kernels.cpu import kernels

_SETTINGS = ("ATEN_CPU_CAPABILITY", "DNNL_MAX_CPU_ISA", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA")
"""Variables of the environment that choose instructions."""


def numerics(config: RunConfig) -> dict[str, str]:
    """By name; texts that people compare when they differ."""
    found = kernels()
    chosen = [f"{name}={os.environ[name]}" for name in _SETTINGS if name in os.environ]
    return _device(config) | {
        "torch": torch.__version__,
        "processor": f"{_processor()}, {torch.backends.cpu.get_cpu_capability()}",
        "native kernels": str(found.build) if found else "none",
        "threads": str(learner_threads(config)),
        "instructions chosen by": ", ".join(chosen) or "the libraries",
    }


def _device(config: RunConfig) -> dict[str, str]:
    """Of an accelerator. A run on the CPU depends on what is listed anyway."""
    device = resolve_device(config.model.device)
    if device == CPU:
        return {}
    found = describe(device)
    settings = f"CUBLAS_WORKSPACE_CONFIG={os.environ.get('CUBLAS_WORKSPACE_CONFIG', '')}"
    return {
        "device": f"{found.name}, capability {found.capability or 'unknown'}, CUDA {torch.version.cuda}, {settings}"
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
