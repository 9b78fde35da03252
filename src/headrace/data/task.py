"""Task: one thing to do."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Self

from headrace.config import SourceSection
from headrace.data.codec import JsonData, copied
from headrace.errors import DataError

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
    """Tasks from a source by name, as `data.tasks` takes it, or from any iterable of tasks or dicts.

    `args` are the arguments of a source by name.
    """
    from headrace.data.sources import load_source  # which makes Tasks, and so imports this module

    name, given = (source, None) if isinstance(source, str) else ("tasks", source)
    return load_source(SourceSection(tasks=name, args=args), given).tasks
