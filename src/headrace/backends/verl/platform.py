"""Which of verl's platforms a run uses, and what it needs there. verl reads its platform once, when it is imported, so
this comes first."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import torch

from headrace.config import RunConfig
from headrace.registry import load_object

_CPU = "headrace.backends.verl.cpu"


def on_gpus(config: RunConfig) -> bool:
    """Whether every rank has a GPU of its own."""
    return config.cluster.learner.get("GPU", 0) > 0


def strategy_of(config: RunConfig) -> Any:
    """Which of verl's engines trains, as the run file says it; checked later."""
    return config.backend.verl.get("engine", {}).get("strategy", "fsdp2")


def platform_variables(config: RunConfig) -> dict[str, str]:
    """What says it to verl: nothing for the platforms of its own, which it finds by itself."""
    return {} if on_gpus(config) else {"VERL_PLATFORM": "cpu", "VERL_USE_EXTERNAL_MODULES": _CPU}


def choose_platform(config: RunConfig) -> None:
    """For this process."""
    os.environ.update(platform_variables(config))
    os.environ.setdefault("VERL_LOGGING_LEVEL", "WARN")
    if "verl.plugin.platform" in sys.modules and not on_gpus(config):  # an agent loop has imported verl before
        load_object(f"{_CPU}:use_cpu")()


def missing_for_megatron(config: RunConfig) -> Iterator[str]:
    """What this machine lacks to start verl's Megatron engine, a few words each."""
    vanilla = config.backend.verl.get("engine", {}).get("vanilla_mbridge", False)
    for module in ("megatron.core", "mbridge" if vanilla else "megatron.bridge"):
        if not _is_installed(module):
            yield f"{module} is not installed"
    if config.cluster.address in ("", "local") and not torch.cuda.is_available():
        yield "this machine has no GPU"


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False
