"""Warnings: all of them go to log.txt, and those that concern the user also to the console, once.

Python's warnings and records of the logging module are treated the same. Warnings of libraries go to log.txt alone.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections import Counter
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from headrace.utils.usercode import is_library

_OF_A_KIND = 3  # shown of messages that differ only in their values: a failing workflow fails every episode


class _Console(logging.Handler):
    """Warnings as lines of standard error, which the live view shows above itself."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._shown: set[str] = set()
        self._kinds: Counter[str] = Counter()

    def emit(self, record: logging.LogRecord) -> None:
        if not _is_ours(record) and is_library(record.pathname):
            return
        text = record.getMessage()
        kind = text if record.msg == "%s" else str(record.msg)
        if text in self._shown or self._kinds[kind] >= _OF_A_KIND:
            return
        self._shown.add(text)
        self._kinds[kind] += 1
        more = " (further ones of this kind are in log.txt alone)" if self._kinds[kind] == _OF_A_KIND else ""
        with suppress(OSError, ValueError):  # nobody reads it
            print(f"{record.levelname.lower()}: {text}{more}", file=sys.stderr)


class RunLog(logging.FileHandler):
    """log.txt of a run. It configures Headrace's logger until it is closed, then restores it.

    A closed handler that stayed attached would open its file again for the next run.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, encoding="utf-8", errors="backslashreplace")
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        self._failed = False
        logger = logging.getLogger("headrace")
        self._before = (logger.level, logger.propagate)
        self._added = [(logger, self), *_console_handlers(), (logging.getLogger(), self)]
        for where, handler in self._added:
            where.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False
        self._show_before: Any = warnings.showwarning
        warnings.showwarning = self._warned

    def filter(self, record: logging.LogRecord) -> Any:
        """Of other loggers only warnings, whatever the level of the root logger."""
        return super().filter(record) if _is_ours(record) or record.levelno >= logging.WARNING else False

    def _warned(
        self, message: Warning | str, category: type[Warning], filename: str, lineno: int, *rest: Any, **named: Any
    ) -> None:
        text = f"{category.__name__}: {message} ({filename}:{lineno})"
        self.handle(logging.LogRecord("py.warnings", logging.WARNING, filename, lineno, "%s", (text,), None))
        if not (is_library(filename) and _issued_by_library(sys._getframe(1))):
            self._show_before(message, category, filename, lineno, *rest, **named)

    def handleError(self, record: logging.LogRecord) -> None:
        """Report it once, in one line: a full disk fails every record, and must not fail the run."""
        if not self._failed:
            self._failed = True
            print(f"cannot write {self.baseFilename}: {sys.exc_info()[1]}", file=sys.stderr)

    def close(self) -> None:
        logger = logging.getLogger("headrace")
        if self in logger.handlers:  # the logging module closes every handler once more at exit
            for where, handler in self._added:
                where.removeHandler(handler)
            level, logger.propagate = self._before
            logger.setLevel(level)
            if warnings.showwarning == self._warned:
                warnings.showwarning = self._show_before
        try:
            super().close()
        except OSError as error:  # a full disk, which must not hide what the run ended with
            print(f"cannot write {self.baseFilename}: {error}", file=sys.stderr)


def to_console() -> None:
    """The same rules for commands without a log.txt, for the rest of the process."""
    for where, handler in _console_handlers():
        where.addHandler(handler)
    logging.getLogger("headrace").propagate = False
    show: Any = warnings.showwarning

    def warned(message: Warning | str, category: type[Warning], filename: str, *rest: Any, **named: Any) -> None:
        if not (is_library(filename) and _issued_by_library(sys._getframe(1))):
            show(message, category, filename, *rest, **named)

    warnings.showwarning = warned


def _console_handlers() -> list[tuple[logging.Logger, logging.Handler]]:
    """The handlers that are missing to show warnings. If the user has handlers, those show what is not ours."""
    logger, root, console = logging.getLogger("headrace"), logging.getLogger(), _Console()
    if any(isinstance(handler, _Console) for handler in logger.handlers):
        return []
    return [(logger, console), *([] if root.handlers else [(root, console)])]


def _is_ours(record: logging.LogRecord) -> bool:
    return record.name.partition(".")[0] == "headrace"


def _issued_by_library(frame: FrameType | None) -> bool:
    """Whether a library called warnings.warn; with a `stacklevel`, a warning of ours may name asyncio's file."""
    while frame is not None and frame.f_code.co_filename in (__file__, warnings.__file__):
        frame = frame.f_back
    return frame is None or is_library(frame.f_code.co_filename)
