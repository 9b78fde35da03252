"""Texts for lists and headings: a reason or an error may be a megabyte long."""

from __future__ import annotations

from typing import Any

_SHORT = 400


def short(value: Any) -> Any:
    """A text that fits into a list; anything else as it is."""
    if not isinstance(value, str) or len(value) <= _SHORT:
        return value
    return f"{value[:_SHORT]}… ({len(value):,} characters)"
