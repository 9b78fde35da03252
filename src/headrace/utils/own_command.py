"""How a person calls Headrace here: what messages say to type must work when it is typed."""

from __future__ import annotations

import shutil
import sys
from functools import cache
from pathlib import Path


@cache
def own_command() -> str:
    """ "headrace" where the shell finds it; else the script beside this Python, or Python with -m."""
    if shutil.which("headrace"):
        return "headrace"
    python = Path(sys.executable)
    script = python.with_name("headrace")
    return _short(script) if script.is_file() else f"{_short(python)} -m headrace"


def _short(path: Path) -> str:
    """Relative to the working directory, if it is below it."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
