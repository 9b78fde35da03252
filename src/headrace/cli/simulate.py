"""`headrace simulate`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from headrace.cli.train import RunFile, read_run

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rich.table import Table

    from headrace.config import FleetSection
    from headrace.scheduling.simulation.grid import GridPoint, Simulated
    from headrace.scheduling.simulation.tally import Outcome

USAGE = "Usage: headrace simulate FILE.toml [OVERLAY.toml ...] [--section.key value ...] [OPTIONS]"


def simulate(
    file: RunFile,
    /,
    *overrides: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)],
    chart: Annotated[Path | None, Parameter(help="Draw a picture (PNG, SVG or PDF); needs the extra plot.")] = None,
    json: Annotated[Path | None, Parameter(help="Write all results, with the staleness distribution.")] = None,
) -> None:
    """Try schedules before paying for them: the loop of a run, without a model.

    Coordinator, buffer and staleness policy are those of training, on a virtual
    clock; durations are given, or those of a run. Thousands of steps take
    seconds. In the run file:

        [simulate]
        group_s = 20       # median seconds of a group; or, for measured ones,
        learn_s = 8        # from_run = "runs/NAME" in place of all of these
        slow_share = 0.1   # one task in ten ...
        slow_factor = 12   # ... takes twelve times as long

        [simulate.grid]    # every combination is simulated
        trainer.max_staleness = [0, 1, 2, 4]
        trainer.staleness = ["wait", "trust"]

    What the table shows:

    learner     share of the time in which it learns
    engine      groups that run, as a share of what rollout.max_concurrent
                allows
    staleness   of trained tokens, in versions: mean and maximum
    wasted      share of the generated tokens that is never trained, and of the
                time that they took
    slow        how often slow tasks are trained, relative to how often they
                are started, by groups and by tokens; 100% is no bias
    long        mean duration of trained groups, relative to that of all
    lost        nodes that were lost, and the share of generation that this cost
    sync        seconds of one weight sync
    cost        price of a million trained tokens

    The last three come with [simulate.fleet]: engine replicas, losses of nodes,
    how weights reach engines, and prices.

    Any setting can be given as `--section.key value`; `headrace train --help all`
    lists them. Not simulated: the forward pass in which "trust" measures old
    rows, evaluation, checkpoints, and that groups take longer the more run.
    """
    config = read_run(file, overrides, "--chart", "--json")
    from headrace.errors import ConfigError, boundary
    from headrace.scheduling.simulation.grid import grid_points
    from headrace.tracking.terminal import Console

    points = grid_points(config)
    _check_chart(chart)
    done = _with_progress(points)
    with boundary(ConfigError, "cannot write the results", OSError):  # first: who reads the table may leave
        written = [("results", _write(done, json))] if json is not None else []
        written += [("chart", _draw(done, chart))] if chart is not None else []
    console, table = Console(highlight=False), _table(done)
    # rather a wrapped line than a cut figure
    console.width = max(console.width, Console(width=1000).measure(table).maximum)
    console.print(table)
    for line in (_speed(done), *_notes(done), *(f"{what}: {path}" for what, path in written)):
        console.print(line, soft_wrap=True)


def _with_progress(points: list[GridPoint]) -> list[Simulated]:
    """Simulate all, and show progress."""
    from headrace.scheduling.simulation.grid import simulate_grid
    from headrace.tracking.terminal import working

    done: list[Simulated] = []
    with working(lambda: f"simulating schedule {len(done) + 1} of {len(points)}"):
        for item in simulate_grid(points):
            done.append(item)  # noqa: PERF402  (counted meanwhile)
    return done


_COLUMNS = (
    "groups/s", "steps/h", "learner", "engine", "staleness\nmean (max)", "wasted\ntokens", "\ntime", "slow\ngroups",
    "\ntokens", "long",
)  # fmt: skip


_FLEET: dict[str, tuple[Callable[[Simulated], bool], Callable[[Outcome], str]]] = {
    "lost\nnodes": (lambda item: bool(_fleet(item).mtbf_h), lambda found: str(found.lost_nodes)),
    "\ntime": (lambda item: bool(_fleet(item).mtbf_h), lambda found: f"{found.lost_time:.1%}"),
    "sync (s)": (lambda item: bool(_fleet(item).weights_gb), lambda found: f"{found.sync_s:.3g}"),
    "cost per\nM tokens": (
        lambda item: bool(_fleet(item).engine_price or _fleet(item).learner_price),
        lambda found: f"{found.cost_per_million:.4g}",
    ),
}
"""Columns of [simulate.fleet]: when they are shown, and what."""


def _fleet(item: Simulated) -> FleetSection:
    return item.point.config.simulate.fleet


def _table(done: Sequence[Simulated]) -> Table:
    from rich.table import Table

    names = list(done[0].point.settings)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in names:
        table.add_column(name.replace(".", ".\n", 1), style="bold", no_wrap=True)
    fleet = {column: show for column, (shown, show) in _FLEET.items() if any(map(shown, done))}
    for column in (*_COLUMNS, *fleet):
        table.add_column(column, justify="right", no_wrap=True)
    for item in done:
        found = item.outcome
        table.add_row(
            *(str(item.point.settings[name]) for name in names),
            f"{found.groups_per_s:.3g}",
            f"{3600 * found.steps_per_s:.4g}",
            f"{found.learner_busy:.0%}",
            f"{found.generation_busy:.0%}",
            f"{found.staleness_mean:.2f} ({found.staleness_max})",
            f"{found.wasted_tokens:.1%}",
            f"{found.wasted_time:.1%}",
            f"{found.slow_groups:.0%}",
            f"{found.slow_tokens:.0%}",
            f"{found.duration_bias:.0%}",
            *(show(found) for show in fleet.values()),
        )
    return table


def _notes(done: Sequence[Simulated]) -> list[str]:
    short = [item for item in done if item.outcome.staleness_max > item.outcome.warmup]
    if not short:
        return []
    oldest = max(item.outcome.staleness_max for item in short)
    return [
        f"the slowest groups come back after {oldest} versions or more, and the warm-up is "
        f"{short[0].outcome.warmup} steps: too few of them are in these results; raise simulate.steps"
    ]


def _speed(done: Sequence[Simulated]) -> str:
    virtual_s, wall_s = (sum(item.outcome.end_s for item in done), sum(item.wall_s for item in done))
    steps = sum(item.point.config.simulate.steps for item in done)
    return (
        f"{steps:,} steps of {_clock(virtual_s)} simulated in {_clock(wall_s)}: "
        f"{virtual_s / max(wall_s, 1e-9):,.0f} times faster than real time"
    )


def _clock(seconds: float) -> str:
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} seconds"


def _write(done: Sequence[Simulated], path: Path) -> Path:
    import json

    rows: list[dict[str, Any]] = [
        {"settings": item.point.settings, "wall_s": item.wall_s, **asdict(item.outcome)} for item in done
    ]
    path.write_text(json.dumps(rows, indent=2) + "\n")
    return path


def _check_chart(path: Path | None) -> None:
    """Before the simulation, not after it: is there what it takes to draw?"""
    if path is None:
        return
    from headrace.errors import ConfigError
    from headrace.registry import load_object

    load_object("headrace.tracking.simulation_plot:draw_simulations")
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise ConfigError(f"--chart must end in .png, .svg or .pdf, got {path}")


def _draw(done: Sequence[Simulated], path: Path) -> Path:
    from headrace.registry import load_object

    bar = load_object("headrace.tracking.simulation_plot:Bar")
    bars = [
        bar(item.point.label or "unchanged", found.learner_busy, found.generation_busy, found.groups_per_s,
            found.ages)
        for item in done
        for found in [item.outcome]
    ]  # fmt: skip
    return load_object("headrace.tracking.simulation_plot:draw_simulations")(bars, path)
