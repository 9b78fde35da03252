"""Headrace trains language-model agents with reinforcement learning. Names load when they are first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from headrace.openmp import wait_briefly

if TYPE_CHECKING:
    from headrace.agents.completer import Model
    from headrace.agents.workflow import Workflow, self_distill
    from headrace.callbacks import Callback
    from headrace.config import RunConfig
    from headrace.data.episode import Episode, ModelOutput, Step, Trajectory, TrajectoryGroup
    from headrace.data.sample import Sample, TrainBatch
    from headrace.data.task import Task
    from headrace.errors import HeadraceError
    from headrace.judge.base import Judger, Verdict
    from headrace.registry import register
    from headrace.runfile import load_config
    from headrace.trainer import RunResult, UnifiedTrainer

__version__ = "0.1.0"

_HOME = {
    "Callback": "headrace.callbacks",
    "Episode": "headrace.data.episode",
    "HeadraceError": "headrace.errors",
    "Judger": "headrace.judge.base",
    "Model": "headrace.agents.completer",
    "ModelOutput": "headrace.data.episode",
    "RunConfig": "headrace.config",
    "RunResult": "headrace.trainer",
    "Sample": "headrace.data.sample",
    "Step": "headrace.data.episode",
    "Task": "headrace.data.task",
    "TrainBatch": "headrace.data.sample",
    "Trajectory": "headrace.data.episode",
    "TrajectoryGroup": "headrace.data.episode",
    "UnifiedTrainer": "headrace.trainer",
    "Verdict": "headrace.judge.base",
    "Workflow": "headrace.agents.workflow",
    "load_config": "headrace.runfile",
    "register": "headrace.registry",
    "self_distill": "headrace.agents.workflow",
}

__all__ = [
    "Callback", "Episode", "HeadraceError", "Judger", "Model", "ModelOutput", "RunConfig", "RunResult", "Sample",
    "Step", "Task", "TrainBatch", "Trajectory", "TrajectoryGroup", "UnifiedTrainer", "Verdict", "Workflow",
    "__version__", "load_config", "register", "self_distill",
]  # fmt: skip

wait_briefly()  # before torch is loaded


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'headrace' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
