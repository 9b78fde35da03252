"""The tutorial: its files are written and its commands run, in order, as a reader would."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
FILES = re.findall(r"^```\w+\n# file: (\S+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
COMMANDS = [
    shlex.split(line, comments=True)
    for block in re.findall(r"^```bash\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    for line in block.splitlines()
    if line.startswith("headrace ")
]


def test_the_tutorial_has_files_and_commands() -> None:
    assert [name for name, _ in FILES] == ["guess.py", "guess.toml"]
    assert len(COMMANDS) == 9


@pytest.mark.slow
def test_every_command_of_the_tutorial_works(tmp_path: Path) -> None:
    for name, text in FILES:
        (tmp_path / name).write_text(text, encoding="utf-8")
    for command in COMMANDS:
        done = subprocess.run(
            [sys.executable, "-m", *command], cwd=tmp_path, env=os.environ, text=True, capture_output=True, timeout=600
        )
        assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    assert (tmp_path / "guess-model" / "config.json").is_file()
