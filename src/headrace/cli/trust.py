"""Run folders of others: a run's config.json names code and programs, which a command that uses it would run."""

from __future__ import annotations

import grp
import json
import os
import pwd
import re
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from headrace.errors import ConfigError

Trust = Annotated[
    bool,
    Parameter(negative="", show_default=False, help="Run what the config.json of another's run folder names."),
]
_CODE = re.compile(r"[\w./~-]+:[A-Za-z_][\w.]*")
_SHOWN, _LONGEST = 8, 200


def require_trust(run: Path, trusted: bool) -> None:
    """Ask before a run folder is used whose config.json somebody else could have written; refuse off a terminal."""
    why = why_not_ours(run)
    if why is None or trusted:
        return
    named = sorted(set(code_names(run)))
    names = f"; it names {', '.join(named[:_SHOWN])}{', ...' if len(named) > _SHOWN else ''}" if named else ""
    said = f"{why}, and its config.json says which code and programs are run{names}"
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise ConfigError(f"{said}; look at it, then add --trust")
    print(f"{said}\nRun them? [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise ConfigError(f"{run} was not used; look at its config.json, or copy what you need into a run file")


def why_not_ours(run: Path) -> str | None:
    """Whether somebody else could have written the config of a run: None if not, else how."""
    for path in (run, run / "config.json"):
        try:
            found = path.stat()
        except OSError:  # the reader of the file reports it
            continue
        if found.st_uid not in (os.geteuid(), 0):  # root could do anything anyway
            return f"{path} belongs to {_user(found.st_uid)}"
        if found.st_mode & stat.S_IWOTH or (found.st_mode & stat.S_IWGRP and not _is_private(found.st_gid)):
            return f"{path} can be written by others (mode {stat.S_IMODE(found.st_mode):o})"
    return None


def code_names(run: Path) -> Iterator[str]:
    """What the config of a run names as `module:object` or `file.py:object`, and the commands in it."""
    try:
        yield from _names(json.loads((run / "config.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError):  # the reader of the file reports it
        return


def _names(value: Any, key: str = "") -> Iterator[str]:
    if key == "command" and isinstance(value, list):
        yield f'"{" ".join(map(str, value))[:_LONGEST]}"'
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from _names(inner, name)
    elif isinstance(value, list):
        for inner in value:
            yield from _names(inner)
    elif isinstance(value, str) and _CODE.fullmatch(value):
        yield f'"{value[:_LONGEST]}"'


def _user(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"user {number}"


def _is_private(group: int) -> bool:
    """Whether a group is the user's own, as many systems make one for each user."""
    try:
        user, found = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except KeyError:
        return False
    return group == user.pw_gid and found.gr_name == user.pw_name and set(found.gr_mem) <= {user.pw_name}
