"""`headrace algorithms`."""

from __future__ import annotations

from itertools import groupby

_SETTING = {
    "objective": "algorithm.objective",
    "estimator": "algorithm.estimator",
    "loss": "algorithm.loss",
    "correction": "algorithm.correction.name",
    "kl": "algorithm.kl.kind",
    "filter": "filters.*",
}


def algorithms() -> None:
    """List every estimator, loss, correction and filter, and which backends support it."""
    from rich.table import Table

    from headrace.algorithms import overview as capabilities
    from headrace.tracking.terminal import Console

    console = Console()
    for kind, entries in groupby(capabilities.algorithms(), key=lambda entry: entry.kind):
        table = Table("name", "what it does", "backends", title=f"{kind}  ({_SETTING[kind]})", title_justify="left")
        for entry in entries:
            table.add_row(entry.name, entry.summary, ", ".join(entry.backends))
        console.print(table)
    console.print('Estimators and losses of your own: "module:function". Formulas and knobs: docs/algorithms.md')
