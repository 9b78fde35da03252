"""Task: one thing to do."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from headrace.data.codec import JsonData, copied
from headrace.errors import ConfigError, DataError
from headrace.registry import call_with, resolve

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Task(JsonData):
    """One thing to do. Give `messages`, or an `instruction`, which becomes a single user message."""

    id: str
    messages: tuple[Message, ...] = ()
    instruction: str | None = None
    answer: Any = None
    source: str = "default"
    metadata: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.messages and self.instruction is None:
            raise DataError(f'task "{self.id}" has neither messages nor an instruction')
        kinds = (("instruction", str | None, "text"), ("source", str, "text"), ("metadata", dict, "an object"))
        for name, kind, wanted in kinds:
            if not isinstance(getattr(self, name), kind):
                raise DataError(f'task "{self.id}": {name} must be {wanted}, got {getattr(self, name)!r}')
        given = self.messages or ({"role": "user", "content": self.instruction},)
        for message in given:
            if not isinstance(message, dict) or "role" not in message:
                raise DataError(f'task "{self.id}": messages must be objects with a role, and one is {message!r}')
        # always copied: a task is handed to users' code, which may change what it got
        object.__setattr__(self, "messages", tuple(copied(message) for message in given))

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Checked before, so not checked again."""
        twin = object.__new__(type(self))
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            value = tuple(copied(message) for message in value) if name == "messages" else copied(value)
            object.__setattr__(twin, name, value)
        return twin


def load_tasks(source: str | Iterable[Task | dict[str, Any]], /, **args: Any) -> list[Task]:
    """Tasks from a registered source, a .jsonl file, `"module:function"` or any iterable of tasks or dicts.

    `args` are the keyword arguments of a source that is a function.
    """
    found, name = (_read(source, args), source) if isinstance(source, str) else (source, "tasks")
    tasks = [
        row if isinstance(row, Task) else _task_from_row(row, number, f"{name}, row {number}")
        for number, row in enumerate(found, 1)
    ]
    if not tasks:
        raise DataError(f"{name} has no tasks")
    _check_ids(tasks, name)
    return tasks


def _read(source: str, args: dict[str, Any]) -> Iterable[Task | dict[str, Any]]:
    if not source.endswith(".jsonl"):
        return call_with(resolve("tasks", source), args, f'the task source "{source}"')
    if args:
        raise ConfigError(f"the task file {source} takes no arguments, got {', '.join(sorted(args))}; remove args")
    return read_jsonl(Path(source))


def read_jsonl(path: Path) -> list[Task]:
    """One task per line; an error names file, line and field."""
    if not path.is_file():
        raise DataError(f"there is no task file {path}")
    tasks = []
    # not splitlines(): it also cuts at separators such as U+2028, which JSON strings may hold as they are
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(f"{path}, line {number}: not valid JSON: {error}") from None
        tasks.append(_task_from_row(row, number, f"{path}, line {number}"))
    return tasks


def _task_from_row(row: Any, number: int, where: str) -> Task:
    """A task of a dict; one without an id is named by its number."""
    if not isinstance(row, dict):
        raise DataError(f"{where}: expected an object with messages or an instruction, got {row!r}")
    given_id = row.get("id")
    try:
        return Task.from_dict({**row, "id": str(number if given_id is None else given_id)})
    except DataError as error:
        raise DataError(f"{where}: {error}") from None


def _check_ids(tasks: Sequence[Task], name: str) -> None:
    seen: set[str] = set()
    for task in tasks:
        if task.id in seen:
            raise DataError(f'{name} has two tasks with the id "{task.id}"; ids must be unique')
        seen.add(task.id)
