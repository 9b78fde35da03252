"""What a run says at its beginning and its end can be followed: commands that work, pages that are there."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

import pytest

from headrace.config.loading import build_config
from headrace.trainer.summary import summarize
from headrace.trainer.trainer import RunResult
from headrace.utils.own_command import own_command


@pytest.fixture(autouse=True)
def asked_anew() -> None:
    own_command.cache_clear()


def closing_lines(run_dir: Path, capsys: pytest.CaptureFixture[str], interrupted: bool = False) -> list[str]:
    run_dir.mkdir(parents=True)
    summarize(RunResult(run_dir, 3, interrupted, {}, {}, {}), build_config({"track": {"plot": False}}))
    return capsys.readouterr().out.splitlines()


def test_without_a_terminal_every_command_stands_on_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / ("a_long_name" * 12)
    (line,) = [line for line in closing_lines(run_dir, capsys, interrupted=True) if line.startswith("resume")]
    assert line.endswith(f" train --resume {run_dir}")


@pytest.mark.parametrize("found", [True, False], ids=["on the PATH", "not on the PATH"])
def test_a_command_that_is_recommended_works_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], found: bool
) -> None:
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    if found:
        (bin_ / "headrace").touch(0o755)
    monkeypatch.setenv("PATH", str(bin_))
    (line,) = [line for line in closing_lines(tmp_path / "r", capsys) if line.startswith("look at it")]
    program = shlex.split(line.removeprefix("look at it"))[0]
    assert shutil.which(program) and (program == "headrace") == found


def test_the_next_page_is_the_tutorial_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert not [line for line in closing_lines(tmp_path / "r", capsys) if "own" in line]
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "tutorial.md").touch()
    (line,) = [line for line in closing_lines(tmp_path / "s", capsys) if line.startswith("next")]
    assert line.endswith("an agent of your own: docs/tutorial.md")
