"""From the rows of a source to tasks: columns, templates, system prompts, and how bad rows are handled."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from string import Formatter
from typing import Any

from headrace.config import SourceSection
from headrace.data.sources.read import Row, default_source, read_rows
from headrace.data.task import Task
from headrace.errors import DataError

_FIELDS = tuple(Task.__dataclass_fields__)
_SHOWN = 3  # bad rows


@dataclass(frozen=True, slots=True)
class Loaded:
    """The tasks of a source, and what is wrong with the rows that were left out."""

    tasks: list[Task]
    bad_rows: tuple[str, ...] = ()

    def warning(self) -> str | None:
        """What to say about bad rows; None if there are none."""
        if not self.bad_rows:
            return None
        more = f"; and {len(self.bad_rows) - _SHOWN} more" if len(self.bad_rows) > _SHOWN else ""
        return f"{len(self.bad_rows)} bad rows were left out: {'; '.join(self.bad_rows[:_SHOWN])}{more}"


def load_source(
    section: SourceSection,
    given: Iterable[Any] | None = None,
    *,
    source_name: str | None = None,
    system: str | None = None,
    skip_bad: bool = False,
) -> Loaded:
    """All tasks of a source; `given` are rows in place of those that the section names.

    `source_name` is the `source` of tasks that do not say theirs. `system` is used where the section has none.
    """
    source = section.tasks if given is None else given
    name = source if isinstance(source, str) else "tasks"
    fill = default_source(source) if source_name is None else source_name
    system = system if section.system is None else section.system
    tasks: dict[str, Task] = {}
    bad: list[str] = []
    for row in read_rows(source, section.args):
        try:
            task = _finished(_task_of(row, section), fill, system)
            if task.id in tasks:
                raise DataError(f'{row.where}: {name} has two tasks with the id "{task.id}"; ids must be unique')
            tasks[task.id] = task
        except DataError as error:
            if not skip_bad:
                raise DataError(f'{error}; mend it, or leave such rows out with data.on_bad_row = "skip"') from None
            bad.append(str(error))
    if not tasks:
        raise DataError(f"{name} has no tasks" + (f"; {Loaded([], tuple(bad)).warning()}" if bad else ""))
    return Loaded(list(tasks.values()), tuple(bad))


def _finished(task: Task, source: str, system: str | None) -> Task:
    """With the name of its source, and a system prompt, where it has none of its own."""
    if task.source == "default" and source != "default":
        task = replace(task, source=source)
    if system is not None and task.messages[0]["role"] != "system":
        task = replace(task, messages=({"role": "system", "content": system}, *task.messages))
    return task


def _task_of(row: Row, section: SourceSection) -> Task:
    if isinstance(row.value, DataError):
        raise row.value
    mapped = bool(section.columns or section.template is not None)
    if isinstance(row.value, Task):
        if mapped or section.keep_columns:
            given = "keep_columns is" if not mapped else "columns and template are"
            raise DataError(f"{row.where}: {given} for rows, and this is a Task already; remove the setting")
        return row.value
    if not isinstance(row.value, dict):
        raise DataError(f"{row.where}: expected an object with messages or an instruction, got {row.value!r}")
    try:
        values = _mapped(row.value, section) if mapped else dict(row.value)
        if section.keep_columns:
            values = _with_the_rest(values, row.value, section)
        given_id = values.get("id")
        return Task.from_dict({**values, "id": str(row.number if given_id is None else given_id)})
    except DataError as error:
        strays = not mapped and not section.keep_columns and set(row.value) - set(_FIELDS)
        hint = "; say which columns to take with columns, or keep all with keep_columns = true" if strays else ""
        raise DataError(f"{row.where}: {error}{hint}") from None


def _mapped(row: dict[str, Any], section: SourceSection) -> dict[str, Any]:
    """The fields of a task: from the columns that are named for them, else from those of their own names."""
    taken = {name: column_at(row, path, name) for name, path in section.columns.items()}
    asked = ("instruction", "messages")
    settled = {*taken, *(asked if section.template is not None or any(name in taken for name in asked) else ())}
    taken |= {name: row[name] for name in _FIELDS if name in row and name not in settled}
    if section.template is not None:
        taken["instruction"] = fill_template(section.template, row)
    return taken


def _with_the_rest(values: dict[str, Any], row: dict[str, Any], section: SourceSection) -> dict[str, Any]:
    """With the columns that went into no field in the metadata; what the row itself has there goes first."""
    used = {*_FIELDS, *section.columns.values()}
    rest = {name: plain(value) for name, value in row.items() if name not in used}
    own = values.get("metadata") or {}
    kept = {name: value for name, value in values.items() if name in _FIELDS}
    return {**kept, "metadata": {**rest, **own} if isinstance(own, dict) else own}


def column_at(row: dict[str, Any], path: str, field: str) -> Any:
    """The value of a column; dots lead into objects and lists."""
    if path in row:
        found: Any = row[path]
    else:
        found = row
        for part in path.split("."):
            if isinstance(found, dict) and part in found:
                found = found[part]
            elif isinstance(found, list) and part.isdecimal() and int(part) < len(found):
                found = found[int(part)]
            else:
                raise DataError(f'{field}: there is no column "{path}"; the row has {", ".join(map(str, row))}')
    if found is None and field != "answer":
        raise DataError(f'{field}: the column "{path}" is empty')
    return found


def fill_template(template: str, row: dict[str, Any]) -> str:
    """The template with columns in the place of their names."""
    said: list[str] = []
    for text, name, _, _ in Formatter().parse(template):
        said.append(text)
        if name is not None:
            said.append(str(column_at(row, name, "template")))
    return "".join(said)


def plain(value: Any) -> Any:
    """The value as JSON can hold it; what it cannot hold becomes text."""
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return str(value)
