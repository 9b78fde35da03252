"""`headrace doctor --plan FILE`: how much memory a run needs, and whether this machine's device has it."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.errors import ConfigError

if TYPE_CHECKING:
    from headrace.config import RunConfig
    from headrace.models.plan import MemoryPlan, ModelShape


def show_plan(file: Path, words: Sequence[str], memory_gib: float | None) -> int:
    """Print the table of a run file with overrides; 0 if it fits, or if there is nothing to compare it with."""
    from rich.table import Table
    from rich.text import Text

    from headrace.cli.train import read_run
    from headrace.models.plan import gib, memory_plan, read_shape
    from headrace.tracking.terminal import Console

    config = read_run(str(file), words, "--plan", "--memory")
    if config.backend.name != "local":
        raise ConfigError(f'the plan is of one device and the backend "local"; {file} has "{config.backend.name}"')
    shape = read_shape(config.model.name)
    device, memory = _device(config.model.device) if memory_gib is None else ("a device", memory_gib * 2**30)
    if device == "cpu":
        config = _changed(config, "model.device", "cpu")
    plan = memory_plan(config, shape)
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(justify="right")
    for name, size in plan.rows():
        table.add_row(Text(name), Text(size))
    console = Console(highlight=False)
    console.print(Text(_planned_for(config, shape, device)), soft_wrap=True)
    console.print(table)
    if memory is None:
        console.print(Text(f"\nhow much memory {device} has is not known; give --memory GIB to compare"))
        return 0
    fits = plan.fits(memory)
    verdict = "fits" if fits else "does not fit"
    console.print(
        Text(
            f"\n{verdict}: {gib(plan.peak)} of the {gib(memory)} of {'the CPU' if device == 'cpu' else device}",
            style="bold green" if fits else "bold yellow",
        )
    )
    if fits and device != "cpu" and (said := _server_setting(config, shape, memory)):
        console.print(Text(said))
    if not fits:
        console.print(Text(_remedies(config, shape, plan), style="bold"), soft_wrap=True)
    return 0 if fits else 1


def _planned_for(config: RunConfig, shape: ModelShape, device: str) -> str:
    """What the numbers hold for: the device and the types decide most of them."""
    from headrace.models.plan import planned_types

    forward, master = planned_types(config)
    kind = {"cpu": "the CPU", "auto": "an accelerator"}.get(config.model.device, config.model.device)
    where = kind if device in ("cpu", "a device") else device
    stored = config.model.quantize
    types = forward if stored == "none" else f"{stored}, computed in {forward}"
    return f"planned for {where}: {shape.parameters / 1e6:,.1f} million weights in {types}, optimizer in {master}\n"


def _server_setting(config: RunConfig, shape: ModelShape, memory: float) -> str:
    """What a server on the learner's device is started with; empty if there is none."""
    from headrace.config.derived import starts_beside
    from headrace.models.plan import server_share

    if not starts_beside(config):
        return ""
    setting = {"vllm": "--gpu-memory-utilization", "sglang": "--mem-fraction-static"}[config.engine.name]
    return f"its server is started with {setting} {server_share(config, shape, memory):.2f}"


def _device(name: str) -> tuple[str, float | None]:
    """The device that the run would use here, and its memory."""
    try:
        devices: Any = importlib.import_module("headrace.models.device")
    except ImportError as error:
        raise ConfigError(f"which device there is is not known without torch ({error}); give --memory GIB") from None
    try:
        found = devices.resolve_device(name)
    except ConfigError as error:
        raise ConfigError(f"{error}; to plan for a device that is elsewhere, give --memory GIB") from None
    if found.type == "cpu":
        from headrace.cli.doctor import host_memory

        return "cpu", host_memory()
    return str(found), devices.describe(found).memory


def _remedies(config: RunConfig, shape: ModelShape, plan: MemoryPlan) -> str:
    """Settings that make the larger phase smaller, each by itself."""
    from headrace.models.plan import gib, memory_plan

    found: list[str] = []
    for path, value, shown in _candidates(config):
        peak = memory_plan(_changed(config, path, value), shape).peak
        if gib(peak) != gib(plan.peak) and peak < plan.peak:
            found.append(f"{path} = {shown} ({gib(peak)})")
    if not found:
        return "no setting makes it smaller; take a smaller model or a larger device"
    phase = "training" if plan.training >= plan.generating else "generating"
    return f"{phase} takes the most; what helps, each by itself: {', '.join(found)}"


def _candidates(config: RunConfig) -> Iterator[tuple[str, Any, str]]:
    """(setting, value, the value as in a run file)"""
    backend, rollout = config.backend, config.rollout
    if not config.model.lora.rank:
        yield "model.lora.rank", 16, "16"
        if config.model.device != "cpu" and backend.name != "fsdp" and not config.optimizer.offload:
            yield "optimizer.offload", True, "true"
    elif config.model.quantize == "none":
        yield "model.quantize", "nf4", '"nf4"'
    if not backend.gradient_checkpointing:
        yield "backend.gradient_checkpointing", True, "true"
    in_flight = min(config.engine.max_batch, config.trainer.batch_size * rollout.group_size)
    numbers = {
        "backend.micro_batch_tokens": backend.micro_batch_tokens // 2,
        "backend.logits_chunk": backend.logits_chunk // 4,
        "engine.max_batch": in_flight // 2,
        "rollout.max_tokens": rollout.max_tokens // 2,
        "engine.max_model_length": (config.engine.max_model_length or 0) // 2,
    }
    for path, number in numbers.items():
        if number:
            yield path, number, str(number)


def _changed(config: Any, path: str, value: Any) -> Any:
    """A copy with one setting changed."""
    name, _, rest = path.partition(".")
    return config.model_copy(update={name: _changed(getattr(config, name), rest, value) if rest else value})
