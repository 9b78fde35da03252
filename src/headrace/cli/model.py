"""`headrace model`."""

from __future__ import annotations

from typing import Annotated

from cyclopts import App, Parameter

from headrace.cli.help import examples

model_app = App(name="model", help="List models, or fetch one.")


@model_app.command(name="list", help_epilogue=examples("headrace model list"))
def list_models() -> None:
    """Models that have a name of their own."""
    from rich.table import Table
    from rich.text import Text

    from headrace.models.catalog import CATALOG
    from headrace.tracking.terminal import Console

    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 1, 0))
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for entry in CATALOG.values():
        usable, where = model_state(entry.name)
        facts = f"{entry.parameters} parameters, {entry.size}, {entry.licence}"
        state = f"ready: {where}" if usable else where
        table.add_row(entry.name, Text(f"{entry.description}\n{facts}\n{state}"))
    console = Console(highlight=False)
    console.print(table)
    console.print("\nmodel.name also takes a folder in Hugging Face format, or a hub id such as org/name.")


@model_app.command(name="get", help_epilogue=examples("headrace model get smollm2-135m"))
def get(name: Annotated[str, Parameter(help="A name from `headrace model list`.")]) -> None:
    """Fetch a model into the cache, or say that it is there."""
    from headrace.models.catalog import get_model
    from headrace.tracking.terminal import working

    with working(f"getting {name}") as doing:

        def report(line: str) -> None:
            print(line, flush=True)
            doing(line)

        get_model(name, report)


def model_state(name: str) -> tuple[bool, str]:
    """Whether a catalog model can be used now, and where it is or what to do."""
    from headrace.errors import ModelError
    from headrace.models.catalog import resolve_model

    try:
        return True, resolve_model(name)
    except ModelError as error:
        return False, str(error)
