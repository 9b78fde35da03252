"""`headrace data`."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

from headrace.cli.help import examples
from headrace.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from headrace.config import RunConfig
    from headrace.data.report import Length, Report
    from headrace.data.task import Task

_LONGEST = 600  # characters of a message that are shown
data_app = App(name="data", help="Look at tasks.")


@data_app.command(
    name="inspect",
    help_epilogue=examples(
        'headrace data inspect countdown --args "count = 100"', "headrace data inspect examples/single_turn_math.toml"
    ),
)
def inspect(
    source: Annotated[str, Parameter(help="A source as data.tasks takes it, or a run file.")],
    /,
    *overrides: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)],
    args: Annotated[str | None, Parameter(help='Arguments of the source, such as "size = 10, seed = 1".')] = None,
    columns: Annotated[str | None, Parameter(help="Its columns, such as 'instruction = \"question\"'.")] = None,
    template: Annotated[str | None, Parameter(help='The instruction, such as "{question} Answer:".')] = None,
    json: Annotated[bool, Parameter(negative="", show_default=False, help="Print the results as JSON.")] = False,
) -> None:
    """Show the tasks before they are trained.

    Counts by source, lengths, duplicates, bad rows and three examples. For a
    run file also: held-out tasks, how often each source of a mixture is drawn,
    overlap of evaluation sets with training, and lengths in tokens of the
    run's model. Settings can be given as `--section.key value`.
    """
    from headrace.tracking.terminal import working

    if source.endswith(".toml"):
        if given := [name for name, value in (("args", args), ("columns", columns), ("template", template)) if value]:
            raise ConfigError(f"--{given[0]} is for a source, and {source} is a run file; use --data.{given[0]}")
        with working(f"loading the tasks of {source}"):
            report, notes = _of_run(source, overrides)
    else:
        if overrides:
            raise ConfigError(f"{overrides[0]} is a setting of a run file, and {source} is a source; use --args")
        with working(f"loading {source}"):
            report, notes = _of_source(source, args, columns, template), []
    if json:
        from json import dumps

        print(dumps(report.to_dict(), ensure_ascii=False, indent=2))
        return
    from headrace.tracking.terminal import Console

    _show(Console(highlight=False), report, notes)


def _of_source(source: str, args: str | None, columns: str | None, template: str | None) -> Report:
    from headrace.config.loading import build_config

    values: dict[str, Any] = {"tasks": source, "args": _table("--args", args), "columns": _table("--columns", columns)}
    data = {**values, "template": template, "on_bad_row": "skip"}
    config = build_config({"data": data}, where=source, may_be_idle=True)  # a source without rows has no bad ones
    return _report(config, None)


def _table(option: str, text: str | None) -> dict[str, Any]:
    """`a = 1, b = "x"` as TOML reads it between braces, which may be there too."""
    inner = (text or "").strip().removeprefix("{").removesuffix("}")
    try:
        return tomllib.loads(f"value = {{ {inner} }}")["value"]
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(
            f"{option} must be as in TOML, such as 'size = 10, name = \"x\"', got {text}: {error}"
        ) from None


def _of_run(file: str, overrides: tuple[str, ...]) -> tuple[Report, list[str]]:
    from headrace.cli.train import read_run

    config = read_run(file, overrides, "--json")
    length, note = _token_length(config)
    # all bad rows are to be seen, not only the first
    skipping = config.model_copy(update={"data": config.data.model_copy(update={"on_bad_row": "skip"})})
    return _report(skipping, length), [note] if note else []


def _token_length(config: RunConfig) -> tuple[Length | None, str]:
    """How many tokens a prompt has for the run's model; or why that is not known."""
    from headrace.errors import HeadraceError
    from headrace.registry import load_object
    from headrace.rollout.chat import ChatTemplate

    try:
        chat = ChatTemplate(load_object("headrace.models.load:load_tokenizer")(config.model.name))
    except HeadraceError as error:
        return None, f"lengths in tokens are not known: {error}"
    return lambda task: len(chat.render(task.messages)), ""


def _report(config: RunConfig, length: Length | None) -> Report:
    from headrace.data.report import inspect_tasks
    from headrace.data.training import load_evaluation, load_training

    data = load_training(config.data)
    bad, sets = list(data.bad_rows), {}
    for name, section in config.eval.sets.items():
        found = load_evaluation(section, config.data, data.held_out, name)
        sets[name] = found.tasks
        bad += found.bad_rows
    weights = {name: entry.weight for name, entry in config.data.mixture.items()}
    draws = {name: weight / sum(weights.values()) for name, weight in weights.items()}
    return inspect_tasks(data.tasks, held_out=data.held_out, bad_rows=bad, sets=sets, draws=draws, tokens=length)


# ---- shown -----------------------------------------------------------------------------------------------------------


def _show(console: Console, report: Report, notes: list[str]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _facts(report):
        table.add_row(Text(name), Text(value))
    console.print(table)
    for note in notes:
        console.print(Text(note), soft_wrap=True)
    for line in _problems(report):
        console.print(Text(line, style="yellow"), soft_wrap=True)
    for task in report.samples:
        console.print()
        console.print(_shown(task, console.is_terminal), soft_wrap=not console.is_terminal)


def _facts(report: Report) -> Iterator[tuple[str, str]]:
    held_out = f", and {report.held_out:,} held out" if report.held_out else ""
    yield "tasks", f"{report.tasks:,} to train{held_out}; {report.with_answer:,} with an answer"
    yield "sources", ", ".join(f"{name} {count:,}" for name, count in report.sources.items())
    if report.draws:
        yield "drawn", ", ".join(f"{name} {share:.0%}" for name, share in report.draws.items())
    for unit, lengths in (("characters", report.characters), ("tokens", report.tokens)):
        if lengths is not None:
            yield (
                unit,
                (
                    f"{lengths.mean:,.1f} on average, median {lengths.median:,.0f}, 95% up to {lengths.q95:,.0f}, "
                    f"longest {lengths.max:,}"
                ),
            )
    yield "duplicates", f"{report.duplicates:,}"
    for name, shared in report.evaluation.items():
        yield f"evaluation {name}", f"{shared.tasks:,} tasks, {shared.shared:,} of them are also trained"
    yield "bad rows", f"{len(report.bad_rows):,}"


def _problems(report: Report) -> Iterator[str]:
    for before, later in report.duplicate_ids:
        yield f'duplicate: "{later}" asks what "{before}" asks'
    for name, shared in report.evaluation.items():
        for task_id in shared.ids:
            yield f'overlap: "{task_id}" of the evaluation set "{name}" is also trained'
    for row in report.bad_rows[:3]:
        yield f"bad row: {row}"
    if len(report.bad_rows) > 3:
        yield f"… and {len(report.bad_rows) - 3:,} more bad rows"


def _shown(task: Task, framed: bool) -> RenderableType:
    """A task as the model is asked it: in a frame on a terminal, else as plain lines."""
    from rich.panel import Panel
    from rich.text import Text

    title, text = f"{task.id} ({task.source})", Text()
    for message in task.messages:
        text.append(f"{message['role']}: ", style="bold")
        text.append(f"{_cut(str(message.get('content') or ''))}\n")
    text.append("answer: ", style="bold")
    text.append(_cut(str(task.answer)))
    return Panel(text, title=Text(title), title_align="left") if framed else Text.assemble(f"--- {title}\n", text)


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}… ({len(text):,} characters)"
