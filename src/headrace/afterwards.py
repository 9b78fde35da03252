"""What one does with a trained run: evaluate it, export it."""

from __future__ import annotations

import asyncio
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from headrace.assembly import assemble_evaluation, resolve_objective
from headrace.backends.base import Backend
from headrace.checkpoint import is_checkpoint, list_checkpoints, load_checkpoint
from headrace.config import RunConfig
from headrace.errors import ConfigError
from headrace.registry import resolve


def evaluate_run(config: RunConfig, checkpoint: Path | None = None) -> dict[str, float]:
    """Evaluate, print a table and return the metrics. `checkpoint` is a checkpoint or a run folder (its newest)."""
    if not config.eval.sets:
        raise ConfigError("the run file has no evaluation set; add a section [eval.sets.NAME] with tasks")
    if checkpoint is not None:
        _require_checkpoint(checkpoint)
    metrics = asyncio.run(_evaluate(resolve_objective(config), checkpoint))
    table = Table("set", "metric", "value", title=f"evaluation of {checkpoint or config.model.name}")
    for key, value in metrics.items():
        name, metric = key.removeprefix("eval/").split("/", 1)
        table.add_row(name, metric, f"{value:.4g}")
    Console().print(table)
    return metrics


def export_run(run_dir: Path, out: Path) -> Path:
    """A run's newest checkpoint (or a given one) as an ordinary model folder."""
    _require_checkpoint(run_dir)
    home = run_dir.resolve().parent.parent if is_checkpoint(run_dir) else run_dir
    config = config_of(home)
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"{out} exists and is not empty; choose another folder")
    asyncio.run(_export(config, run_dir, out))
    return out


def config_of(run_dir: Path) -> RunConfig:
    """The configuration that a run has."""
    try:
        return RunConfig.model_validate_json((run_dir / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the configuration of the run {run_dir}: {error}") from None


async def _export(config: RunConfig, checkpoint: Path, out: Path) -> None:
    backend: Backend = await asyncio.to_thread(resolve("backend", config.backend.name), config)
    try:
        await load_checkpoint(checkpoint, backend, _tell)
        await backend.export(out)
    finally:
        await backend.close()


async def _evaluate(config: RunConfig, checkpoint: Path | None) -> dict[str, float]:
    parts = await asyncio.to_thread(assemble_evaluation, config)
    try:
        if checkpoint is not None:
            await load_checkpoint(checkpoint, parts.backend, _tell)
        await parts.backend.publish(0)  # an engine of its own would have the weights of the model as it was loaded
        with Progress(console=Console(stderr=True), transient=True) as progress:
            bars = {}

            def show(name: str, done: int, total: int) -> None:
                if name not in bars:
                    bars[name] = progress.add_task(name, total=total)
                progress.update(bars[name], completed=done)

            return await parts.evaluator.evaluate(parts.eval_manager, show)
    finally:
        await parts.engine.close()
        await parts.backend.close()


def _require_checkpoint(path: Path) -> None:
    """Before anything is loaded."""
    if not is_checkpoint(path) and not list_checkpoints(path):
        raise ConfigError(f"{path} is neither a checkpoint nor a run folder with one")


def _tell(text: str) -> None:
    Console(stderr=True).print(text, markup=False, highlight=False)
