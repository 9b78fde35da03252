# pyright: reportMissingImports=false
"""The CPU as one of verl's platforms, and verl's FSDP engine on it: both through verl's own registries.

verl imports this module by its name (VERL_USE_EXTERNAL_MODULES) while it is itself being imported.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from verl.plugin.platform import PlatformBase, PlatformRegistry, get_platform, set_platform

_MEMORY = 1 << 34


def _nothing(*_: Any, **__: Any) -> None: ...


def _none_taken(*_: Any) -> int:
    return 0


def _device_module() -> SimpleNamespace:
    """torch.cpu, with what verl asks of torch.cuda."""
    own = {name: getattr(torch.cpu, name) for name in dir(torch.cpu) if not name.startswith("__")}
    memory = ("max_memory_allocated", "max_memory_reserved", "memory_allocated", "memory_reserved")
    ignored = ("empty_cache", "reset_peak_memory_stats", "set_device")
    return SimpleNamespace(
        **{
            **own,
            **dict.fromkeys(memory, _none_taken),
            **dict.fromkeys(ignored, _nothing),
            "mem_get_info": lambda *_: (_MEMORY, _MEMORY),
            "manual_seed": torch.manual_seed,
            "manual_seed_all": torch.manual_seed,
            "get_rng_state": lambda *_: torch.get_rng_state(),
            "set_rng_state": lambda state, *_: torch.set_rng_state(state),
            "current_device": lambda: "cpu",
            "device_count": lambda: 1,
            "is_available": lambda: True,
            "get_device_name": lambda *_: "CPU",
        }
    )


@PlatformRegistry.register("cpu")
class CpuPlatform(PlatformBase):
    """verl's interface to a kind of device. Methods that it documents as optional do nothing."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = _device_module()

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        return "cpu"

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        """There is one."""

    def synchronize(self, device_index: int | None = None) -> None:
        """Nothing is pending."""

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        """It has none."""

    def empty_cache(self) -> None:
        """There is none."""

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "HEADRACE_NO_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        """There is none."""

    def profiler_stop(self) -> None:
        """There is none."""

    def ray_resource_name(self) -> str:
        return "CPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def ray_resource_options(self, num_gpus: float) -> dict[str, Any]:
        return {"num_cpus": num_gpus}

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None


def use_cpu() -> None:
    """For a process that has imported verl before this platform was chosen."""
    if not isinstance(get_platform(), CpuPlatform):
        set_platform(CpuPlatform())


def join_group(timeout_s: float) -> None:
    """Meet the other ranks by gloo: verl, which would name the CPU's backend twice, takes a group that there is."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s))


def register_engine() -> None:
    """verl's FSDP2 engine, which it registers for accelerators only."""
    from verl.workers.engine import EngineRegistry
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    class CpuEngine(FSDPEngineWithLMHead):
        """As it is."""

    EngineRegistry.register(model_type="language_model", backend=["fsdp2"], device=["cpu"])(CpuEngine)
