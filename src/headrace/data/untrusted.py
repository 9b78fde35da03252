"""Text of which anyone may be the author, such as a model's reply: what is done here is linear in its length."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator
from typing import Any, Literal

_LONGEST_RUN = 30  # marks on one letter; no language has so many (Unicode's Stream-Safe Text Format)
_JOINER = "\u034f"  # combining grapheme joiner: it is shown as nothing, and marks do not move past it


def enclosed(text: str, opening: str, closing: str) -> Iterator[tuple[int, int]]:
    """Where `opening` … `closing` stand, marks included, from left to right; each opening with the nearest closing.

    As the pattern `opening.*?closing` would find them, which looks through all that follows for every opening that is
    never closed.
    """
    end = 0
    while (start := text.find(opening, end)) >= 0:
        end = text.find(closing, start + len(opening))
        if end < 0:
            return
        end += len(closing)
        yield start, end


def is_deeper(value: Any, levels: int) -> bool:
    """Whether JSON data is nested deeper than so many levels: later steps would fail on it, each in its own way."""
    layer = [value]
    for _ in range(levels):
        layer = [part for one in layer if isinstance(one, dict | list) for part in _parts(one)]
    return any(isinstance(one, dict | list) for one in layer)


def _parts(value: dict[str, Any] | list[Any]) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value


def normalized(form: Literal["NFC", "NFKC"], text: str) -> str:
    """The text in a Unicode normal form. Sorting the marks on a letter is quadratic, so long runs of them are split."""
    return text if text.isascii() else unicodedata.normalize(form, _split_runs(text))


def _split_runs(text: str) -> str:
    """The text with a joiner in every run of marks that is longer than any real one."""
    known: dict[str, tuple[int, int, bool]] = {}
    parts: list[str] = []
    run = begin = 0
    for place, letter in enumerate(text):
        if letter < "\u0300":  # no marks, and most letters
            run = 0
            continue
        if letter not in known:
            known[letter] = _marks_of(letter)
        leading, trailing, all_marks = known[letter]
        if run + leading > _LONGEST_RUN:
            parts += (text[begin:place], _JOINER)
            begin, run = place, 0
        run = run + leading if all_marks else trailing
    return "".join((*parts, text[begin:])) if parts else text


def _marks_of(letter: str) -> tuple[int, int, bool]:
    """How many marks a letter begins and ends with once it is taken apart, and whether it is nothing else."""
    is_mark = [unicodedata.combining(part) > 0 for part in unicodedata.normalize("NFKD", letter)]
    leading = next((place for place, mark in enumerate(is_mark) if not mark), len(is_mark))
    trailing = next((place for place, mark in enumerate(reversed(is_mark)) if not mark), len(is_mark))
    return leading, trailing, leading == len(is_mark)
