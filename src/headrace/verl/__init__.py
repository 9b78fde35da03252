"""verl's agent loops as workflows, and workflows as verl's agent loops."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def as_agent_loop(
    workflow: Any,
    args: Mapping[str, Any] | None = None,
    judger: Any = None,
    judger_args: Mapping[str, Any] | None = None,
) -> type[Any]:
    """A class derived from verl's AgentLoopBase that runs a workflow: a function, a class, or "module:name".

    With a judger, its reward goes to verl for episodes whose workflow returned none; without, verl's own reward
    function is asked. Name the class in the file of `agent_loop_config_path`, or use
    `headrace.verl.workflow_loop.WorkflowLoop` there.
    """
    from headrace.verl.workflow_loop import loop_class

    return loop_class(workflow, dict(args or {}), judger, dict(judger_args or {}))
