"""`headrace doctor --plan FILE`: how much memory a run needs, and whether this machine's device has it."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from headrace.errors import ConfigError


def show_plan(file: Path, memory_gib: float | None) -> int:
    """Print the table of a run file; 0 if it fits, or if there is nothing to compare it with."""
    from rich.table import Table
    from rich.text import Text

    from headrace.config.loading import load_config
    from headrace.models.catalog import resolve_model
    from headrace.models.plan import gib, memory_plan, read_shape
    from headrace.tracking.terminal import Console

    config = load_config(file, objects=())
    if config.backend.name != "local":
        raise ConfigError(f'backend "{config.backend.name}" does not use this machine\'s memory for the model')
    folder = Path(resolve_model(config.model.name))
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f'the plan needs the config.json of model "{config.model.name}", and it is not here; fetch it'
        )
    device, memory = _device(config.model.device) if memory_gib is None else ("a device", memory_gib * 2**30)
    if device == "cpu":
        config = config.model_copy(update={"model": config.model.model_copy(update={"device": "cpu"})})
    shape = read_shape(folder)
    plan = memory_plan(config, shape)
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(justify="right")
    table.add_row(Text("weights of the model"), Text(f"{shape.parameters / 1e6:,.1f} million"))
    for name, size in plan.rows():
        table.add_row(Text(name), Text(size))
    console = Console(highlight=False)
    console.print(table)
    if memory is None:
        console.print(Text(f"\nhow much memory {device} has is not known; give --memory GIB to compare"))
        return 0
    fits = plan.fits(memory)
    verdict = "fits" if fits else "does not fit"
    console.print(
        Text(
            f"\n{verdict}: {gib(plan.peak)} of the {gib(memory)} of {device}",
            style="bold green" if fits else "bold yellow",
        )
    )
    if not fits:
        console.print(Text(_remedies(config), style="bold"), soft_wrap=True)
    return 0 if fits else 1


def _device(name: str) -> tuple[str, float | None]:
    """The device that the run would use here, and its memory."""
    try:
        devices: Any = importlib.import_module("headrace.models.device")
    except ImportError as error:
        raise ConfigError(f"which device there is is not known without torch ({error}); give --memory GIB") from None
    found = devices.resolve_device(name)
    if found.type == "cpu":
        from headrace.cli.doctor import host_memory

        return "cpu", host_memory()
    return str(found), devices.describe(found).memory


def _remedies(config: Any) -> str:
    backend, found = config.backend, []
    if not config.model.lora.rank:
        found.append("train adapters (model.lora.rank = 16)")
        if config.model.device != "cpu" and not config.optimizer.offload:
            found.append("optimizer.offload = true")
    elif config.model.quantize == "none":
        found.append('model.quantize = "nf4"')
    if not backend.gradient_checkpointing:
        found.append("backend.gradient_checkpointing = true")
    found.append(f"backend.micro_batch_tokens = {max(1, backend.micro_batch_tokens // 2)}")
    found.append(f"backend.logits_chunk = {max(1, backend.logits_chunk // 4)}")
    return f"what helps: {', '.join(found)}"
