"""Plain values as YAML that people can read. Strings are quoted as in JSON, which YAML contains."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

_PLAIN_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]*")
_UNPRINTABLE = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")
_RESERVED = {"true", "false", "null", "yes", "no", "on", "off", "y", "n"}


def to_yaml(value: dict[str, Any]) -> str:
    """A document. Texts of several lines are written as such."""
    return "\n".join(_lines(value)) + "\n"


def _lines(value: Any) -> Iterator[str]:
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _item(f"{_key(key)}:", item, "  ")
    elif isinstance(value, list) and value:
        for item in value:
            inner = list(_lines(item))
            yield f"- {inner[0]}"
            yield from (f"  {line}" for line in inner[1:])
    else:
        yield _scalar(value)


def _item(key: str, value: Any, indent: str) -> Iterator[str]:
    if isinstance(value, str) and _is_block(value):
        yield f"{key} |"
        yield from (f"{indent}{line}" if line else "" for line in value[:-1].split("\n"))
    elif isinstance(value, dict | list) and value:
        yield key
        yield from (f"{indent}{line}" for line in _lines(value))
    else:
        yield f"{key} {_scalar(value)}"


def _is_block(text: str) -> bool:
    """Whether a literal block gives exactly this text: it keeps all but what only escapes can say."""
    lines = text[:-1].split("\n")
    return (
        text.endswith("\n")
        and len(lines) > 1
        and not text.endswith("\n\n")
        and not lines[0].startswith((" ", "\t"))
        and bool(lines[0])
        and all(char.isprintable() or char == "\n" for char in text)
        and not any(char in text for char in "\x85\u2028\u2029\ufeff")
    )


def _key(name: str) -> str:
    return name if _PLAIN_KEY.fullmatch(name) and name.lower() not in _RESERVED else _scalar(name)


def _scalar(value: Any) -> str:
    """As JSON, but what YAML cannot contain as it is, is escaped; and 1e-05 is 1.0e-05, or it would be a text."""
    if isinstance(value, float):
        return re.sub(r"^(-?\d+)e", r"\1.0e", repr(value))
    return _UNPRINTABLE.sub(lambda found: f"\\u{ord(found[0]):04x}", json.dumps(value, ensure_ascii=False))
