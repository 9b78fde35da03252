"""What is checked before anything of a run is built: a start begins with it, and a dry run ends with it."""

from __future__ import annotations

from collections.abc import Collection

from headrace.backends.setup import Choice, choose
from headrace.config import RunConfig
from headrace.config.names import check_names
from headrace.config.rules import check_declared
from headrace.errors import ConfigError
from headrace.registry import resolve
from headrace.rollout.workflow import single_turn
from headrace.scheduling.manager import needs_reward


def check_parts(config: RunConfig, objects: Collection[str] = ()) -> Choice:
    """All that can be known to be wrong before tasks are read and weights are loaded: names, backend, engine, device.

    `objects` are given in place of names.
    """
    check_names(config, objects)
    _require_rewards(config, objects)
    choice = choose(config)
    check_declared(config)
    return choice


def _require_rewards(config: RunConfig, objects: Collection[str]) -> None:
    judged = bool(config.workflow.judger or config.judge.routes or {"workflow", "judger"} & {*objects})
    if judged or config.algorithm.objective == "sft" or not needs_reward(config.algorithm)("agent"):
        return
    if resolve("workflow", config.workflow.name) is single_turn:
        raise ConfigError(
            'workflow "single_turn" gives no reward and there is no judger; set workflow.judger, '
            "or use a workflow that returns a number"
        )
