"""Code with tests: the last Python block of the reply, run with the task's tests in a sandbox.

A test is a pair of input and output, or asserts. Expected outputs stay here: only what a program prints, and what its
functions return as plain data, is compared with them here. Asserts for which that is not possible would
have to run beside the program, which can forge their result: they are refused unless they are allowed by name.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.data.episode import Episode
from headrace.data.task import Task
from headrace.errors import ConfigError, DataError
from headrace.judge.asserts import Asserts, read_asserts
from headrace.judge.base import Judger, Verdict
from headrace.judge.evaluate import Evaluator
from headrace.judge.extract import LONGEST_TEXT, in_tags
from headrace.judge.guest import GUEST
from headrace.judge.sandbox import Mode, Sandbox, SandboxLimits
from headrace.judge.session import Session
from headrace.utils.deadline import deadline_paused

log = logging.getLogger("headrace")

# possessive, or two runs of spaces side by side take quadratic time
_BLOCK = re.compile(r"^```[ \t]*+(python3?|py)?[ \t]*+\n(.*?)^```", re.MULTILINE | re.DOTALL | re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class InputOutput:
    """A test by what the program reads and prints."""

    given: str
    expected: str


def solution_in(text: str) -> str | None:
    """The last ```python block, else the last block without a language, else what stands in <answer> tags."""
    blocks = _BLOCK.findall(text[-LONGEST_TEXT:])
    for wanted in (True, False):
        if found := [code for language, code in blocks if bool(language) is wanted]:
            return found[-1]
    return in_tags(text[-LONGEST_TEXT:])


def read_tests(task: Task, allow_forgeable: bool = False) -> tuple[list[Asserts], list[InputOutput]]:
    """The tests of `metadata["tests"]`; a task without usable ones is an error, not a wrong answer."""
    tests, entry_point = task.metadata.get("tests"), task.metadata.get("entry_point")
    tests = [tests] if isinstance(tests, str) else tests
    if not isinstance(tests, list) or not tests:
        raise DataError(f'task "{task.id}" has no tests; put a list of asserts, or of input and output, into metadata')
    if entry_point is not None and not isinstance(entry_point, str):
        raise DataError(f'task "{task.id}": metadata entry_point must be the name of a function, got {entry_point!r}')
    checks, pairs = [], []
    for test in tests:
        if isinstance(test, str):
            checks.append(_asserts_of(test, entry_point, task, allow_forgeable))
        elif isinstance(test, dict) and {"input", "output"} <= set(test):
            pairs.append(InputOutput(str(test["input"]), str(test["output"])))
        else:
            raise DataError(f'task "{task.id}": a test is a statement or has input and output, got {str(test)[:80]!r}')
    # what must run beside the program comes last: what is expected in it is of no use to it then
    return sorted(checks, key=lambda check: check.problem is not None), pairs


def _asserts_of(source: str, entry_point: str | None, task: Task, allow_forgeable: bool) -> Asserts:
    try:
        found = read_asserts(source, entry_point)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise DataError(f'task "{task.id}": the test {source[:80]!r} is no Python: {error}') from None
    if found.problem is not None and not allow_forgeable:
        raise DataError(
            f'task "{task.id}": a program could forge the result of the test {source[:200]!r}: {found.problem}; '
            "write it as a comparison of what a function returns (docs/judgers.md says which forms there are), or set "
            "the judger's argument allow_forgeable = true"
        )
    return found


class CodeJudger(Judger):
    """The share of passed tests, or with `all_or_nothing` 1 for all and 0 otherwise."""

    def __init__(
        self,
        all_or_nothing: bool = True,
        timeout_s: float = 10.0,
        memory_mb: int = 512,
        disk_mb: int = 32,
        processes: int = 32,
        output_bytes: int = 262_144,
        sandbox: Mode = "auto",
        workers: int = 2,
        allow_forgeable: bool = False,
    ) -> None:
        if workers < 1 or timeout_s <= 0:
            raise ConfigError(f"workers and timeout_s must be positive, got {workers} and {timeout_s}")
        self._all_or_nothing = all_or_nothing
        self._allow_forgeable = allow_forgeable
        limits = SandboxLimits(timeout_s, memory_mb, disk_mb, processes, output_bytes=output_bytes)
        self._sandbox = Sandbox(limits, sandbox)
        self._workers = workers
        self._semaphore = asyncio.Semaphore(workers)
        self._loop: asyncio.AbstractEventLoop | None = None

    def check_task(self, task: Task) -> None:
        read_tests(task, self._allow_forgeable)

    async def judge(self, task: Task, episode: Episode) -> Verdict:
        checks, pairs = read_tests(task, self._allow_forgeable)
        code = solution_in(episode.text)
        passed = 0
        if code is not None:
            jobs = [self._prints_all(code, pairs)]
            if checks:
                jobs.append(self._satisfies(code, checks))
            with deadline_paused():  # each program has its own, and a queue of slow ones is no failure of judging
                passed = sum(await asyncio.gather(*jobs))
        share = passed / (len(checks) + len(pairs))
        reward = float(share == 1.0) if self._all_or_nothing else share
        return Verdict(reward, is_correct=share == 1.0, metrics={"tests_passed": share, "has_code": float(bool(code))})

    def _slots(self) -> asyncio.Semaphore:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:  # of an earlier asyncio.run
            self._loop, self._semaphore = loop, asyncio.Semaphore(self._workers)
        return self._semaphore

    async def _prints_all(self, code: str, pairs: Sequence[InputOutput]) -> int:
        """How many outputs are right; after one for which the program had to be killed, the rest counts as wrong."""
        payload = json.dumps({"code": code}).encode()
        killed = False

        async def prints(pair: InputOutput) -> bool:
            nonlocal killed
            async with self._slots():
                if killed:
                    return False
                ran = await self._sandbox.run(GUEST, payload, pair.given.encode(errors="replace"))
            killed = killed or ran.status is None
            return ran.status == 0 and _same_output(ran.output.decode(errors="replace"), pair.expected)

        return sum(await asyncio.gather(*(prints(pair) for pair in pairs)))

    async def _satisfies(self, code: str, checks: Sequence[Asserts]) -> int:
        """How many of the checks hold; those before the program ended or was killed count."""
        async with self._slots():
            return await self._sandbox.talk(
                GUEST, {"code": code}, lambda session: sum(_holds(check, session) for check in checks)
            )


def _holds(check: Asserts, session: Session) -> bool:
    try:
        if check.problem is not None:
            session.ask("run", check.source)
        else:
            Evaluator(session, check.guest_names, check.objects).run(check.tree)
    except Exception:  # whatever a program answers, and what that leads to here, is its own fault
        log.debug("a test did not hold", exc_info=True)  # a mistake of ours would be seen here
        return False
    return True


def _same_output(printed: str, wanted: str) -> bool:
    """Equal line by line, apart from white space at the ends of lines and of the text."""
    lines = [[line.rstrip() for line in text.strip().splitlines()] for text in (printed, wanted)]
    return lines[0] == lines[1]
