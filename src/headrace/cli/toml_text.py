"""A configuration as the TOML that gives it again, with a note on what differs from the defaults."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import PurePath
from typing import Any

from pydantic import BaseModel

from headrace.config import RunConfig

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def to_toml(config: RunConfig) -> str:
    """Every setting, section by section; settings without a value are left out, as TOML has no null."""
    return "\n".join(_tables(config, RunConfig(), "")).rstrip()


def toml_value(value: Any) -> str:
    """One value in TOML."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (str, PurePath)):
        return json.dumps(str(value), ensure_ascii=False)
    if isinstance(value, BaseModel):
        value = dict(value)
    if isinstance(value, dict):
        inner = ", ".join(f"{_key(key)} = {toml_value(item)}" for key, item in value.items() if item is not None)
        return f"{{ {inner} }}" if inner else "{}"
    return f"[{', '.join(toml_value(item) for item in value)}]"


def _tables(values: BaseModel, defaults: BaseModel | None, path: str) -> Iterator[str]:
    inner: list[tuple[str, BaseModel, Any]] = []
    lines: list[str] = []
    for name, value in values:
        default = getattr(defaults, name, None)
        if isinstance(value, BaseModel):
            inner.append((name, value, default))
        elif isinstance(value, dict) and value and all(isinstance(item, BaseModel) for item in value.values()):
            inner += [(f"{name}.{_key(key)}", item, None) for key, item in value.items()]
        elif value is not None:
            lines.append(f"{_key(name)} = {toml_value(value)}{_note(value, default, defaults is not None)}")
    if lines:
        yield from (f"[{path}]", *lines, "")
    for name, value, default in inner:
        yield from _tables(value, default, f"{path}.{name}" if path else name)


def _note(value: Any, default: Any, has_default: bool) -> str:
    if not has_default or value == default:
        return ""
    return "  # default: none" if default is None else f"  # default: {toml_value(default)}"


def _key(name: Any) -> str:
    return str(name) if _BARE_KEY.fullmatch(str(name)) else json.dumps(str(name), ensure_ascii=False)
