"""What can be wrong about servers before one is started or asked."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
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
    if section.gpus and len(section.gpus) != section.replicas:
        raise ConfigError(
            f"engine.gpus names the GPUs of {len(section.gpus)} servers, and engine.replicas is {section.replicas}; "
            f"give one entry for each replica"
        )
    expanded(section.server_env, "engine.server_env")


def interpreter(given: str | None, shown: str) -> str | None:
    """The Python that servers are started with, as a command; None for this one."""
    if given is None:
        return None
    path = str(Path(given).expanduser())
    if not (os.access(path, os.X_OK) if os.sep in given else shutil.which(path)):
        problem = "cannot be executed" if Path(path).exists() else "is not there"
        raise ConfigError(f'engine.python = "{given}" {problem}; name the interpreter of an environment with {shown}')
    return path


def require_package(python: str | None, package: str, shown: str) -> None:
    """Raise ConfigError if servers that are started with this interpreter would not find their package."""
    looks = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({package!r}) is None)"
    if subprocess.run([python or sys.executable, "-c", looks], capture_output=True, check=False).returncode:
        where = f'engine.python = "{python}"' if python else "Headrace's own environment"
        remedy = f"set engine.python to an interpreter that has it{_HOW.get(package, '')}"
        raise ConfigError(f'engine.name = "{package}" needs {shown}, and {where} has none; {remedy}')


_HOW = {"vllm": " (in a clone of Headrace, `make vllm` makes .venv-vllm/bin/python, for the CPU)"}
