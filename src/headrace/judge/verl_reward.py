"""Reward functions that were written for verl, called as verl's "naive" reward manager calls them."""

from __future__ import annotations

from typing import Any

from headrace.data.episode import Episode, is_number
from headrace.data.task import Task
from headrace.errors import WorkflowError
from headrace.judge.base import Judger, Verdict
from headrace.registry import load_object, require_parameters
from headrace.utils.threads import call_sync_or_async


class VerlReward(Judger):
    """Calls `function(data_source, solution_str, ground_truth, extra_info)`, by default verl's own for known data sets.

    The task's source, answer and metadata["extra_info"] (or all its metadata) are what verl's rows hold under these
    names. `solution_str` is the model's last reply.
    """

    def __init__(self, function: str = "verl.utils.reward_score:default_compute_score", **arguments: Any) -> None:
        self._name = function
        self._function = load_object(function)
        require_parameters(
            self._function, ("data_source", "solution_str", "ground_truth", "extra_info"), f'reward "{function}"'
        )
        self._arguments = arguments

    async def judge(self, task: Task, episode: Episode) -> Verdict:
        """The score; a dict must have "score", and its other numbers are metrics."""
        score = await call_sync_or_async(
            self._function,
            data_source=task.source,
            solution_str=episode.text,
            ground_truth=task.answer,
            extra_info=task.metadata.get("extra_info", task.metadata),
            **self._arguments,
        )
        metrics: dict[str, float] = {}
        value: Any = score
        if isinstance(score, dict):
            metrics = {key: float(value) for key, value in score.items() if key != "score" and is_number(value)}
            value = score.get("score")
        if not is_number(value):
            raise WorkflowError(f'reward "{self._name}" must give a number, or a dict with "score", got {score!r}')
        return Verdict(float(value), is_correct=float(value) >= 1.0, metrics=metrics)
