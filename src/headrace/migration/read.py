"""Reading another trainer's configuration: YAML, JSON, or the Python dict that a trainer prints into its log."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

from headrace.config.loading import leaves
from headrace.errors import ConfigError
from headrace.registry import load_object

_RAY_PREFIX = re.compile(r"^(?:\x1b\[\d+m)*\([^()\n]*\bpid=\d+[^()\n]*\)(?:\x1b\[0m)? ?", re.MULTILINE)
_MOST_BYTES = 20_000_000


def read_settings(path: Path) -> dict[str, Any]:
    """The settings of a file, under their dotted keys."""
    if path.is_dir():
        raise ConfigError(f"{path} is a folder; give the file in it that has the resolved configuration")
    if not path.is_file():
        raise ConfigError(f"there is no file {path}; give the resolved configuration that the trainer printed")
    if path.stat().st_size > _MOST_BYTES:
        raise ConfigError(f"{path} has {path.stat().st_size:,} bytes, which is no configuration; give the right file")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}; give a text file") from None
    if not text.strip():
        raise ConfigError(f"{path} is empty; give the resolved configuration that the trainer printed")
    table = _parse(text, path)
    if not isinstance(table, dict) or not all(isinstance(key, str) for key in table):
        raise ConfigError(f"{path} holds no table of settings, but {type(table).__name__}; give a configuration")
    given = dict(leaves(table))
    open_ = [key for key, value in given.items() if isinstance(value, str) and "${" in value]
    if open_:
        raise ConfigError(
            f"{path} is not resolved: {open_[0]} is {given[open_[0]]!r}; add `--cfg job --resolve` to the trainer's "
            f"command, and give what it prints"
        )
    return given


def _parse(text: str, path: Path) -> Any:
    start = text.lstrip()[:1]
    if start == "{":
        try:
            return json.loads(text)
        except ValueError:
            pass
    printed = _RAY_PREFIX.sub("", text).strip()
    if printed.startswith("{"):
        try:
            return ast.literal_eval(printed)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            pass  # YAML's flow style begins with a brace, too
    load, error = load_object("yaml:safe_load"), load_object("yaml:YAMLError")
    try:
        return load(text)
    except (error, RecursionError, ValueError) as problem:
        raise ConfigError(f"{path} is neither YAML nor JSON: {problem}; give the resolved configuration") from None
