"""`headrace algorithms`."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.text import Text

    from headrace.algorithms.overview import Algorithm

_SETTING = {
    "objective": "algorithm.objective",
    "estimator": "algorithm.estimator",
    "loss": "algorithm.loss",
    "correction": "algorithm.correction.name",
    "kl": "algorithm.kl.kind",
    "filter": "filters.*",
}


def algorithms() -> None:
    """List every estimator, loss, correction and filter: what it does, what it needs, which backends support it."""
    from rich.table import Column, Table

    from headrace.algorithms import overview
    from headrace.tracking.terminal import Console

    console = Console()
    for kind, entries in groupby(overview.algorithms(), key=lambda entry: entry.kind):
        title = f"{kind}  ({_SETTING[kind]})"
        table = Table(Column("name", no_wrap=True), "what it does", "backends", title=title, title_justify="left")
        for entry in entries:
            table.add_row(entry.name, _text(entry), ", ".join(entry.backends))
        console.print(table)
    console.print('Estimators and losses of your own: "module:function". Formulas and settings: docs/algorithms.md')


def _text(entry: Algorithm) -> Text:
    from rich.text import Text

    needs = f"\nneeds {', '.join(entry.needs)}" if entry.needs else ""
    return Text.assemble(entry.summary, (needs, "dim"))
