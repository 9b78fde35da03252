"""Where the answer is in a reply. Everything here is linear in the length of the text."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from headrace.data.task import Task
from headrace.errors import ConfigError, DataError

_BRACE = re.compile(r"[{}]")
LONGEST_TEXT = 200_000  # characters; of a longer text the end is read, which is where answers stand


def in_tags(text: str, tag: str = "answer") -> str | None:
    """What stands in the last closed pair of tags."""
    end = text.rfind(f"</{tag}>")
    start = text.rfind(f"<{tag}>", 0, end) if end >= 0 else -1
    return text[start + len(tag) + 2 : end].strip() if start >= 0 else None


def in_box(text: str) -> str | None:
    r"""What stands in the last \boxed{...} (or \fbox) that is closed."""
    end = len(text)
    for _ in range(8):  # an unclosed box at the end hides the one before it only so often
        start = max(text.rfind("\\boxed{", 0, end), text.rfind("\\fbox{", 0, end))
        if start < 0:
            return None
        opened = text.index("{", start)
        depth = 0
        for brace in _BRACE.finditer(text, opened):
            depth += 1 if brace[0] == "{" else -1
            if depth == 0:
                return text[opened + 1 : brace.start()].strip()
        end = start
    return None


def after_marks(text: str) -> str | None:
    """The rest of the line after the last ####."""
    place = text.rfind("####")
    return text[place + 4 :].strip().partition("\n")[0].strip() if place >= 0 else None


_PLACES: dict[str, Callable[[str], str | None]] = {"tags": in_tags, "box": in_box, "marks": after_marks}
ANYWHERE = ("box", "marks", "tags")


def check_where(where: Any) -> tuple[str, ...]:
    """The places to look in, in order; "auto" for all of them."""
    places = ANYWHERE if where == "auto" else (where,) if isinstance(where, str) else tuple(where)
    if unknown := [place for place in places if place not in (*_PLACES, "text")]:
        raise ConfigError(f'where must be "auto", "text" or of {", ".join(_PLACES)}, got "{unknown[0]}"')
    return places


def marked(text: str, places: tuple[str, ...]) -> str | None:
    """What stands in the first of these places that is there."""
    text = text[-LONGEST_TEXT:]
    for place in places:
        found = text.strip() if place == "text" else _PLACES[place](text)
        if found is not None:
            return found
    return None


def expected(task: Task) -> list[Any]:
    """The accepted answers of a task: its answer, or each of a list."""
    answers = task.answer if isinstance(task.answer, (list, tuple)) else [task.answer]
    if not answers or any(answer is None for answer in answers):
        raise DataError(f'task "{task.id}" has no answer to compare with; set its answer, or a list of accepted ones')
    return list(answers)
