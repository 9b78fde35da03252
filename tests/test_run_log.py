"""log.txt: each run has its own, and gives the logger back."""

from __future__ import annotations

import errno
import logging
from pathlib import Path
from typing import Any

import pytest

from headrace.rundir import log_to_file


def test_each_run_has_a_log_of_its_own(tmp_path: Path) -> None:
    logger = logging.getLogger("headrace")
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        handler = log_to_file(tmp_path / name)
        logger.info("hello from %s", name)
        handler.close()
    for name in ("one", "two"):
        (line,) = (tmp_path / name / "log.txt").read_text().splitlines()
        assert line.endswith(f"INFO hello from {name}")


def test_a_closed_log_leaves_the_logger_as_it_was(tmp_path: Path) -> None:
    logger = logging.getLogger("headrace")
    before = (logger.level, logger.propagate, list(logger.handlers))
    handler = log_to_file(tmp_path)
    assert (logger.level, logger.propagate) == (logging.INFO, False)
    handler.close()
    assert (logger.level, logger.propagate, list(logger.handlers)) == before
    logger.setLevel(logging.ERROR)
    handler.close()  # as at exit, once more
    assert logger.level == logging.ERROR
    logger.setLevel(before[0])


class FullStream:
    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    def flush(self) -> None: ...


def test_a_log_that_cannot_be_written_is_told_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    handler: Any = log_to_file(tmp_path)
    own, handler.stream = handler.stream, FullStream()
    for _ in range(3):
        logging.getLogger("headrace").info("hello")
    handler.stream = own
    handler.close()
    assert capsys.readouterr().err.count("log.txt: ") == 1
