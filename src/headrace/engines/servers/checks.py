"""What can be wrong about servers before one is started or asked."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from headrace.config import EngineSection
from headrace.engines.http import authorization
from headrace.errors import ConfigError
from headrace.utils.child_environment import expanded


def check_servers(section: EngineSection, shown: str) -> None:
    """Raise ConfigError for a key, an interpreter or a variable that is not there; `shown` is their project."""
    if section.urls:
        authorization(section.api_key_env)
        return
    interpreter(section.python, shown)
    expanded(section.server_env, "engine.server_env")


def interpreter(given: str | None, shown: str) -> str | None:
    """The Python that servers are started with, as a command; None for this one."""
    if given is None:
        return None
    path = str(Path(given).expanduser())
    there = os.access(path, os.X_OK) if os.sep in given else shutil.which(path)
    if not there:
        raise ConfigError(
            f'engine.python = "{given}" is not there; name the interpreter of an environment with {shown}'
        )
    return path
