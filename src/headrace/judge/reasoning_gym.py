"""The reasoning-gym package's own scorers, for tasks from `reasoning_gym:FAMILY`."""

from __future__ import annotations

from headrace.data.episode import Episode
from headrace.data.sources.reasoning_gym import KEY, problem_of
from headrace.data.task import Task
from headrace.data.untrusted import enclosed
from headrace.errors import WorkflowError, boundary
from headrace.judge.base import Judger, Verdict
from headrace.threads import call_anyhow

_OPEN, _CLOSE = "<answer>", "</answer>"


class ReasoningGymJudger(Judger):
    """The score of what stands in the last <answer> tags or, if there are none, of the whole reply.

    With `tags_required`, a reply without tags scores 0. A score of 1 is correct. Some scorers raise on a reply that
    they cannot read: the episode fails then, or gets `error_score`.
    """

    def __init__(self, tags_required: bool = False, error_score: float | None = None) -> None:
        self._tags_required = tags_required
        self._error_score = error_score

    async def judge(self, task: Task, episode: Episode) -> Verdict:
        if KEY not in task.metadata:
            raise WorkflowError(
                f'judger "reasoning_gym" scores tasks of "reasoning_gym:FAMILY", and task "{task.id}" is none; '
                f"use another judger for it"
            )
        tagged = _last_answer(episode.text)
        metrics = {"answer_tags": float(tagged is not None)}
        if tagged is None and self._tags_required:
            return Verdict(0.0, is_correct=False, metrics=metrics)
        try:
            score = await call_anyhow(_score, task, episode.text.strip() if tagged is None else tagged)
        except WorkflowError:
            if self._error_score is None:
                raise
            score = self._error_score
        return Verdict(score, is_correct=score >= 1.0, metrics=metrics)


def _last_answer(text: str) -> str | None:
    """As the package finds it, in linear time."""
    found = None
    for start, end in enclosed(text, _OPEN, _CLOSE):
        found = text[start + len(_OPEN) : end - len(_CLOSE)].strip()
    return found


def _score(task: Task, answer: str) -> float:
    family = task.metadata[KEY]["family"]
    with boundary(WorkflowError, f'the scorer of reasoning_gym\'s family "{family}" failed on task "{task.id}"'):
        problems, problem = problem_of(task.metadata)
        return float(problems.score_answer(answer, problem))
