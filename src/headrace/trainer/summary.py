"""What a person sees at the end of a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from headrace.config import RunConfig
from headrace.errors import MissingExtraError
from headrace.registry import load_object
from headrace.run.checkpoint import list_checkpoints
from headrace.tracking.terminal import Console, working
from headrace.utils.own_command import own_command

if TYPE_CHECKING:
    from headrace.trainer.trainer import RunResult


def summarize(result: RunResult, config: RunConfig) -> None:
    """Before and after, the curve, and where to look next; of no use to who has stopped reading."""
    picture = _draw(result, config)
    with suppress(BrokenPipeError):
        _print(result, config, picture)


def _print(result: RunResult, config: RunConfig, picture: str | None) -> None:
    console = Console()
    finished = config.eval.after and not result.interrupted and result.steps
    if result.last_evaluation and (finished or result.last_evaluation != result.first_evaluation):
        console.print(_table(result, config))
    lines = [("run folder", str(result.run_dir))]
    if config.ledger.enabled:
        lines.append(("look at it", f"{own_command()} view {result.run_dir}"))
    if picture:
        lines.append(("curves", picture))
    if result.interrupted:
        lines.append(("stopped", f"after step {result.steps} of {config.trainer.steps}"))
        resume = f"{own_command()} train --resume {result.run_dir}"
        lines.append(("resume", f"the same command resumes from here, or {resume}"))
    else:
        lines += _where_to_look(result, config)
    grid = Table.grid(padding=(0, 2))
    for name, text in lines:
        grid.add_row(Text(name, style="bold"), Text(text, overflow="fold"))
    console.print(Panel(grid, title="stopped" if result.interrupted else "done", expand=False))


def _where_to_look(result: RunResult, config: RunConfig) -> Iterator[tuple[str, str]]:
    """Only what is there: trackers, checkpoints and this repository's pages may each be missing."""
    metrics = [name for name in ("metrics.jsonl", "tensorboard/") if (result.run_dir / name).exists()]
    if metrics:
        yield "metrics", f"{result.run_dir}/{' and '.join(metrics)}"
    if config.backend.name != "tinker" and list_checkpoints(result.run_dir):  # its weights are on the service
        yield "the model", f"{own_command()} export {result.run_dir} FOLDER"
    pages = [name for name in ("docs/tutorial.md", "docs/workflows.md") if Path(name).exists()]
    if pages:
        yield "next", f"an agent of your own: {' and '.join(pages)}"


def _table(result: RunResult, config: RunConfig) -> Table:
    table = Table("evaluation", "before", "after", "change", title="pass@1 with its 95% interval")
    for name in config.eval.sets:
        before, after = (_score(e, name) for e in (result.first_evaluation, result.last_evaluation))
        key = f"eval/{name}/pass@1"
        change = ""
        if key in result.first_evaluation and key in result.last_evaluation:
            change = f"{100 * (result.last_evaluation[key] - result.first_evaluation[key]):+.1f} points"
        table.add_row(name, before, after, change)
    return table


def _score(evaluation: dict[str, float], name: str) -> str:
    key = f"eval/{name}/pass@1"
    if key not in evaluation:
        return "–"
    return f"{evaluation[key]:.1%}  [{evaluation[key + '_low']:.1%}, {evaluation[key + '_high']:.1%}]"


def _draw(result: RunResult, config: RunConfig) -> str | None:
    if not config.track.plot or "jsonl" not in config.track.trackers:
        return None
    try:
        with working("drawing the curves"):
            picture = load_object("headrace.tracking.plot:draw_curves")(result.run_dir)
    except MissingExtraError:
        return None
    return str(picture) if picture else None
