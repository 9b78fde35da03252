"""draw_simulations: simulated settings side by side as one picture. Needs matplotlib; import this module late."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

_LEARNER, _GENERATION = "#0072B2", "#E69F00"  # distinguishable by colour-blind readers
_INK = "#333333"
_MOST_AGES = 17
_SHADES = LinearSegmentedColormap.from_list("shades", ["#FFFFFF", _LEARNER, "#00263D"])


@dataclass(frozen=True, slots=True)
class Bar:
    """One setting: its label and what the picture shows of it."""

    label: str
    learner_busy: float
    generation_busy: float
    groups_per_s: float
    ages: Sequence[int]
    """Trained tokens by age."""


def draw_simulations(bars: Sequence[Bar], path: Path) -> Path:
    """Left, how busy both sides are and the throughput; right, how old the trained tokens are."""
    figure = Figure(
        figsize=(12.8, 1.6 + 0.45 * max(len(bars), 3)), dpi=150, layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12)
    )
    FigureCanvasAgg(figure)  # no pyplot: it keeps global state and may look for a display
    left, right = figure.subplots(1, 2, sharey=True)
    _draw_busy(left, bars)
    _draw_ages(right, bars)
    for axes in (left, right):
        axes.set_ylim(len(bars) - 0.5, -0.5)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(colors=_INK, labelsize=9, color="#999999")
    figure.savefig(path)
    return path


def _draw_busy(axes: Axes, bars: Sequence[Bar]) -> None:
    places = np.arange(len(bars))
    axes.barh(places - 0.19, [bar.learner_busy for bar in bars], 0.36, color=_LEARNER, label="learner")
    axes.barh(places + 0.19, [bar.generation_busy for bar in bars], 0.36, color=_GENERATION, label="generation")
    axes.set_yticks(places, [bar.label for bar in bars])
    for place, bar in enumerate(bars):
        axes.text(1.02, place, f"{bar.groups_per_s:.3g} groups/s", va="center", fontsize=9, color=_INK)
    axes.set_xlim(0, 1.28)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "25%", "50%", "75%", "100%"])
    axes.set_title("Utilisation and throughput", loc="left", color=_INK, fontsize=11)
    axes.legend(frameon=False, fontsize=9, ncols=2, loc="lower right", bbox_to_anchor=(1, 1), labelcolor=_INK)


def _draw_ages(axes: Axes, bars: Sequence[Bar]) -> None:
    longest = max(len(bar.ages) for bar in bars)
    shown = min(longest, _MOST_AGES)
    shares = np.zeros((len(bars), shown))
    for row, bar in zip(shares, bars, strict=True):
        ages = np.asarray(bar.ages, dtype=float) / max(sum(bar.ages), 1)
        row[: min(len(ages), shown)] = ages[:shown]
        row[-1] += ages[shown:].sum()
    axes.imshow(np.sqrt(shares), cmap=_SHADES, aspect="auto", vmin=0)  # the root: a thin tail is to be seen
    for place, age in np.argwhere(shares >= 0.01).tolist():
        share = shares[place, age]
        color = "white" if share > 0.12 else _INK
        axes.text(age, place, f"{share:.0%}", ha="center", va="center", fontsize=7, color=color)
    for place in range(1, len(bars)):
        axes.axhline(place - 0.5, color="white", linewidth=3)
    labels = [str(age) for age in range(shown)]
    if longest > shown:
        labels[-1] = f"≥{labels[-1]}"
    axes.set_xticks(range(shown), labels)
    axes.set_xlabel("versions old", color=_INK)
    axes.set_title("Staleness of trained tokens", loc="left", color=_INK, fontsize=11)
