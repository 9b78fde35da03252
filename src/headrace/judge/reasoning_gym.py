"""The reasoning-gym package's own scorers, for tasks from `reasoning_gym:FAMILY`.

They run in worker processes that can be killed: some evaluate what the model wrote, which may take for ever.
"""

from __future__ import annotations

import json
from typing import Any

from headrace.data.episode import Episode
from headrace.data.sources.reasoning_gym import KEY, problem_of
from headrace.data.task import Task
from headrace.data.untrusted import enclosed
from headrace.errors import DataError, WorkflowError
from headrace.judge.base import Judger, Verdict
from headrace.judge.extract import LONGEST_TEXT
from headrace.judge.pool import WorkerCrashError, WorkerFailedError, WorkerPool, WorkerTimeoutError

_OPEN, _CLOSE = "<answer>", "</answer>"
_PREPARE_S = 600.0  # a worker makes all problems of a family before it scores the first


class ReasoningGymJudger(Judger):
    """The score of what stands in the last <answer> tags or, if there are none, of the complete reply.

    With `tags_required`, a reply without tags scores 0. A score of 1 is correct. Some scorers raise on a reply that
    they cannot read: the episode fails then, or gets `error_score`. A reply whose scoring takes longer than `timeout_s`
    is wrong.
    """

    def __init__(
        self,
        tags_required: bool = False,
        error_score: float | None = None,
        timeout_s: float = 10.0,
        workers: int = 1,
        memory_mb: int = 4096,
    ) -> None:
        self._tags_required = tags_required
        self._error_score = error_score
        self._pool = WorkerPool("headrace.judge.reasoning_gym:serve", workers, timeout_s, memory_mb)

    async def judge(self, task: Task, episode: Episode) -> Verdict:
        if KEY not in task.metadata:
            raise WorkflowError(
                f'judger "reasoning_gym" scores tasks of "reasoning_gym:FAMILY", and task "{task.id}" is none; '
                f"use another judger for it"
            )
        tagged = _last_answer(episode.text)
        metrics = {"answer_tags": float(tagged is not None), "judge_timed_out": 0.0}
        if tagged is None and self._tags_required:
            return Verdict(0.0, is_correct=False, metrics=metrics)
        answer = episode.text.strip() if tagged is None else tagged
        try:
            score = await self._score(task, answer[-LONGEST_TEXT:])
        except WorkflowError:
            if self._error_score is None:
                raise
            score = self._error_score
        except (WorkerTimeoutError, WorkerCrashError):
            return Verdict(0.0, is_correct=False, metrics={**metrics, "judge_timed_out": 1.0})
        return Verdict(score, is_correct=score >= 1.0, metrics=metrics)

    async def _score(self, task: Task, answer: str) -> float:
        problem = task.metadata[KEY]
        doing = f'the scorer of reasoning_gym\'s family "{problem["family"]}" failed on task "{task.id}"'
        try:
            while (score := await self._pool.call("score", problem, answer)) is None:
                await self._prepare(task)
        except WorkerFailedError as error:
            raise WorkflowError(f"{doing}: {error}") from None
        return score

    async def _prepare(self, task: Task) -> None:
        """Have a worker make the problems: that is no fault of the reply, whatever comes of it."""
        try:
            await self._pool.call("prepare", task.metadata[KEY], time_s=_PREPARE_S)
        except (WorkerTimeoutError, WorkerCrashError, WorkerFailedError) as error:
            raise DataError(f'task "{task.id}": its family cannot be made again to be scored: {error}') from None

    async def close(self) -> None:
        """End the workers."""
        await self._pool.close()


def _last_answer(text: str) -> str | None:
    """As the package finds it, in linear time."""
    found = None
    for start, end in enclosed(text, _OPEN, _CLOSE):
        found = text[start + len(_OPEN) : end - len(_CLOSE)].strip()
    return found


_prepared: set[str] = set()


def serve(what: str, problem: dict[str, Any], answer: str = "") -> float | None:
    """Runs in a worker: a score, or None if the worker has to be prepared for the family first."""
    key = json.dumps([problem["family"], problem["settings"]], sort_keys=True)
    if what == "score" and key not in _prepared:
        return None
    problems, entry = problem_of({KEY: problem})
    _prepared.add(key)
    return float(problems.score_answer(answer, entry)) if what == "score" else None
