"""Headrace trains language-model agents with reinforcement learning. Names load when they are first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.algorithms.advantages.assign import assign_advantages
    from headrace.algorithms.advantages.estimators import GroupRewards
    from headrace.algorithms.batching import pack, to_samples
    from headrace.config import (
        AgentLoopConfig,
        AlgorithmSection,
        DataSection,
        EvaluatorConfig,
        JudgeSection,
        RunConfig,
        TrainerSection,
    )
    from headrace.config.loading import build_config, load_config
    from headrace.data.episode import Episode, ModelOutput, Step, TerminationReason, Trajectory, TrajectoryGroup
    from headrace.data.sample import Sample, TrainBatch
    from headrace.data.sampler import TaskSampler
    from headrace.data.task import Message, Task, load_tasks
    from headrace.data.training import make_sampler
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
    from headrace.evaluation.evaluator import Evaluator
    from headrace.evaluation.setup import open_policy
    from headrace.judge.base import Judger, Verdict
    from headrace.judge.router import Router
    from headrace.registry import register
    from headrace.rollout.environment import Environment
    from headrace.rollout.gateway import model_session
    from headrace.rollout.model_client import Model
    from headrace.rollout.tools import Tool, tool
    from headrace.rollout.workflow import Workflow, self_distill
    from headrace.run.checkpoint import TrainerState
    from headrace.run.checkpoint_writer import CheckpointWriter
    from headrace.scheduling.buffer import TrajectoryGroupBuffer
    from headrace.scheduling.manager import AgentLoopManager
    from headrace.trainer.callbacks import Callback
    from headrace.trainer.trainer import RunResult, UnifiedTrainer

__version__ = "0.1.0"

_HOME = {
    "AgentLoopConfig": "headrace.config",
    "AgentLoopManager": "headrace.scheduling.manager",
    "AlgorithmSection": "headrace.config",
    "BudgetExceededError": "headrace.errors",
    "Callback": "headrace.trainer.callbacks",
    "CheckpointWriter": "headrace.run.checkpoint_writer",
    "ConfigError": "headrace.errors",
    "DataError": "headrace.errors",
    "DataSection": "headrace.config",
    "Environment": "headrace.rollout.environment",
    "Episode": "headrace.data.episode",
    "Evaluator": "headrace.evaluation.evaluator",
    "EvaluatorConfig": "headrace.config",
    "GroupRewards": "headrace.algorithms.advantages.estimators",
    "HeadraceError": "headrace.errors",
    "InfrastructureError": "headrace.errors",
    "JudgeSection": "headrace.config",
    "Judger": "headrace.judge.base",
    "Message": "headrace.data.task",
    "Model": "headrace.rollout.model_client",
    "ModelOutput": "headrace.data.episode",
    "PromptTooLongError": "headrace.errors",
    "Router": "headrace.judge.router",
    "RunConfig": "headrace.config",
    "RunResult": "headrace.trainer.trainer",
    "Sample": "headrace.data.sample",
    "SamplingParams": "headrace.engines.base",
    "Step": "headrace.data.episode",
    "Task": "headrace.data.task",
    "TaskSampler": "headrace.data.sampler",
    "TerminationReason": "headrace.data.episode",
    "Tool": "headrace.rollout.tools",
    "TrainBatch": "headrace.data.sample",
    "TrainerSection": "headrace.config",
    "TrainerState": "headrace.run.checkpoint",
    "Trajectory": "headrace.data.episode",
    "TrajectoryGroup": "headrace.data.episode",
    "TrajectoryGroupBuffer": "headrace.scheduling.buffer",
    "UnifiedTrainer": "headrace.trainer.trainer",
    "Verdict": "headrace.judge.base",
    "Workflow": "headrace.rollout.workflow",
    "WorkflowError": "headrace.errors",
    "assign_advantages": "headrace.algorithms.advantages.assign",
    "build_config": "headrace.config.loading",
    "load_config": "headrace.config.loading",
    "load_tasks": "headrace.data.task",
    "make_sampler": "headrace.data.training",
    "model_session": "headrace.rollout.gateway",
    "open_policy": "headrace.evaluation.setup",
    "pack": "headrace.algorithms.batching",
    "register": "headrace.registry",
    "self_distill": "headrace.rollout.workflow",
    "to_samples": "headrace.algorithms.batching",
    "tool": "headrace.rollout.tools",
}

__all__ = [
    "AgentLoopConfig", "AgentLoopManager", "AlgorithmSection", "BudgetExceededError", "Callback", "CheckpointWriter",
    "ConfigError", "DataError", "DataSection", "Environment", "Episode", "Evaluator", "EvaluatorConfig",
    "GroupRewards", "HeadraceError", "InfrastructureError", "JudgeSection", "Judger", "Message", "Model",
    "ModelOutput", "PromptTooLongError", "Router", "RunConfig", "RunResult", "Sample", "SamplingParams", "Step",
    "Task", "TaskSampler", "TerminationReason", "Tool", "TrainBatch", "TrainerSection", "TrainerState", "Trajectory",
    "TrajectoryGroup", "TrajectoryGroupBuffer", "UnifiedTrainer", "Verdict", "Workflow", "WorkflowError",
    "__version__", "assign_advantages", "build_config", "load_config", "load_tasks", "make_sampler", "model_session",
    "open_policy", "pack", "register", "self_distill", "to_samples", "tool",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'headrace' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
