"""Mathematical answers, compared by the math-verify package in worker processes."""

from __future__ import annotations

import importlib.util

from headrace.data.episode import Episode
from headrace.data.task import Task
from headrace.errors import DataError, MissingExtraError, install_line
from headrace.judge.base import Judger, Verdict
from headrace.judge.extract import check_where, expected, marked
from headrace.judge.pool import WorkerCrashError, WorkerFailedError, WorkerPool, WorkerTimeoutError

_LONGEST = 2_000  # characters of an answer; of a text without a marked answer, the end is read


class MathJudger(Judger):
    r"""1 if the answer is equal to the expected one: in \boxed{}, after ####, in <answer>, or at the end.

    An answer that takes longer than `timeout_s`, or too much memory, is wrong. An expected answer that cannot be read
    is a failure of the data: the episode fails.
    """

    def __init__(
        self,
        where: str | list[str] = "auto",
        marked_only: bool = False,
        timeout_s: float = 5.0,
        workers: int = 2,
        memory_mb: int = 2048,
    ) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise MissingExtraError(
                f'"math-verify" is not installed, which the judger "math" needs; in the clone: {install_line("math")}'
            )
        self._where = check_where(where)
        self._marked_only = marked_only
        self._pool = WorkerPool("headrace.judge.verify:serve", workers, timeout_s, memory_mb)
        self._readable: dict[str, bool] = {}

    async def judge(self, task: Task, episode: Episode) -> Verdict:
        golds = [marked(text, ("box", "marks", "text")) or "" for text in map(str, expected(task))]
        given = marked(episode.text, self._where)
        boxed = given is not None
        if given is None:
            given = "" if self._marked_only else episode.text[-_LONGEST:]
        if len(given) > _LONGEST or not given.strip():
            await self._check_golds(task, golds)
            return _verdict("unreadable")
        try:
            found = await self._pool.call("compare", golds, given, boxed)
        except (WorkerTimeoutError, WorkerCrashError):
            await self._check_golds(task, golds)
            return _verdict("timed out")
        except WorkerFailedError:
            await self._check_golds(task, golds)
            return _verdict("unreadable")
        if found == "gold":
            raise _unreadable_gold(task)
        return _verdict(found)

    async def _check_golds(self, task: Task, golds: list[str]) -> None:
        """Whose fault was it? Only an expected answer that can be read makes the given one wrong."""
        for gold in golds:
            if gold not in self._readable:
                try:
                    self._readable[gold] = await self._pool.call("readable", gold)
                except (WorkerTimeoutError, WorkerCrashError, WorkerFailedError):
                    self._readable[gold] = False
        if not any(self._readable[gold] for gold in golds):
            raise _unreadable_gold(task)

    async def close(self) -> None:
        """End the workers."""
        await self._pool.close()


def _unreadable_gold(task: Task) -> DataError:
    return DataError(
        f'task "{task.id}": the expected answer {str(task.answer)[:80]!r} cannot be read as mathematics; '
        "correct the task, or judge its source with another judger"
    )


def _verdict(found: str) -> Verdict:
    metrics = {"answer_readable": float(found in ("right", "wrong")), "judge_timed_out": float(found == "timed out")}
    return Verdict(float(found == "right"), is_correct=found == "right", metrics=metrics)
