"""The settings part of `headrace train --help`, made from the configuration classes so that it cannot go stale."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

if TYPE_CHECKING:
    from pydantic import BaseModel
    from pydantic.fields import FieldInfo
    from rich.console import Console
    from rich.table import Table

_NAMES = {Path: "path", dict: "table"}
_BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


def examples(*lines: str) -> str:
    """The end of a command's help."""
    return "\n".join(("Example:" if len(lines) == 1 else "Examples:", *(f"  {line}" for line in lines)))


def print_settings(console: Console, options: Any, panel: Any) -> None:
    """A help formatter of the command-line library: prints every section in one line."""
    from rich.table import Table
    from rich.text import Text

    console.print("\n[bold]Settings[/]: any key of the run file, given in it or as [cyan]--section.key value[/].")
    console.print(
        "[cyan]headrace train --help SECTION[/] shows the keys of a section, [cyan]--help all[/] all of them.\n"
    )
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0), expand=True)
    table.add_column(no_wrap=True)
    table.add_column(ratio=1)
    for title, summary, _ in _sections():
        table.add_row(Text(f"[{title}]", "bold"), Text(summary))
    console.print(table)


def print_section(name: str) -> None:
    """`headrace train --help SECTION`: its keys, with those of sections within it; or those at `SECTION.KEY` only."""
    from rich.padding import Padding
    from rich.text import Text

    from headrace.errors import ConfigError
    from headrace.registry import nearest
    from headrace.tracking.terminal import Console

    known = list(_sections())
    found = [
        (title, summary, rows)
        for title, summary, model in known
        if (rows := _rows(title, model, name)) or name in ("all", title)
    ]
    if not found:
        titles = [title for title, _, _ in known]
        raise ConfigError(f'there is no section "{name}"{nearest(name, titles)}; there are {", ".join(titles)}')
    console = Console()
    left = min(40, max(24, console.width * 2 // 5))
    console.print("Each line shows the key with its default.\n")
    for title, summary, rows in found:
        console.print(Text.assemble((f"[{title}]", "bold"), "  ", summary))
        console.print(Padding(_section_table(rows, left), (0, 0, 0, 2)))
        console.print()


def _rows(title: str, model: type[BaseModel], wanted: str) -> list[tuple[str, FieldInfo]]:
    """The keys of a section at or below `wanted`, such as "model", "model.lora" or "model.lora.rank"."""
    from headrace.config.loading import field_paths

    return [
        (path, field)
        for path, field in field_paths(model)
        if wanted == "all" or f"{title}.{path}.".startswith(f"{wanted}.")
    ]


def _sections() -> Iterator[tuple[str, str, type[BaseModel]]]:
    """Title, summary and class of every section, with a section of its own for a table of named sections."""
    from headrace.config import RunConfig
    from headrace.config.loading import field_paths

    for name, field in RunConfig.model_fields.items():
        model = field.annotation
        assert isinstance(model, type)
        yield name, _summary(model), model
        for path, inner in field_paths(model):
            named = _named_section(inner.annotation)
            if named is not None:
                yield f"{name}.{path}.NAME", _summary(named), named


def _section_table(rows: Sequence[tuple[str, FieldInfo]], left: int) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0), expand=True)
    table.add_column(width=left, overflow="fold")
    table.add_column(ratio=1)
    for path, field in rows:
        key = Text.assemble((path, "cyan"), (f" = {_default(field)}", "green"))
        meaning = Text.assemble(" ".join((field.description or "").split()), (f"  [{_type(field)}]", "dim"))
        table.add_row(key, meaning)
    return table


def _summary(model: type[BaseModel]) -> str:
    return (model.__doc__ or "").strip().splitlines()[0]


def _named_section(annotation: Any) -> type[BaseModel] | None:
    from pydantic import BaseModel

    if get_origin(annotation) is not dict:
        return None
    inner = get_args(annotation)[1]
    return inner if isinstance(inner, type) and issubclass(inner, BaseModel) else None


def _default(field: FieldInfo) -> str:
    from headrace.cli.toml_text import toml_value

    if field.is_required():
        return "(required)"
    value = field.get_default(call_default_factory=True)
    return "(empty)" if value is None else toml_value(value)


def _type(field: FieldInfo) -> str:
    bounds = [
        f"{sign} {bound}"
        for rule in field.metadata
        for name, sign in _BOUNDS.items()
        if (bound := getattr(rule, name, None)) is not None
        and (name in ("ge", "gt") or bound <= 1)  # higher ones only catch slips of the hand
    ]
    return f"{_annotation(field.annotation)} {', '.join(bounds)}".strip()


def _annotation(annotation: Any) -> str:
    """`tuple[str, ...]` as "list of str", `int | None` as "int", a Literal as its choices."""
    from headrace.cli.toml_text import toml_value

    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _annotation(arguments[0])
    if origin is Literal:
        return ("only " if len(arguments) == 1 else "") + " | ".join(toml_value(choice) for choice in arguments)
    if origin in (Union, UnionType):
        return " | ".join(_annotation(argument) for argument in arguments if argument is not NoneType)
    if origin is tuple and arguments[-1] is not Ellipsis:
        return f"list of {len(arguments)} {_annotation(arguments[0])}"
    if origin in (tuple, list):
        return f"list of {_annotation(arguments[0])}"
    return _NAMES.get(origin or annotation, getattr(annotation, "__name__", str(annotation)))
