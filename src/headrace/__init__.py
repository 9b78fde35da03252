"""Headrace trains language-model agents with reinforcement learning. Names load when they are first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from headrace.utils.openmp import limit_spinning

if TYPE_CHECKING:
    from headrace.algorithms.advantages.estimators import GroupRewards
    from headrace.config import AlgorithmSection, RunConfig
    from headrace.config.loading import build_config, load_config
    from headrace.data.episode import Episode, ModelOutput, Step, TerminationReason, Trajectory, TrajectoryGroup
    from headrace.data.sample import Sample, TrainBatch
    from headrace.data.task import Message, Task, load_tasks
    from headrace.engines.base import SamplingParams
    from headrace.errors import (
        BudgetExceededError,
        ConfigError,
        DataError,
        HeadraceError,
        InfrastructureError,
        PromptTooLongError,
        WorkflowError,
    )
    from headrace.judge.base import Judger, Verdict
    from headrace.registry import register
    from headrace.rollout.environment import Environment
    from headrace.rollout.gateway import model_session
    from headrace.rollout.model_client import Model
    from headrace.rollout.tools import Tool, tool
    from headrace.rollout.workflow import Workflow, self_distill
    from headrace.trainer.callbacks import Callback
    from headrace.trainer.trainer import RunResult, UnifiedTrainer

__version__ = "0.1.0"

_HOME = {
    "AlgorithmSection": "headrace.config",
    "BudgetExceededError": "headrace.errors",
    "Callback": "headrace.trainer.callbacks",
    "ConfigError": "headrace.errors",
    "DataError": "headrace.errors",
    "Environment": "headrace.rollout.environment",
    "Episode": "headrace.data.episode",
    "GroupRewards": "headrace.algorithms.advantages.estimators",
    "HeadraceError": "headrace.errors",
    "InfrastructureError": "headrace.errors",
    "Judger": "headrace.judge.base",
    "Message": "headrace.data.task",
    "Model": "headrace.rollout.model_client",
    "ModelOutput": "headrace.data.episode",
    "PromptTooLongError": "headrace.errors",
    "RunConfig": "headrace.config",
    "RunResult": "headrace.trainer.trainer",
    "Sample": "headrace.data.sample",
    "SamplingParams": "headrace.engines.base",
    "Step": "headrace.data.episode",
    "Task": "headrace.data.task",
    "TerminationReason": "headrace.data.episode",
    "Tool": "headrace.rollout.tools",
    "TrainBatch": "headrace.data.sample",
    "Trajectory": "headrace.data.episode",
    "TrajectoryGroup": "headrace.data.episode",
    "UnifiedTrainer": "headrace.trainer.trainer",
    "Verdict": "headrace.judge.base",
    "Workflow": "headrace.rollout.workflow",
    "WorkflowError": "headrace.errors",
    "build_config": "headrace.config.loading",
    "load_config": "headrace.config.loading",
    "load_tasks": "headrace.data.task",
    "model_session": "headrace.rollout.gateway",
    "register": "headrace.registry",
    "self_distill": "headrace.rollout.workflow",
    "tool": "headrace.rollout.tools",
}

__all__ = [
    "AlgorithmSection", "BudgetExceededError", "Callback", "ConfigError", "DataError", "Environment", "Episode",
    "GroupRewards", "HeadraceError", "InfrastructureError", "Judger", "Message", "Model", "ModelOutput",
    "PromptTooLongError", "RunConfig", "RunResult", "Sample", "SamplingParams", "Step", "Task", "TerminationReason",
    "Tool", "TrainBatch", "Trajectory", "TrajectoryGroup", "UnifiedTrainer", "Verdict", "Workflow", "WorkflowError",
    "__version__", "build_config", "load_config", "load_tasks", "model_session", "register", "self_distill", "tool",
]  # fmt: skip

limit_spinning()  # before torch is loaded


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'headrace' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
