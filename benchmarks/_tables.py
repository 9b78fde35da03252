"""Tables in Markdown, and a spread of measurements in a cell."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median


def spread(values: Sequence[float], digits: int = 2) -> str:
    return f"{median(values):.{digits}f} ({min(values):.{digits}f}–{max(values):.{digits}f})"


def print_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    print("\n| " + " | ".join(heads) + " |")
    print("| " + " | ".join("---" for _ in heads) + " |")
    for row in rows:
        print("| " + " | ".join(row) + " |", flush=True)
