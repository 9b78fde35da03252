"""From the name of a source to its rows. Which reader a name means is decided here, and nowhere else."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from headrace.errors import ConfigError, DataError, HeadraceError
from headrace.registry import call_with, names, resolve
from headrace.utils.usercode import is_interrupt, where_it_failed

GENERATED, HUB = "reasoning_gym:", "hf:"
_SAVED = ("dataset_info.json", "dataset_dict.json")  # what `save_to_disk` leaves in its folder


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a source: an object, a Task, or the error that it is."""

    number: int
    where: str
    """For messages: which file and line."""
    value: Any


def read_rows(source: str | Iterable[Any], args: dict[str, Any]) -> Iterator[Row]:
    """The rows of a source by name, or of any iterable."""
    if not isinstance(source, str):
        return _numbered(source, "tasks")
    if source in names("tasks"):
        return _numbered(_call(source, args), source)
    reader = _reader_of(source)
    if reader is not None:
        read: Callable[[str, dict[str, Any]], Iterator[Row]] = resolve("reader", reader)
        return read(source, args)
    if Path(source).is_dir():
        raise DataError(
            f"{source} is a folder, and no dataset that `save_to_disk` wrote; name a .jsonl or .parquet file in it"
        )
    return _numbered(_call(source, args), source)


def default_source(source: str | Iterable[Any]) -> str:
    """The `source` of tasks that do not say theirs."""
    if isinstance(source, str) and source.startswith(GENERATED):
        return source.removeprefix(GENERATED)
    return "default"


def _reader_of(source: str) -> str | None:
    if source.startswith(GENERATED):
        return "reasoning_gym"
    if source.startswith(HUB) or any((Path(source) / name).is_file() for name in _SAVED):
        return "huggingface"
    return {".jsonl": "jsonl", ".parquet": "parquet"}.get(Path(source).suffix)


def _call(source: str, args: dict[str, Any]) -> Iterable[Any]:
    what = f'the task source "{source}"'
    try:
        return call_with(resolve("tasks", source), args, what)
    except HeadraceError:
        raise
    except Exception as error:
        raise DataError(f"{what} failed: {where_it_failed(error)}") from error


def _numbered(values: Iterable[Any], name: str) -> Iterator[Row]:
    rows: Iterator[Any] | None = None
    for number in count(1):
        try:
            rows = iter(values) if rows is None else rows
            value = next(rows)
        except StopIteration:
            return
        except HeadraceError:
            raise
        except BaseException as error:  # sys.exit in a user's generator would end the process without a message
            if is_interrupt(error):
                raise
            failed = f'the task source "{name}" failed after {number - 1} rows: {where_it_failed(error)}'
            raise DataError(failed) from error
        yield Row(number, f"{name}, row {number}", value)


def checked_file(source: str, args: dict[str, Any]) -> Path:
    """The path of a task file, which must be there and takes no arguments."""
    path = Path(source)
    if args:
        raise ConfigError(f"the task file {path} takes no arguments, got {', '.join(sorted(args))}; remove args")
    if not path.exists():
        raise DataError(f"there is no task file {path}")
    return path


def read_jsonl(source: str, args: dict[str, Any]) -> Iterator[Row]:
    """One object per line; empty lines count, so that a row has the number of its line."""
    path = checked_file(source, args)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read the task file {path}: {error}; it must be a file of UTF-8 text") from None
    # not splitlines(): it also cuts at separators such as U+2028, which JSON strings may hold as they are
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            where = f"{path}, line {number}"
            yield Row(number, where, _parsed(line, where))


def _parsed(line: str, where: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:  # also a number of too many digits, or what is nested too deeply
        return DataError(f"{where}: not valid JSON: {error}")
