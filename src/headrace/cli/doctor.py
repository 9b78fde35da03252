"""`headrace doctor`: what this machine has, and what to do before the first run."""

from __future__ import annotations

import asyncio
import importlib
import math
import os
import platform
import shutil
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from headrace.errors import ConfigError, install_line

EXAMPLE = "headrace train examples/countdown.toml"

# The packages of each extra, as in pyproject.toml; a test holds the two together.
EXTRAS: dict[str, tuple[str, ...]] = {
    "local": ("jinja2", "peft", "pyyaml", "safetensors", "tokenizers", "torch", "transformers", "xxhash"),
    "gguf": ("gguf",),
    "plot": ("matplotlib",),
    "parquet": ("pyarrow",),
    "remote": ("httpx2",),
    "gateway": ("starlette", "uvicorn"),
    "mcp": ("mcp",),
    "serve": ("protobuf",),
    "tinker": ("tinker",),
    "math": ("math-verify",),
    "datasets": ("datasets",),
    "reasoning-gym": ("reasoning-gym",),
    "ray": ("ray",),
    "verl": ("cachetools", "fastapi", "verl", "xxhash"),
    "wandb": ("wandb",),
    "mlflow": ("mlflow-skinny",),
    "trackio": ("trackio",),
    "tensorboard": ("tensorboard",),
}
_NEEDED_EXTRA = "local"
_GIB = 2**30

Row = tuple[str, str]


def doctor(
    *overrides: Annotated[str, Parameter(allow_leading_hyphen=True, show=False)],
    plan: Path | None = None,
    memory: float | None = None,
) -> int:
    """Show what this machine has and whether a first run will work.

    Parameters
    ----------
    plan
        A run file: show how much memory it needs on its device, and whether it fits. Further run files and
        `--section.key value` change its settings, as with `headrace train`.
    memory
        With --plan: compare with so many GiB, not with the device of this machine.
    """
    if memory is not None and not (math.isfinite(memory) and memory > 0):
        raise ConfigError(f"--memory is a number of GiB above 0, such as 24, got {memory:g}")
    if plan is not None:
        from headrace.cli.plan import show_plan

        return show_plan(plan, overrides, memory)
    if overrides:
        from headrace.cli.train import refuse_unknown

        refuse_unknown(overrides, ("--plan", "--memory"))
        raise ConfigError(f"{overrides[0]} changes a run file; give --plan FILE, too")
    if memory is not None:
        raise ConfigError(f"--memory {memory:g} is what a plan is compared with; give --plan FILE, too")
    from rich.table import Table
    from rich.text import Text

    from headrace.tracking.terminal import Console

    torch, torch_problem = _import_torch()
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in (*_machine(), *_tensor_library(torch, torch_problem), *_packages(), *_models()):
        table.add_row(Text(name), Text(value))  # Text: ".[local]" is not markup
    console = Console(highlight=False)
    console.print(table)
    first = next(_obstacles(torch_problem), None)
    verdict = f"ready for: {EXAMPLE}" if first is None else f"first: {first}"
    console.print(Text(f"\n{verdict}", style="bold green" if first is None else "bold yellow"), soft_wrap=True)
    return 0 if first is None else 1


def _machine() -> Iterator[Row]:
    yield "Python", f"{platform.python_version()} ({platform.python_implementation()})"
    yield "system", f"{platform.system()} {platform.release()} {platform.machine()}"
    yield "cores", _cores()
    yield "memory", _memory()
    yield "disk here", f"{shutil.disk_usage(Path.cwd()).free / _GIB:.1f} GiB free in {Path.cwd()}"
    yield "sandbox", _sandbox()


def _tensor_library(torch: Any, problem: str) -> Iterator[Row]:
    threads = f"OMP_NUM_THREADS {os.environ.get('OMP_NUM_THREADS', 'not set')}"
    if torch is None:
        yield "threads", f"{threads}; torch {problem}"
        yield "GPU", "not known without torch"
        return
    yield "threads", f"{threads}; torch uses {torch.get_num_threads()}"
    yield from _devices()
    there = importlib.import_module("headrace.models.kernels.cpu").kernels() is not None
    why = "HEADRACE_NATIVE is 0" if os.environ.get("HEADRACE_NATIVE") == "0" else "they need a C compiler"
    yield "native kernels", "there" if there else f"none ({why}); torch's operations are used"


def _devices() -> Iterator[Row]:
    devices: Any = importlib.import_module("headrace.models.device")
    found = devices.accelerators()
    for one in found:
        facts = [one.name]
        if one.memory:
            free = f", {one.free / _GIB:.1f} GiB free" if one.free is not None else ""
            facts.append(f"{one.memory / _GIB:.1f} GiB{free}")
        facts += [f"capability {one.capability}"] if one.capability else []
        facts.append("bfloat16" if one.bfloat16 else "no bfloat16: model.dtype is float32")
        yield f"device {one.device}", "; ".join(facts)
    if not found:
        yield "GPU", "none seen; runs use the CPU"
    yield "attention", devices.likely_attention()


def _packages() -> Iterator[Row]:
    for extra, packages in EXTRAS.items():
        missing = [package for package in packages if _version(package) is None]
        there = [f"{package} {_version(package)}" for package in packages if package not in missing]
        if missing:
            there.append(f"missing: {', '.join(missing)} ({install_line(extra)})")
        yield f"extra {extra}", ", ".join(there)


def _models() -> Iterator[Row]:
    from headrace.cli.model import model_state
    from headrace.models.catalog import CATALOG

    for name in CATALOG:
        yield f"model {name}", model_state(name)[1]


def _obstacles(torch_problem: str) -> Iterator[str]:
    """What stands between the user and the example, the first thing to do first."""
    from headrace.cli.model import model_state

    if any(_version(package) is None for package in EXTRAS[_NEEDED_EXTRA]):
        yield f"in the clone: {install_line(_NEEDED_EXTRA)}"
    elif torch_problem:
        yield f"mend torch, which {torch_problem}"
    usable, problem = model_state("bundled")
    if not usable:
        yield problem
    if not os.access(Path.cwd(), os.W_OK):
        yield f"go to a folder you can write to; {Path.cwd()} is not"


def _import_torch() -> tuple[Any, str]:
    """torch, or None and why it is not there. A broken installation fails in many ways; none may stop the doctor."""
    if _version("torch") is None:
        return None, "is not installed"
    try:
        return importlib.import_module("torch"), ""
    except Exception as error:
        return None, f"cannot be imported ({type(error).__name__}: {error})"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cores() -> str:
    total = os.cpu_count() or 1
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else total
    return str(total) if usable == total else f"{usable} of {total} usable by this process"


def host_memory() -> float | None:
    """Bytes of memory that this machine has available; None if it does not say."""
    facts = _meminfo()
    return facts.get("MemAvailable", facts.get("MemTotal"))


def _memory() -> str:
    facts = _meminfo()
    if "MemTotal" in facts:
        return f"{facts['MemTotal'] / _GIB:.1f} GiB, {facts.get('MemAvailable', 0) / _GIB:.1f} GiB available"
    if "SC_PHYS_PAGES" in getattr(os, "sysconf_names", {}):
        return f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / _GIB:.1f} GiB"
    return "not known on this system"


def _sandbox() -> str:
    """The mode in which the judger "code" would run programs here."""
    from headrace.errors import InfrastructureError
    from headrace.judge.cgroups import parents
    from headrace.judge.sandbox import Sandbox

    try:
        mode = asyncio.run(Sandbox().mode())
    except (InfrastructureError, OSError) as error:
        return f'none; the judger "code" cannot run programs here: {error}'
    groups = ", ".join(sorted(parents())) or "none can be made"
    return f"{mode}; control groups: {groups}"


def _meminfo() -> dict[str, int]:
    """Bytes by name from Linux's /proc/meminfo; empty elsewhere."""
    path = Path("/proc/meminfo")
    if not path.is_file():
        return {}
    lines = (line.split() for line in path.read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if words[-1] == "kB"}
