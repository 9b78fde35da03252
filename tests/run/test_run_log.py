"""log.txt: each run has its own, and gives the logger back."""

from __future__ import annotations

import errno
import importlib.util
import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from headrace.run.directory import log_to_file
from headrace.tracking.notices import to_console


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


def test_a_log_that_cannot_be_written_is_reported_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    handler: Any = log_to_file(tmp_path)
    own, handler.stream = handler.stream, FullStream()
    for _ in range(3):
        logging.getLogger("headrace").info("hello")
    handler.stream = own
    handler.close()
    assert capsys.readouterr().err.count("log.txt: ") == 1


# ---- warnings --------------------------------------------------------------------------------------------------------


@pytest.fixture
def library(tmp_path: Path) -> Any:
    """A package as it is installed."""
    path = tmp_path / "site-packages" / "noisy.py"
    path.parent.mkdir()
    path.write_text(
        "import logging, warnings\ndef warn(text):\n    warnings.warn(text)\n    logging.getLogger('x').warning(text)\n"
    )
    spec = importlib.util.spec_from_file_location("noisy", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextmanager
def bare() -> Iterator[None]:
    """As in a process of its own: no handlers of the test runner's, warnings are printed."""
    root, logger = logging.getLogger(), logging.getLogger("headrace")
    before = root.handlers[:], logger.handlers[:], logger.propagate
    root.handlers, logger.handlers = [], []
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        warnings.showwarning = lambda message, *_: print(f"warning: {message}", file=sys.stderr)
        yield
    root.handlers, logger.handlers, logger.propagate = before


def test_warnings_of_ours_and_of_users_are_shown_once_and_all_are_logged(
    tmp_path: Path, library: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    with bare():
        handler = log_to_file(tmp_path)
        for _ in range(2):
            warnings.warn("by the user", stacklevel=1)
            logging.getLogger("mine").warning("logged by the user")
            logging.getLogger("headrace.engines").warning("ours")
        library.warn("noise")
        handler.close()
    shown, kept = capsys.readouterr().err.splitlines(), (tmp_path / "log.txt").read_text()
    assert sorted(shown) == ["warning: by the user", "warning: logged by the user", "warning: ours"]
    assert kept.count("noise") == 2 and kept.count("WARNING ours") == 2 and "by the user" in kept


def test_many_warnings_of_a_kind_are_few_on_the_console(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with bare():
        handler = log_to_file(tmp_path)
        for number in range(100):
            logging.getLogger("headrace").warning("episode of task %d failed", number)
        handler.close()
    shown = capsys.readouterr().err.splitlines()
    assert len(shown) == 3 and shown[-1].endswith("(further ones of this kind are in log.txt alone)")
    assert len((tmp_path / "log.txt").read_text().splitlines()) == 100


def test_a_command_shows_a_warning_once_also_while_a_run_lasts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with bare():
        to_console()
        handler = log_to_file(tmp_path)
        logging.getLogger("headrace").warning("ours")
        handler.close()
    assert capsys.readouterr().err == "warning: ours\n"
