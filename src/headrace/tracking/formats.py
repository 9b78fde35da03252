"""Numbers as short texts, for tables and lines that people read."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

SPARK_WIDTH = 16
_BLOCKS = "▁▂▃▄▅▆▇█"


def number(value: float) -> str:
    """A number with about three digits."""
    size = abs(value)
    if not math.isfinite(value) or value == 0:
        return f"{value:.3f}"
    if size < 1e-3:
        return f"{value:.2g}"
    if size < 10:
        return f"{value:.3f}"
    return f"{value:.1f}" if size < 1000 else compact(value)


def compact(value: float) -> str:
    """A count or a rate: 7, 940, 5.2k, 1.3M."""
    if not math.isfinite(value):
        return str(value)
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.1f}{letter}"
    return f"{value:.0f}" if value == round(value) or abs(value) >= 100 else f"{value:.1f}"


def seconds(value: float) -> str:
    """Seconds, without the unit: 0.25, 7.3, 240."""
    return f"{value:.2f}" if value < 1 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def duration(elapsed_s: float) -> str:
    """A time span: 12s, 3m 05s, 2h 10m."""
    total = int(elapsed_s)
    if total < 60:
        return f"{total}s"
    if total < 3600:
        return f"{total // 60}m {total % 60:02d}s"
    return f"{total // 3600}h {total % 3600 // 60:02d}m"


def sparkline(values: Sequence[float], width: int = SPARK_WIDTH) -> str:
    """The complete history in at most `width` characters; non-finite values are left out."""
    finite = [value for value in values if math.isfinite(value)]
    if len(finite) < 2:
        return ""
    count = min(width, len(finite))
    edges = [i * len(finite) // count for i in range(count + 1)]
    means = [math.fsum(finite[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, span = min(means), max(means) - min(means)
    top = len(_BLOCKS) - 1
    return "".join(_BLOCKS[round(top * (mean - low) / span) if span else 0] for mean in means)
