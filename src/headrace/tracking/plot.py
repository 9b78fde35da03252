"""draw_curves: the reward and evaluation curves of a run as one picture. Needs matplotlib; import this module late."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator

from headrace.tracking.base import eval_sets
from headrace.tracking.jsonl import FILE_NAME, Rows, read_rows

_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")  # distinguishable by colour-blind readers
_INK, _FAINT = "#333333", "#E4E4E4"


def draw_curves(run_dir: Path) -> Path | None:
    """Draw `curves.png` into the run folder; None when there is nothing to draw."""
    rows = read_rows(run_dir / FILE_NAME)
    keys = {key for row in rows.values() for key in row}
    panels = [_draw_reward] if "reward/mean" in keys else []
    if eval_sets(keys):
        panels.append(_draw_eval)
    if not panels:
        return None
    figure = Figure(figsize=(6.4 * len(panels), 4.2), dpi=150, layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12))
    FigureCanvasAgg(figure)  # no pyplot: it keeps global state and may look for a display
    figure.suptitle(run_dir.resolve().name, color=_INK, fontsize=13, fontweight="bold")
    for position, draw in enumerate(panels, start=1):
        axes = figure.add_subplot(1, len(panels), position)
        draw(axes, rows)
        _clean(axes, min(rows), max(rows))
    path = run_dir / "curves.png"
    figure.savefig(path)
    return path


def smooth(values: Sequence[float], window: int) -> list[float]:
    """Centred moving mean of an odd window; at the ends, of the part of the window that exists."""
    reach = window // 2
    near = [values[max(0, i - reach) : i + reach + 1] for i in range(len(values))]
    return [sum(part) / len(part) for part in near]


def _draw_reward(axes: Axes, rows: Rows) -> None:
    steps = [step for step, row in rows.items() if "reward/mean" in row]
    rewards = [rows[step]["reward/mean"] for step in steps]
    color = _COLORS[0]
    axes.set_title("Training reward", loc="left", color=_INK, fontsize=11)
    axes.set_ylabel("mean reward")
    if len(steps) < 5:
        axes.plot(steps, rewards, color=color, marker="o", markersize=4)
        return
    window = min(31, max(3, len(steps) // 12)) | 1  # odd, so that it is centred
    axes.plot(steps, rewards, color=color, alpha=0.3, linewidth=1.0, label="each step")
    axes.plot(steps, smooth(rewards, window), color=color, linewidth=2.2, label=f"mean of {window} steps")
    axes.legend(frameon=False, fontsize=9, loc="best", labelcolor=_INK)


def _draw_eval(axes: Axes, rows: Rows) -> None:
    sets = eval_sets(key for row in rows.values() for key in row)
    axes.set_title("Evaluation", loc="left", color=_INK, fontsize=11)
    axes.set_ylabel("pass@1")
    axes.margins(y=0.08)
    dodge = 0.006 * (max(rows) - min(rows))  # intervals of two sets at one step must not cover each other
    for index, name in enumerate(sets):
        _draw_set(axes, rows, name, _COLORS[index % len(_COLORS)], dodge * (index - (len(sets) - 1) / 2))
    low, high = axes.get_ylim()
    axes.set_ylim(max(-0.02, low), min(1.02, high))  # a rate; the rest is room for a point at 0 or 1
    axes.legend(frameon=False, fontsize=9, loc="best", labelcolor=_INK)


def _draw_set(axes: Axes, rows: Rows, name: str, color: str, shift: float) -> None:
    key = f"eval/{name}/pass@1"
    points = [(step, row) for step, row in rows.items() if key in row]
    steps, values = [step + shift for step, _ in points], [row[key] for _, row in points]
    below = [max(0.0, row[key] - row.get(f"{key}_low", row[key])) for _, row in points]
    above = [max(0.0, row.get(f"{key}_high", row[key]) - row[key]) for _, row in points]
    axes.plot(steps, values, color=color, linewidth=1.4, alpha=0.5)
    axes.errorbar(
        steps, values, yerr=[below, above], fmt="o", color=color, markersize=5, capsize=3, elinewidth=1.2, label=name
    )


def _clean(axes: Axes, first: int, last: int) -> None:
    """A quiet frame, and the same steps under every panel."""
    room = max(0.5, 0.03 * (last - first))
    axes.set_xlim(first - room, last + room)
    axes.set_xlabel("step")
    axes.xaxis.label.set_color(_INK)
    axes.yaxis.label.set_color(_INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#999999")
    axes.grid(axis="y", color=_FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_INK, labelsize=9, color="#999999")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
