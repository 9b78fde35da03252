"""Write the tables of docs/ that are made from code: metrics from their catalogue, algorithms from their facts.

    .venv/bin/python scripts/docs_tables.py

A page holds a table between `<!-- table: NAME (scripts/docs_tables.py) -->` and `<!-- end -->`.
tests/test_docs_tables.py checks that the pages are up to date.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

from headrace.algorithms import overview
from headrace.tracking.catalogue import SECTIONS, Reducer

DOCS = Path(__file__).parent.parent / "docs"
_TABLE = re.compile(r"(<!-- table: (\w+) \(scripts/docs_tables\.py\) -->\n).*?(<!-- end -->)", re.DOTALL)
_REDUCERS = {Reducer.WEIGHTED_MEAN: "mean by count"}


def metrics() -> Iterator[str]:
    """Every metric, by section."""
    for title, section in SECTIONS.items():
        yield from ("", f"## {title}", "", "| key | unit | over a step | meaning |", "| --- | --- | --- | --- |")
        for metric in section:
            reducer = _REDUCERS.get(metric.reducer, str(metric.reducer))
            yield f"| `{metric.key}` | {metric.unit} | {reducer} | {metric.meaning} |"
    yield ""


def facts() -> Iterator[str]:
    """What each objective, estimator, loss and correction needs, the settings that it reads, and who can do it."""
    yield from ("", "| kind | name | needs | settings | backends |", "| --- | --- | --- | --- | --- |")
    for entry in overview.algorithms():
        if entry.kind in ("objective", "estimator", "loss", "correction"):
            needs, backends = ", ".join(entry.needs), ", ".join(entry.backends)
            settings = ", ".join(f"`{name}`" for name in entry.settings)
            yield f"| {entry.kind} | `{entry.name}` | {needs} | {settings} | {backends} |"
    yield ""


TABLES: dict[str, Callable[[], Iterator[str]]] = {"metrics": metrics, "facts": facts}


def updated(text: str) -> str:
    """A page with its tables as they are now."""
    return _TABLE.sub(lambda found: found[1] + "\n".join(TABLES[found[2]]()) + "\n" + found[3], text)


def main() -> None:
    """Update every page that holds a table."""
    for page in sorted(DOCS.glob("*.md")):
        text = page.read_text(encoding="utf-8")
        if updated(text) != text:
            page.write_text(updated(text), encoding="utf-8")
            print(f"updated {page.name}")


if __name__ == "__main__":
    main()
