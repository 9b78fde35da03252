"""What the performance benchmarks have in common on the command line."""

from __future__ import annotations

import argparse
import sys
from types import TracebackType
from typing import Any

from headrace.errors import HeadraceError
from headrace.models.catalog import resolve_model

_COUNTS = ("rounds", "steps", "threads", "batches")
STOPPED = "stopped before everything was measured; nothing was written"


def parsed(parser: argparse.ArgumentParser, quick: dict[str, Any]) -> argparse.Namespace:
    """The arguments: `--quick` changes defaults, not what is given; nonsense is refused before anything is measured."""
    sys.excepthook = _without_trace_of_interrupts
    given = parser.parse_args()
    if given.quick:
        parser.set_defaults(**quick)
        given = parser.parse_args()
    for name in _COUNTS:
        value = getattr(given, name, None)
        if value is not None and min(value if isinstance(value, list) else [value]) < 1:
            parser.error(f"--{name} must be at least 1, got {value}")
    if given.json and not given.json.resolve().parent.is_dir():
        parser.error(f"--json {given.json}: there is no folder {given.json.resolve().parent}")
    try:
        if hasattr(given, "model"):
            resolve_model(given.model)
    except HeadraceError as error:
        parser.error(str(error))
    return given


def _without_trace_of_interrupts(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        print(STOPPED, file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)
