"""Code with tests: the last Python block of the reply, run with the task's tests in a sandbox.

A test is a pair of input and output, or an assert statement. Expected outputs stay here: the program is only asked
what it prints or what an expression is worth, and so it cannot know what to fake. An assert that is no comparison with
a plain value has to run beside the program; its result comes with a secret of the run.
"""

from __future__ import annotations

import ast
import asyncio
import json
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headrace.data.episode import Episode
from headrace.data.task import Task
from headrace.errors import ConfigError, DataError
from headrace.judge.base import Judger, Verdict
from headrace.judge.extract import LONGEST_TEXT, in_tags
from headrace.judge.guest import GUEST, says
from headrace.judge.sandbox import Mode, Sandbox, SandboxLimits

_BLOCK = re.compile(r"^```[ \t]*(python3?|py)?[ \t]*\n(.*?)^```", re.MULTILINE | re.DOTALL | re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Check:
    """A test as it is sent to the program (`source`), and what stays here (`expected`)."""

    kind: str  # "value": an expression is worth `expected`; "truth": it is true, or false; "assert": a statement
    source: str
    expected: Any = None


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


def read_tests(task: Task) -> tuple[list[Check], list[InputOutput]]:
    """The tests of `metadata["tests"]`; a task without any is an error, not a wrong answer."""
    tests = task.metadata.get("tests")
    tests = [tests] if isinstance(tests, str) else tests
    if not isinstance(tests, list) or not tests:
        raise DataError(f'task "{task.id}" has no tests; put a list of asserts, or of input and output, into metadata')
    checks, pairs = [], []
    for test in tests:
        if isinstance(test, str):
            checks.append(_check_of(test, task))
        elif isinstance(test, dict) and {"input", "output"} <= set(test):
            pairs.append(InputOutput(str(test["input"]), str(test["output"])))
        else:
            raise DataError(f'task "{task.id}": a test is a statement or has input and output, got {str(test)[:80]!r}')
    return checks, pairs


def _check_of(source: str, task: Task) -> Check:
    try:
        statements = ast.parse(source).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise DataError(f'task "{task.id}": the test {source[:80]!r} is no Python: {error}') from None
    if len(statements) != 1 or not isinstance(statements[0], ast.Assert):
        return Check("assert", source)
    test = statements[0].test
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], (ast.Eq, ast.Is)):
        try:
            return Check("value", ast.unparse(test.left), ast.literal_eval(test.comparators[0]))
        except (ValueError, TypeError):
            return Check("assert", source)
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return Check("truth", ast.unparse(test.operand), False)
    if isinstance(test, ast.Call):
        return Check("truth", ast.unparse(test), True)
    return Check("assert", source)


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
    ) -> None:
        if workers < 1 or timeout_s <= 0:
            raise ConfigError(f"workers and timeout_s must be positive, got {workers} and {timeout_s}")
        self._all_or_nothing = all_or_nothing
        limits = SandboxLimits(timeout_s, memory_mb, disk_mb, processes, output_bytes=output_bytes)
        self._sandbox = Sandbox(limits, sandbox)
        self._workers = workers
        self._places = asyncio.Semaphore(workers)
        self._loop: asyncio.AbstractEventLoop | None = None

    async def judge(self, task: Task, episode: Episode) -> Verdict:
        checks, pairs = read_tests(task)
        code = solution_in(episode.text)
        passed = 0
        if code is not None:
            jobs = [self._prints(code, pair) for pair in pairs]
            if checks:
                jobs.append(self._satisfies(code, checks))
            passed = sum(await asyncio.gather(*jobs))
        share = passed / (len(checks) + len(pairs))
        reward = float(share == 1.0) if self._all_or_nothing else share
        return Verdict(reward, is_correct=share == 1.0, metrics={"tests_passed": share, "has_code": float(bool(code))})

    async def _run(self, payload: dict[str, Any], stdin: str = "") -> tuple[int | None, bytes, bytes]:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:  # of an earlier asyncio.run
            self._loop, self._places = loop, asyncio.Semaphore(self._workers)
        async with self._places:
            ran = await self._sandbox.run(GUEST, json.dumps(payload).encode(), stdin.encode(errors="replace"))
        return ran.status, ran.output, ran.report

    async def _prints(self, code: str, pair: InputOutput) -> int:
        status, output, _ = await self._run({"code": code, "checks": None}, pair.given)
        return int(status == 0 and _same_output(output.decode(errors="replace"), pair.expected))

    async def _satisfies(self, code: str, checks: Sequence[Check]) -> int:
        """How many of the checks hold; what was reported before the program was killed counts."""
        token = secrets.token_hex(16)
        asked = [[check.kind, check.source] for check in checks]
        _, _, report = await self._run({"code": code, "checks": asked, "token": token})
        first: dict[int, Any] = {}
        for line in report.split(b"\n"):
            if line.startswith(token.encode()) and (found := _read_report(line[len(token) :])) is not None:
                first.setdefault(found[0], found[1])
        return sum(number in first and _holds(check, first[number]) for number, check in enumerate(checks))


def _read_report(line: bytes) -> tuple[int, Any] | None:
    try:
        number, said = json.loads(line)
    except (ValueError, TypeError, RecursionError):
        return None
    return (number, said) if type(number) is int else None


def _holds(check: Check, said: Any) -> bool:
    if check.kind == "assert":
        return said is True
    try:
        return said is check.expected if check.kind == "truth" else says(said, check.expected)
    except (ValueError, TypeError, RecursionError, KeyError, OverflowError):
        return False


def _same_output(said: str, wanted: str) -> bool:
    """Equal line by line, apart from white space at the ends of lines and of the whole."""
    lines = [[line.rstrip() for line in text.strip().splitlines()] for text in (said, wanted)]
    return lines[0] == lines[1]
