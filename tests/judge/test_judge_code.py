"""Code with tests, in a sandbox: what passes, what cannot be faked, and what a program cannot reach."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fakes import step
from headrace.config import JudgeSection
from headrace.data.episode import Episode, Trajectory
from headrace.data.task import Task
from headrace.errors import ConfigError, DataError, InfrastructureError
from headrace.judge import sandbox as sandbox_module
from headrace.judge.base import Verdict
from headrace.judge.code import CodeJudger, solution_in
from headrace.judge.router import GuardedJudger, Router
from headrace.judge.sandbox import Ran, Sandbox, SandboxLimits
from headrace.judge.text import ExactJudger


def _sandbox_works() -> bool:
    try:
        asyncio.run(Sandbox().mode())
    except InfrastructureError:
        return False
    return True


# "none" is never used here: what these programs do would then be done to this machine
needs_sandbox = pytest.mark.skipif(not _sandbox_works(), reason="neither namespaces nor seccomp can be used here")

ADD = "def add(a, b):\n    return a + b\n"
ASSERTS = ["assert add(1, 2) == 3", "assert add(2, 2) == 4", "assert add('a', 'b') == 'ab'"]
PAIRS = [{"input": "1 2\n", "output": "3\n"}, {"input": "5 5\n", "output": "10"}]
READ_AND_ADD = "a, b = map(int, input().split())\nprint(a + b)\n"


async def judged(code: str, tests: Any, fence: bool = True, **arguments: Any) -> Verdict:
    text = f"Here it is:\n```python\n{code}\n```\nDone." if fence else code
    episode = Episode("t", (Trajectory((step([1], [2], text=text),)),))
    judger = CodeJudger(**{"timeout_s": 3.0, **arguments})
    return await judger.judge(Task("t", instruction="?", metadata={"tests": tests}), episode)


# ---- finding code and tests ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("```python\na\n```", "a\n"),
        ("```py\na\n```\n```python\nb\n```\n", "b\n"),
        ("```\na\n```\n```python\nb\n```\n```\noutput\n```", "b\n"),
        ("```\na\n```", "a\n"),
        ("<answer>a</answer>", "a"),
        ("no code", None),
        ("```python\nunclosed", None),
        ("", None),
    ],
)
def test_the_last_python_block_is_the_solution(text: str, code: str | None) -> None:
    assert solution_in(text) == code


@pytest.mark.parametrize("tests", [None, [], 3, ["assert ("], [{"input": "1"}], [3]])
async def test_a_task_without_usable_tests_is_a_failure_and_no_wrong_answer(tests: Any) -> None:
    with pytest.raises(DataError, match='task "t"'):
        await judged(ADD, tests)


def test_a_sandbox_of_another_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="sandbox must be"):
        CodeJudger(sandbox="docker")  # type: ignore[arg-type]


# ---- verdicts --------------------------------------------------------------------------------------------------------


@needs_sandbox
@pytest.mark.parametrize(
    ("code", "tests", "share"),
    [
        (ADD, ASSERTS, 1.0),
        (ADD, "\n".join(ASSERTS), 1.0),
        ("def add(a, b): return a - b", ASSERTS, 0.0),
        ("def add(a, b): return 3", ASSERTS, 1 / 3),
        ("def add(a, b): return {}[a]", ASSERTS, 0.0),
        ("syntax error", ASSERTS, 0.0),
        (READ_AND_ADD, PAIRS, 1.0),
        ("print(3)", PAIRS, 0.5),
        (f"if __name__ == '__main__':\n    {READ_AND_ADD.replace(chr(10), chr(10) + '    ')}", PAIRS, 1.0),
        (READ_AND_ADD + "raise SystemExit(1)", PAIRS, 0.0),
        (ADD, ["import math\nassert math.isclose(add(0.1, 0.2), 0.3)"], 1.0),
        ("def f(n): return 3 ** n", ["assert f(20000) == f(10000) ** 2", "assert f(2) == 9.0"], 1.0),
        ("from fractions import Fraction\ndef f(): return Fraction(1, 2)", ["assert f() == 0.5"], 1.0),
        ("from collections import Counter\ndef f(): return Counter('aab')", ["assert f() == {'a': 2, 'b': 1}"], 1.0),
        ("def f(): return [float('nan')]", ["assert f() == [1.0]"], 0.0),
        (
            "import threading\ndef f(): t = threading.Thread(target=print); t.start(); return 1",
            ["assert f() == 1"],
            1.0,
        ),
    ],
)
async def test_the_share_of_passed_tests(code: str, tests: Any, share: float) -> None:
    verdict = await judged(code, tests, all_or_nothing=False)
    assert verdict.reward == pytest.approx(share)
    assert verdict.is_correct == (share == 1.0) and verdict.metrics["tests_passed"] == verdict.reward


@needs_sandbox
async def test_all_or_nothing_is_the_default() -> None:
    assert (await judged("print(3)", PAIRS)).reward == 0.0
    assert (await judged("no code at all", PAIRS, fence=False)).metrics == {"tests_passed": 0.0, "has_code": 0.0}


@needs_sandbox
async def test_tests_before_one_that_hangs_count() -> None:
    code = "def f(n):\n    while n > 1: pass\n    return n"
    verdict = await judged(code, ["assert f(0) == 0", "assert f(1) == 1", "assert f(2) == 2"], all_or_nothing=False)
    assert verdict.reward == pytest.approx(2 / 3)


YES = "class Yes({base}):\n    def __eq__(self, other): return True\ndef add(a, b): return Yes({value})"
FAKES = {
    "exit": "import sys\nsys.exit(0)",
    "hard exit": "import os\nos._exit(0)",
    "prints": "print('passed')\nprint('[0, true]')\nprint('3')",
    "report without the secret": (
        "import os\nfor fd in range(3, 20):\n"
        "    try: os.write(fd, b'[0, true]\\n[1, true]\\n')\n    except OSError: pass"
    ),
    "equal to all": YES.format(base="", value=""),
    "an int that is equal to all": YES.format(base="int", value="7"),
    "patched builtins": (
        "import builtins\nbuiltins.AssertionError = None\nbuiltins.isinstance = lambda *a: True\n"
        "builtins.eval = lambda *a: 3\ndef add(a, b): return 7"
    ),
    "exits in the test": "def add(a, b): raise SystemExit(0)",
    "reads the tests": (
        "import sys\nframe = sys._getframe()\nwhile frame: print(frame.f_locals, frame.f_globals); frame = frame.f_back"
    ),
    "looks for the expected": (
        "import gc\nfound = [o for o in gc.get_objects() if o == ['value', 'add(1, 2)', 3]]\n"
        "def add(a, b): return found[0][2]"
    ),
}


@needs_sandbox
@pytest.mark.parametrize("fake", FAKES)
async def test_a_verdict_cannot_be_faked(fake: str) -> None:
    verdict = await judged(FAKES[fake], ["assert add(1, 2) == 3", "assert add(2, 2) == 4"], all_or_nothing=False)
    assert verdict.reward == 0.0 and verdict.is_correct is False


# ---- what a program cannot do ----------------------------------------------------------------------------------------


async def output_of(program: str, **limits: Any) -> bytes:
    return (await Sandbox(SandboxLimits(**{"time_s": 3.0, **limits})).run(program, b"")).output


@needs_sandbox
async def test_the_environment_is_clean_and_the_folder_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_SECRET", "hunter2")
    said = await output_of("import os; print(dict(os.environ), os.listdir('.')); open('mine', 'w').write('x')")
    assert b"hunter2" not in said and said.strip().endswith(b"[]")
    assert b"mine" not in await output_of("import os; print(os.listdir('.'))")


@needs_sandbox
async def test_there_is_no_network() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        program = f"import socket\nsocket.create_connection(('127.0.0.1', {server.getsockname()[1]}), 1)\nprint('in')"
        assert await output_of(program) == b""


@needs_sandbox
async def test_a_private_file_and_the_parents_memory_cannot_be_read(tmp_path: Path) -> None:
    private = tmp_path / "private"
    private.write_text("hunter2")
    private.chmod(0o600)
    if await Sandbox().mode() == "namespace":
        assert await output_of(f"print(open({str(private)!r}).read())") == b""
        assert await output_of("import os; print(os.listdir('/home'))") == b""
    assert await output_of(f"print(open('/proc/{os.getpid()}/mem', 'rb').read(1))") == b""


@needs_sandbox
async def test_the_parent_cannot_be_killed() -> None:
    for target in ("os.getppid()", str(os.getpid())):
        await output_of(f"import os; os.kill({target}, 9)")  # that this goes on is the test


@needs_sandbox
@pytest.mark.parametrize(
    "program",
    [
        "x = bytearray(10 ** 9); print('done')",
        "open('f', 'wb').write(b'x' * 10 ** 8); print('done')",
        "files = [open('/dev/null') for _ in range(1000)]; print('done')",
        "import os\nfor _ in range(200):\n    if os.fork() == 0:\n        import time; time.sleep(30)\nprint('done')",
        "while True: pass",
        "import time; time.sleep(60); print('done')",
    ],
)
async def test_limits_hold(program: str) -> None:
    assert b"done" not in await output_of(program, time_s=1.0)


@needs_sandbox
async def test_endless_output_is_cut_while_it_is_read() -> None:
    start = time.monotonic()
    ran = await Sandbox(SandboxLimits(time_s=20.0, output_bytes=1000)).run("while True: print('x' * 100000)", b"")
    assert ran.status is None and len(ran.output) == 1000 and time.monotonic() - start < 10


@needs_sandbox
def test_nothing_is_left_running_of_what_a_program_starts() -> None:
    mark = f"{os.getpid()}{time.monotonic_ns()}"
    program = (
        "import os, sys, time\nfor _ in range(3):\n    if os.fork() == 0:\n"
        f"        os.setsid() if hasattr(os, 'setsid') else None\n        os.execv(sys.executable, ['{mark}', '-c', "
        "'import time; time.sleep(100)'])\ntime.sleep(0.3)\nprint('started')"
    )
    assert b"started" in asyncio.run(output_of(program))
    assert until(lambda: marked_processes(mark) == 0)


def marked_processes(mark: str) -> int:
    """Processes that have the mark in their command line."""
    found = 0
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found += mark.encode() in path.read_bytes()
    return found


def until(true: Callable[[], bool], within_s: float = 10.0) -> bool:
    end = time.monotonic() + within_s
    while not true() and time.monotonic() < end:
        time.sleep(0.02)
    return true()


@needs_sandbox
def test_a_caller_that_gives_up_takes_its_program_along() -> None:
    mark = f"mark{os.getpid()}x{time.monotonic_ns()}"

    async def give_up() -> None:
        sandbox = Sandbox(SandboxLimits(time_s=60.0))
        await sandbox.mode()
        asked = asyncio.create_task(sandbox.run(f"import time; time.sleep(50)  # {mark}", b""))
        assert await asyncio.to_thread(until, lambda: marked_processes(mark) > 0)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked

    asyncio.run(give_up())
    assert until(lambda: marked_processes(mark) == 0)


PARENT = """
import asyncio
from headrace.judge.sandbox import Sandbox, SandboxLimits

async def main():
    sandbox = Sandbox(SandboxLimits(time_s=60), "MODE")
    await sandbox.mode()
    print("ready", flush=True)
    await sandbox.run('''PROGRAM''', b"")

asyncio.run(main())
"""
# its children have lost their parent, and it would not be told of the end of its own
FORKING = """
import ctypes, os, time
ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)
if os.fork() == 0:
    if os.fork() == 0: time.sleep(50)  # MARK
    os._exit(0)
time.sleep(50)
"""


@needs_sandbox
@pytest.mark.parametrize("mode", ["namespace", "seccomp"])
def test_a_program_and_its_children_die_with_a_parent_that_is_killed(tmp_path: Path, mode: str) -> None:
    mark = f"mark{os.getpid()}x{time.monotonic_ns()}"
    program = FORKING.replace("MARK", mark)
    command = [sys.executable, "-c", PARENT.replace("PROGRAM", program).replace("MODE", mode)]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}  # its empty folder is all that stays behind
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert parent.stdout is not None
    if parent.stdout.readline() != "ready\n":
        parent.wait()
        pytest.skip(f"mode {mode} does not work here")
    assert until(lambda: marked_processes(mark) > 2)  # the parent has it in its own command line
    time.sleep(0.3)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    assert until(lambda: marked_processes(mark) == 0)


# ---- what is found at the start, and what is no failure --------------------------------------------------------------


def test_tests_that_could_be_forged_are_found_when_tasks_are_loaded() -> None:
    task = Task("t9", instruction="?", source="mbpp", metadata={"tests": ["import numpy\nassert numpy.all(f(1))"]})
    for judger in (CodeJudger(), GuardedJudger(Router({"mbpp": {"name": "code"}}), JudgeSection())):
        with pytest.raises(DataError, match=r'task "t9".*imports numpy'):
            judger.check_task(task)
    CodeJudger(allow_forgeable=True).check_task(task)
    ExactJudger().check_task(task)


@needs_sandbox
async def test_a_test_that_is_allowed_to_be_forged_runs_beside_the_program() -> None:
    tests = ["assert eval('add(1, 2)') == 3", "assert add(1, 2) == 3"]
    assert (await judged(ADD, tests, allow_forgeable=True)).reward == 1.0
    assert (await judged(ADD.replace("+", "-"), tests, allow_forgeable=True, all_or_nothing=False)).reward == 0.0


@needs_sandbox
async def test_programs_that_are_slow_on_purpose_are_wrong_and_no_failure_of_judging() -> None:
    judger = CodeJudger(timeout_s=0.5, workers=1)
    guarded = GuardedJudger(judger, JudgeSection(timeout_s=0.6, retries=0))
    task = Task("t", instruction="?", metadata={"tests": ["assert f(1) == 2", *PAIRS]})
    slow = Episode("t", (Trajectory((step([1], [2], text="```python\nimport time\ntime.sleep(60)\n```"),)),))
    verdicts = await asyncio.gather(*(guarded.judge(task, slow) for _ in range(3)))
    assert [verdict.reward for verdict in verdicts] == [0.0] * 3 and guarded.failed == 0


async def test_a_fallback_is_reported_and_one_without_landlock_is_not_taken(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    works = {"seccomp"}

    async def run(self: Sandbox, mode: str, *rest: Any) -> Ran:
        if mode not in works:
            raise InfrastructureError(f"{mode} is not to be had")
        return Ran(0, b"42\n")

    monkeypatch.setattr(Sandbox, "_run", run)
    monkeypatch.setattr(sandbox_module, "make_private", lambda: None)
    assert await Sandbox().mode() == "seccomp"
    assert 'sandbox mode "seccomp", not "namespace"' in caplog.text and "is not to be had" in caplog.text
    works.clear()
    with pytest.raises(InfrastructureError, match='set sandbox = "seccomp" if programs may read'):
        await Sandbox().mode()
