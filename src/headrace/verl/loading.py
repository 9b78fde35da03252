"""The workflow that `workflow.name = "verl:module:Class"` names. verl is imported only here, when a run asks for it."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from headrace.errors import ConfigError, MissingExtraError
from headrace.registry import load_object


def agent_loop_workflow(name: str) -> type[Any]:
    """A workflow class that runs the agent loop class `"module:Class"` or `"file.py:Class"`."""
    try:
        importlib.import_module("verl")
    except ModuleNotFoundError as missing:
        raise MissingExtraError(
            f'"{missing.name}" is not installed, which the agent loop {name} needs; run Headrace where '
            f"verl is installed (docs/verl_agent_loops.md)"
        ) from missing
    found = load_object(name)
    loops = importlib.import_module("headrace.verl.agent_loops")
    if not (inspect.isclass(found) and issubclass(found, loops.AgentLoopBase)):
        raise ConfigError(f'"{name}" is no class derived from verl\'s AgentLoopBase; name one, as "verl:module:Class"')
    return type(found.__name__, (loops.AgentLoopWorkflow,), {"loop_class": found, "__doc__": found.__doc__})
