"""Answers that are meant to break a judger: every one is survived in bounded time, scored 0 or failed, and the event
loop goes on meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from fakes import step
from headrace.config import JudgeSection
from headrace.data.episode import Episode, Trajectory
from headrace.data.task import Task
from headrace.errors import InfrastructureError
from headrace.judge.base import Judger
from headrace.judge.code import CodeJudger
from headrace.judge.compose import OverlongPenalty, WeightedSum
from headrace.judge.countdown import CountdownJudger
from headrace.judge.math import MathJudger
from headrace.judge.router import GuardedJudger, Router
from headrace.judge.sandbox import Sandbox
from headrace.judge.text import ChoiceJudger, ExactJudger, F1Judger, NumericJudger, RegexJudger

_LONGEST_PAUSE_S = 0.5  # of the event loop, in this process's own computing time: the machine may be busy otherwise
_LONGEST_S = 60.0  # all of them, for one judger


def python(code: str) -> str:
    return f"```python\n{code}\n```"


HOSTILE = {
    "a million digits": "1" * 1_000_000,
    "a million digits in a box": "\\boxed{" + "9" * 1_000_000 + "}",
    "nested parentheses": "<answer>" + "(" * 10_000 + "1" + ")" * 10_000 + "</answer>",
    "short nested parentheses": "<answer>" + "(" * 900 + "1" + ")" * 900 + "</answer>",
    "tower of powers": "<answer>9**9**9**9</answer>",
    "tower of powers in latex": r"\boxed{9^{9^{9^{9}}}}",
    "factorials": r"\boxed{((((9!)!)!)!)}",
    "null bytes": "\x00" * 1000 + "<answer>\x001+\x001</answer>",
    "lone surrogates": "\ud800\udfff\ud800 <answer>\udc80</answer> \\boxed{\ud800}",
    "unicode digits": "<answer>٤٢ ４２ ⁴² ④②</answer>",
    "empty": "",
    "white space": " \t\n\u2003" * 1000,
    "much white space": "answer" + " " * 200_000 + "x",
    "enormous latex": "\\boxed{" + "\\frac{1}{" * 20_000 + "1" + "}" * 20_001,
    "long sum in latex": "\\boxed{" + "+".join(f"\\sqrt{{x_{{{n}}}}}" for n in range(90)) + "}",
    "unclosed boxes": "\\boxed{" * 50_000,
    "unclosed tags": "<answer>" * 100_000,
    "many tags": "<answer></answer>" * 50_000,
    "regex bomb": "a" * 5_000 + "!",
    "many marks": "####" * 50_000,
    "many fences": "```python\n" * 20_000,
    "commas": "1," * 100_000,
    "slashes": "1/" * 100_000,
    "dots": "1." * 100_000,
    "infinite loop": python("while True: pass"),
    "fork bomb": python("import os\nwhile True: os.fork()"),
    "endless output": python("while True: print('x' * 1000000)"),
    "endless report": python(
        "import os\nwhile True:\n    for fd in range(20):\n"
        "        try: os.write(fd, b'x' * 99999)\n        except OSError: pass"
    ),
    "much memory": python("x = [0]\nwhile True: x += x"),
    "deep value": python("def f(*a):\n    x = []\n    for _ in range(100000): x = [x]\n    return x"),
    "large value": python("def f(*a): return 10 ** 3000000"),
    "kills its parent": python("import os\nos.kill(os.getppid(), 9)\nos.kill(1, 9)"),
    "reads files of the parent": python("import os\nprint(open(f'/proc/{os.getppid()}/environ').read())"),
    "network": python("import urllib.request\nprint(urllib.request.urlopen('http://127.0.0.1').read())"),
    "null bytes in code": python("x = '\x00'"),
    "surrogates in code": python("x = '\ud800'\nprint(x)"),
    "imports": "<answer>__import__('os').kill(__import__('os').getppid(), 9)</answer>",
}

TASK = Task(
    "t",
    instruction="?",
    answer="42",
    metadata={"numbers": [40, 2], "target": 42, "tests": ["assert f(1) == 42", {"input": "1", "output": "42"}]},
)


RIGHT = {
    "regex": "aaa",
    "choice": "(J)",
    "countdown": "<answer>40+2</answer>",
    "code": python("def f(n): return 42\nif __name__ == '__main__': print(42)"),
}


def said(text: str) -> Episode:
    return Episode("t", (Trajectory((step([1], [2], text=text),)),))


def judgers() -> dict[str, Judger]:
    made: dict[str, Judger] = {
        "exact": ExactJudger(where=["tags", "box", "marks", "text"], ignore_case=True, squeeze=True),
        "numeric": NumericJudger(),
        "choice": ChoiceJudger("ABCDEFGHIJ"),
        "f1": F1Judger(),
        "regex": RegexJudger("(a+)+$", timeout_s=0.2),
        "countdown": CountdownJudger(format_reward=0.0),
        "math": MathJudger(timeout_s=1.0, workers=2),
        "code": CodeJudger(timeout_s=1.0, workers=6),
    }
    made["sum"] = WeightedSum({"a": NumericJudger(), "b": ExactJudger()})
    made["overlong"] = OverlongPenalty(1000, 10, judger=F1Judger())
    made["router"] = Router({"*": {"name": "numeric"}})
    return made


def _sandbox_works() -> bool:
    try:
        asyncio.run(Sandbox().mode())
    except InfrastructureError:
        return False
    return True


@asynccontextmanager
async def responsive() -> AsyncIterator[None]:
    """Whatever happens inside, other coroutines get their turn."""
    pauses: list[float] = []

    async def tick() -> None:
        while True:
            before = time.process_time()
            await asyncio.sleep(0.005)
            pauses.append(time.process_time() - before)

    ticker = asyncio.create_task(tick())
    await asyncio.sleep(0.01)
    try:
        yield
        await asyncio.sleep(0.01)
    finally:
        ticker.cancel()
    assert pauses and max(pauses) < _LONGEST_PAUSE_S, f"the event loop stood still for {max(pauses):.2f} s"


@pytest.mark.parametrize("name", judgers())
async def test_a_hostile_answer_is_scored_0_in_bounded_time_while_the_event_loop_runs(name: str) -> None:
    if name == "code" and not await asyncio.to_thread(_sandbox_works):
        pytest.skip("neither namespaces nor seccomp can be used here")
    task = replace(TASK, answer="J") if name == "choice" else TASK
    guarded = GuardedJudger(judgers()[name], JudgeSection(timeout_s=_LONGEST_S, retries=0))
    try:
        async with responsive(), asyncio.timeout(_LONGEST_S):
            verdicts = await asyncio.gather(*(guarded.judge(task, said(text)) for text in HOSTILE.values()))
        for what, verdict in zip(HOSTILE, verdicts, strict=True):
            assert verdict.reward <= 0.0 and verdict.is_correct is False, (what, verdict)
        assert (await guarded.judge(task, said(RIGHT.get(name, "42")))).is_correct, "it works no longer"
    finally:
        await guarded.close()
