"""How does the cost of a step grow with group size, batch, length, turns, and concurrent episodes?

    python benchmarks/scaling.py [--rounds 5] [--steps 5] [--plot FILE] [--json FILE] [--quick]

Prints a Markdown table. One axis at a time is doubled around a base point (8 rollouts of 4 prompts, one call of 32 new
tokens), in synchronous training of the bundled model. The end of sequence is ignored, so that the amount of work is
exact. In a conversation of several turns each call continues all earlier turns. On the last axis the size is the number
of concurrent episodes, with replies of 8 tokens; the engine decodes as many of them together as it does by default.

Each round runs every point, alternately forwards and backwards, and takes its fastest step after the first. Shown are
the median over the rounds and, in brackets, the range. The exponent is log(ratio of seconds) / log(ratio of sizes),
against the previous point of the same round: 1 is proportional growth, above 1.15 counts as super-linear. `--quick`
runs every other size, up to 256 episodes, with fewer rounds and steps.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, replace
from io import StringIO
from itertools import pairwise
from math import log
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Self

from _arguments import STOPPED, parsed

from headrace import UnifiedTrainer
from headrace.config.loading import build_config
from headrace.data.task import Task, load_tasks
from headrace.errors import ConfigError, HeadraceError
from headrace.registry import load_object
from headrace.rollout.model_client import Model

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SUPER_LINEAR = 1.15
QUESTION = "Are you sure?"
_COLORS = {"step": "#0072B2", "generate": "#E69F00", "train": "#009E73"}  # distinct for colour-blind readers
_INK, _FAINT = "#333333", "#E4E4E4"


@dataclass(frozen=True)
class Point:
    """The work of one step."""

    group: int = 8
    prompts: int = 4
    tokens: int = 32
    """New ones, of each call."""
    turns: int = 1

    @property
    def episodes(self) -> int:
        return self.group * self.prompts

    @property
    def generated(self) -> int:
        """Tokens that a step samples."""
        return self.episodes * self.turns * self.tokens


@dataclass(frozen=True)
class Spent:
    """What one step took, and where."""

    step_s: float
    generate_s: float
    train_s: float


@dataclass(frozen=True)
class Spread:
    """Over all rounds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        return cls(median(values), min(values), max(values))

    def show(self, digits: int) -> str:
        return f"{self.median:.{digits}f} ({self.low:.{digits}f}–{self.high:.{digits}f})"


@dataclass(frozen=True)
class Row:
    """A point on its axis."""

    size: int
    point: Point
    step_s: Spread
    generate_s: Spread
    train_s: Spread
    exponent: Spread | None
    """From the point before; None at the first."""

    @property
    def us_per_token(self) -> float:
        return 1e6 * self.step_s.median / self.point.generated

    @property
    def super_linear(self) -> bool:
        return self.exponent is not None and self.exponent.median > SUPER_LINEAR


class Conversation:
    """Asks, and asks again; replies have their full length whatever the model says."""

    def __init__(self, turns: int) -> None:
        self._turns = turns

    async def run(self, task: Task, model: Model) -> float:
        messages, said = [*task.messages], 0
        for _ in range(self._turns):
            reply = await model.chat(messages, ignore_eos=True)
            said += sum(reply.completion_ids)
            messages += [reply.message, {"role": "user", "content": QUESTION}]
        return float(said % 1009)  # differs within a group


def make_axes(quick: bool) -> dict[str, dict[int, Point]]:
    """Per axis the points by size."""
    factor, base = 4 if quick else 2, Point()
    return {
        "group size": {n: replace(base, group=n) for n in _sizes(2, 64, factor)},
        "batch (prompts)": {n: replace(base, prompts=n) for n in _sizes(1, 32, factor)},
        "length (new tokens)": {n: replace(base, tokens=n) for n in _sizes(16, 256, factor)},
        "turns": {n: replace(base, turns=n) for n in _sizes(1, 8, factor)},
        "concurrent episodes": {
            n: replace(base, prompts=n // base.group, tokens=8) for n in _sizes(16, 256 if quick else 1024, factor)
        },
    }


def _sizes(first: int, last: int, factor: int) -> list[int]:
    return [first * factor**power for power in range(32) if first * factor**power <= last]


def train(point: Point, steps: int, tasks: Sequence[Task]) -> list[Spent]:
    """A run in this process; what its steps took."""
    with tempfile.TemporaryDirectory() as folder:
        config = build_config(
            {
                "run": {"dir": folder},
                "model": {"name": "bundled"},
                "rollout": {"group_size": point.group, "max_tokens": point.tokens, "max_concurrent": point.episodes},
                "trainer": {"steps": steps, "batch_size": point.prompts, "save_last": False},
                "track": {"trackers": ["jsonl"], "plot": False},
            }
        )
        with redirect_stdout(StringIO()):
            run_dir = UnifiedTrainer(config, Conversation(point.turns), tasks).fit().run_dir
        rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    counted = [row for row in rows if row["step"]]
    for row in counted:
        _check_work(row, point)
    return [Spent(row["time/step_s"], row["time/generate_s"], row["time/train_s"]) for row in counted]


def _check_work(row: Mapping[str, float], point: Point) -> None:
    """Check that the run did the amount of work that the point says."""
    assert row["tokens/generated"] == row["tokens/trained"] == point.generated, row
    assert row["batch/rows"] == point.episodes, "a conversation was torn into several rows"


def measure(points: Sequence[Point], rounds: int, steps: int) -> dict[Point, list[Spent]]:
    """Per point the fastest step of each round."""
    tasks = load_tasks("countdown", split="train", count=1024)
    train(Point(), 1, tasks)  # what only the first run of a process pays
    fastest: dict[Point, list[Spent]] = {point: [] for point in points}
    for number in range(rounds):
        for point in points if number % 2 == 0 else reversed(points):
            spent = train(point, 1 + steps, tasks)[1:]
            if len(spent) < steps:  # the trainer has taken the interrupt, and ended its run
                raise SystemExit(STOPPED)
            fastest[point].append(min(spent, key=lambda step: step.step_s))
            print(f"round {number + 1} of {rounds}: {point}", file=sys.stderr, flush=True)
    return fastest


def to_rows(axis: Mapping[int, Point], fastest: Mapping[Point, Sequence[Spent]]) -> list[Row]:
    """The rows of one axis."""
    exponents: dict[int, list[float]] = {}
    for (size, point), (next_size, next_point) in pairwise(axis.items()):
        pairs = zip(fastest[point], fastest[next_point], strict=True)
        exponents[next_size] = [log(two.step_s / one.step_s) / log(next_size / size) for one, two in pairs]
    return [
        Row(
            size,
            point,
            step_s=Spread.of([spent.step_s for spent in fastest[point]]),
            generate_s=Spread.of([spent.generate_s for spent in fastest[point]]),
            train_s=Spread.of([spent.train_s for spent in fastest[point]]),
            exponent=Spread.of(exponents[size]) if size in exponents else None,
        )
        for size, point in axis.items()
    ]


# ---- what is shown ---------------------------------------------------------------------------------------------------


def print_table(table: Mapping[str, Sequence[Row]]) -> None:
    """All axes, and what grew faster than in proportion."""
    heads = ["axis", "size", "tokens", "s per step", "generate (s)", "train (s)", "µs per token", "exponent"]
    print("| " + " | ".join(heads) + " |")
    print("| --- |" + " ---: |" * (len(heads) - 1))
    for name, rows in table.items():
        for row in rows:
            exponent = "" if row.exponent is None else row.exponent.show(2) + " !" * row.super_linear
            print(
                f"| {name} | {row.size} | {row.point.generated:,} | {row.step_s.show(3)} | "
                f"{row.generate_s.median:.3f} | {row.train_s.median:.3f} | {row.us_per_token:.0f} | {exponent} |"
            )
    steep = [f"{name} to {row.size}" for name, rows in table.items() for row in rows if row.super_linear]
    print(f"\nexponent above {SUPER_LINEAR}: {', '.join(steep) or 'none'}")


def draw(table: Mapping[str, Sequence[Row]], path: Path) -> None:
    """A panel per axis, both scales logarithmic, with the line of proportional growth through the first point."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12)
    figure = Figure(figsize=(13.6, 8.0), dpi=150, layout=layout)
    FigureCanvasAgg(figure)  # no pyplot: it keeps global state and may look for a display
    figure.suptitle("Seconds per step", color=_INK, fontsize=13, fontweight="bold")
    panels = figure.subplots(2, 3).flatten()
    first, *_ = drawn = [
        _draw_axis(axes, name, rows) for axes, (name, rows) in zip(panels, table.items(), strict=False)
    ]
    for axes in panels[len(drawn) :]:
        axes.set_axis_off()
        axes.legend(*first.get_legend_handles_labels(), frameon=False, fontsize=11, loc="center left", labelcolor=_INK)
    figure.savefig(path)


def _draw_axis(axes: Axes, name: str, rows: Sequence[Row]) -> Axes:
    from matplotlib.ticker import LogLocator

    sizes = [row.size for row in rows]
    proportional = [rows[0].step_s.median * size / sizes[0] for size in sizes]
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.plot(sizes, proportional, color="#999999", linestyle="--", linewidth=1.2, label="proportional growth")
    for part, color in _COLORS.items():
        spreads: list[Spread] = [getattr(row, f"{part}_s") for row in rows]
        wide = 2.2 if part == "step" else 1.2
        axes.plot(
            sizes, [f.median for f in spreads], color=color, linewidth=wide, marker="o", markersize=2 * wide, label=part
        )
        axes.fill_between(
            sizes, [f.low for f in spreads], [f.high for f in spreads], color=color, alpha=0.15, linewidth=0
        )
    axes.set_title(name, loc="left", color=_INK, fontsize=11)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#999999")
    axes.grid(axis="y", color=_FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_INK, labelsize=9, color="#999999")
    return axes


def _check_plot(path: Path | None) -> None:
    """Before the runs, not after them: is there what it takes to draw?"""
    if path is None:
        return
    load_object("matplotlib.figure:Figure")
    if path.suffix != ".png":
        raise ConfigError(f"--plot must end in .png, got {path}")


def _as_json(table: Mapping[str, Sequence[Row]]) -> dict[str, Any]:
    def flat(row: Row) -> dict[str, Any]:
        derived = {"generated": row.point.generated, "us_per_token": row.us_per_token, "super_linear": row.super_linear}
        return {**asdict(row), **derived}

    return {name: [flat(row) for row in rows] for name, rows in table.items()}


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5, help="measured steps per run, after the first")
    parser.add_argument("--plot", type=Path, help="draw a chart (PNG); needs the extra plot")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true")
    args = parsed(parser, {"rounds": 2, "steps": 2})
    rounds, steps = args.rounds, args.steps
    try:
        _check_plot(args.plot)
    except HeadraceError as error:
        parser.error(str(error))
    axes = make_axes(args.quick)
    points = list(dict.fromkeys(point for axis in axes.values() for point in axis.values()))
    fastest = measure(points, rounds, steps)
    table = {name: to_rows(axis, fastest) for name, axis in axes.items()}
    print_table(table)
    if args.plot:
        draw(table, args.plot)
    if args.json:
        found = {"rounds": rounds, "steps": steps, "super_linear_above": SUPER_LINEAR, "axes": _as_json(table)}
        args.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
