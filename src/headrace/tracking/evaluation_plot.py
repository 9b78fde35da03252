"""draw_evaluation: pass@1 with its intervals, and pass@k, as one picture. Needs matplotlib; import this module late."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")  # distinguishable by colour-blind readers
_INK, _FAINT = "#333333", "#E4E4E4"


@dataclass(frozen=True, slots=True)
class Score:
    """pass@1 of a set, or of one source of it, with its interval."""

    label: str
    value: float
    low: float
    high: float
    is_source: bool = False


def draw_evaluation(
    scores: Sequence[Score], curves: Mapping[str, Sequence[tuple[int, float]]], path: Path, title: str
) -> Path:
    """Left, pass@1 of every set and source; right, if there were several attempts, how pass@k grows with k."""
    shown = {label: points for label, points in curves.items() if len(points) > 1}
    figure = Figure(
        figsize=(12.8 if shown else 7.2, max(3.0, 1.4 + 0.45 * len(scores))),
        dpi=150,
        layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12),
    )
    FigureCanvasAgg(figure)  # no pyplot: it keeps global state and may look for a display
    figure.suptitle(title, color=_INK, fontsize=12, fontweight="bold")
    _draw_scores(figure.add_subplot(1, 2 if shown else 1, 1), scores)
    if shown:
        _draw_curves(figure.add_subplot(1, 2, 2), shown)
    figure.savefig(path)
    return path


def _draw_scores(axes: Axes, scores: Sequence[Score]) -> None:
    for row, score in enumerate(scores):
        color = _COLORS[1] if score.is_source else _COLORS[0]
        spread = [[max(0.0, score.value - score.low)], [max(0.0, score.high - score.value)]]
        axes.errorbar([score.value], [row], xerr=spread, fmt="o", color=color, markersize=6, capsize=3)
        axes.text(1.03, row, f"{score.value:.1%}", va="center", fontsize=9, color=_INK)
    axes.set_yticks(range(len(scores)), [score.label for score in scores])
    axes.set_ylim(len(scores) - 0.5, -0.5)
    axes.set_xlim(-0.02, 1.15)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "25%", "50%", "75%", "100%"])
    axes.set_title("pass@1, with 95% intervals", loc="left", color=_INK, fontsize=11)
    axes.grid(axis="x", color=_FAINT, linewidth=0.8)
    _clean(axes)


def _draw_curves(axes: Axes, curves: Mapping[str, Sequence[tuple[int, float]]]) -> None:
    for index, (label, points) in enumerate(curves.items()):
        color = _COLORS[index % len(_COLORS)]
        axes.plot(*zip(*points, strict=True), color=color, marker="o", markersize=5, linewidth=1.8, label=label)
    ticks = sorted({k for points in curves.values() for k, _ in points})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(k) for k in ticks])
    axes.minorticks_off()
    axes.set_xlabel("k", color=_INK)
    axes.set_ylim(-0.02, 1.02)
    axes.set_title("pass@k", loc="left", color=_INK, fontsize=11)
    axes.grid(axis="y", color=_FAINT, linewidth=0.8)
    axes.legend(frameon=False, fontsize=9, loc="best", labelcolor=_INK)
    _clean(axes)


def _clean(axes: Axes) -> None:
    """A quiet frame."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#999999")
    axes.set_axisbelow(True)
    axes.tick_params(colors=_INK, labelsize=9, color="#999999")
