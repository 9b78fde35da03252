"""What user code does ends neither the run nor the event loop, and its time-outs hold whatever it does."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_callbacks import EVAL, EVENTS
from test_failures import by_number, every_schedule, failed, failing_run
from test_schedules import heavy_tail

from fakes import ROOT, FakeEngine, char_chat
from headrace import registry
from headrace.data.sources.read import read_rows
from headrace.data.task import Task
from headrace.engines.base import SamplingParams
from headrace.errors import DataError, DeadlineError, EscapeError, WorkflowError, first_of
from headrace.judge.base import Judger, Verdict
from headrace.ledger.episode_record import AttemptRecord
from headrace.rollout.agent_loop import AgentLoop, Limits, RolloutSpec
from headrace.rollout.model_client import Model
from headrace.rollout.workflow import as_run_function
from headrace.run.journal import RunJournal
from headrace.trainer.callbacks import Callback
from headrace.utils import loopwatch, threads, usercode
from headrace.utils.deadline import Call, call_user
from headrace.utils.event_loop import run_loop
from headrace.utils.loopwatch import watched_loop
from headrace.utils.usercode import contained
from null_backend import Null, null_run, scattered
from virtual_time import run_virtual


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is gone after it."""
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))


@pytest.fixture
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "GRACE_S", 0.1)


class Escape(BaseException):
    """Of a kind that no `except Exception` catches."""


async def exits() -> None:
    sys.exit(0)


async def interrupts() -> None:
    raise KeyboardInterrupt


async def cancels_itself() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(1)


async def cancels_itself_at_its_end() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()


async def raises_cancelled() -> None:
    raise asyncio.CancelledError


async def raises_generator_exit() -> None:
    raise GeneratorExit


async def raises_its_own() -> None:
    raise Escape("mine")


class Unreadable(Escape):
    def __str__(self) -> str:
        sys.exit(0)


async def raises_what_cannot_be_shown() -> None:
    raise Unreadable


async def exits_in_a_task() -> None:
    await asyncio.create_task(exits())


async def exits_in_a_group() -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(exits())


async def leaves_a_task_that_exits() -> None:
    await asyncio.wait([asyncio.create_task(exits())])
    raise Escape("after it")


def exits_in_a_thread() -> None:
    sys.exit(0)


def stops_iteration_in_a_thread() -> None:
    next(iter(()))


def cancelled_in_a_thread() -> None:
    raise asyncio.CancelledError


ESCAPES: list[Callable[[], Any]] = [
    exits, interrupts, cancels_itself, cancels_itself_at_its_end, raises_cancelled, raises_generator_exit,
    raises_its_own, raises_what_cannot_be_shown, exits_in_a_task, exits_in_a_group, leaves_a_task_that_exits,
    exits_in_a_thread, stops_iteration_in_a_thread, cancelled_in_a_thread,
]  # fmt: skip
every_escape = pytest.mark.parametrize("escape", ESCAPES, ids=lambda function: function.__name__)


@every_escape
async def test_whatever_user_code_raises_is_an_ordinary_exception_outside(escape: Callable[[], Any]) -> None:
    with pytest.raises((EscapeError, ExceptionGroup)) as caught:
        await asyncio.wait_for(call_user("the hook", escape, limit_s=5.0), 2.0)
    said = str(first_of(caught.value))
    assert any(who in said for who in ("the hook", escape.__name__, "a task of user code"))


@every_schedule
@every_escape
def test_whatever_a_workflow_raises_is_its_episodes_failure(
    tmp_path: Path, schedule: str, escape: Callable[[], Any]
) -> None:
    async def escapes(task: Task, model: Model) -> float:
        reward = await scattered(task, model)
        if by_number(task, 3):
            await threads.call_sync_or_async(escape)
        return reward

    ran = failing_run(tmp_path, schedule, escapes)
    assert failed(ran) > 0 and all(int(sample.task_id.split()[1]) % 3 for sample in ran.backend.rows)
    named = "test_boundaries.py" in (tmp_path / "run" / "log.txt").read_text()
    assert named or escape is cancels_itself_at_its_end  # which has no line any more


@every_schedule
@every_escape
def test_whatever_a_judger_raises_is_its_episodes_failure(
    tmp_path: Path, schedule: str, escape: Callable[[], Any]
) -> None:
    class Escapes(Judger):
        async def judge(self, task: Task, episode: Any) -> Verdict:
            if by_number(task, 3):
                await threads.call_sync_or_async(escape)
            return Verdict(float(len(episode.text) % 2))

    registry.register("judger", "escapes", Escapes())
    ran = failing_run(tmp_path, schedule, None, workflow={"name": "single_turn", "judger": "escapes"})
    assert failed(ran) > 0 and all(int(sample.task_id.split()[1]) % 3 for sample in ran.backend.rows)


async def stubborn(model: Model | None = None) -> None:
    """Swallows whatever is to stop it."""
    while True:
        try:
            await asyncio.sleep(1)
            if model is not None:
                await model.chat([{"role": "user", "content": "Still there?"}])
        except BaseException:
            pass


@every_schedule
def test_the_time_limit_holds_for_a_workflow_that_swallows_it(tmp_path: Path, schedule: str) -> None:
    async def swallows(task: Task, model: Model) -> float:
        if by_number(task, 4):
            await stubborn(model)
        return await scattered(task, model)

    null = Null(learn_s=1.0)
    ran = failing_run(tmp_path, schedule, swallows, null=null, rollout={"timeout_s": 3.0}, ledger={"enabled": True})
    assert failed(ran) > 0 and not any(int(sample.task_id.split()[1]) % 4 == 0 for sample in ran.backend.rows)
    assert ran.rows[-1]["user_code/abandoned"] > 0
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "was abandoned at" in log and "test_boundaries.py" in log


@every_schedule
def test_the_time_limit_holds_for_a_judger_that_swallows_it(tmp_path: Path, schedule: str) -> None:
    class Swallows(Judger):
        async def judge(self, task: Task, episode: Any) -> Verdict:
            if by_number(task, 4):
                await stubborn()
            return Verdict(float(len(episode.text) % 2))

    registry.register("judger", "swallows", Swallows())
    judge = {"timeout_s": 3.0, "retries": 0}
    workflow = {"name": "single_turn", "judger": "swallows"}
    ran = failing_run(tmp_path, schedule, None, null=Null(heavy_tail, 1.0), workflow=workflow, judge=judge)
    assert failed(ran) > 0 and ran.rows[-1]["user_code/abandoned"] > 0


@pytest.mark.usefixtures("short_grace")
async def test_a_thread_that_never_returns_is_abandoned_counted_and_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_threads", threads.DaemonThreads(1))
    returns, reported = threading.Event(), []
    with usercode.reporting_abandoned(reported.append) as abandoned:
        with pytest.raises(DeadlineError, match=r"the tool took longer than 0\.1 s"):
            await call_user("the tool", returns.wait, limit_s=0.1)
        assert await asyncio.wait_for(call_user("another", lambda: 7), 5.0) == 7
        assert abandoned.count == 1 and "did not stop when it was cancelled and was abandoned" in reported[0]
    returns.set()


async def test_a_call_that_cleans_up_in_time_is_not_abandoned() -> None:
    cleaned = []

    async def tidy() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.05)
            cleaned.append(True)

    with usercode.reporting_abandoned(print) as abandoned:
        with pytest.raises(DeadlineError):
            await call_user("the hook", tidy, limit_s=0.05)
        assert cleaned and abandoned.count == 0


@pytest.mark.usefixtures("short_grace")
async def test_a_call_that_is_cancelled_from_outside_is_cancelled_and_not_waited_for_forever() -> None:
    with usercode.reporting_abandoned(print) as abandoned:
        outer = asyncio.create_task(call_user("the hook", stubborn))
        await asyncio.sleep(0.01)
        outer.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(outer, 5.0)
        assert abandoned.count == 1


async def test_a_call_that_expires_early_is_late() -> None:
    call = Call("the workflow", 60.0)
    asyncio.get_running_loop().call_later(0.01, call.expire)
    with pytest.raises(DeadlineError):
        await call.run(lambda: asyncio.sleep(60))
    assert call.late


EXIT = """
import asyncio, sys, threading
from headrace.utils import threads
from headrace.utils.deadline import call_user
threads.GRACE_S = 0.1
async def stubborn():
    while True:
        try:
            await asyncio.sleep(1)
        except BaseException:
            pass
async def main():
    for hangs in (stubborn, threading.Event().wait):
        try:
            await call_user("the workflow", hangs, limit_s=0.1)
        except TimeoutError as error:
            print(error)
asyncio.run(main())
print("over")
"""


def test_abandoned_tasks_and_threads_do_not_keep_the_process_from_exiting() -> None:
    start = time.monotonic()
    ended = subprocess.run(
        [sys.executable, "-c", EXIT], capture_output=True, text=True, timeout=60, cwd=ROOT, check=False
    )
    assert ended.stdout.splitlines()[-1] == "over" and ended.returncode == 0, ended
    assert "Exception ignored" not in ended.stderr and "destroyed" not in ended.stderr
    assert time.monotonic() - start < 30


def waits_in_the_system() -> None:
    time.sleep(100)


def computes() -> None:
    while True:
        pass


@pytest.fixture
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loopwatch, "_LOOK_S", 0.2)


@pytest.mark.usefixtures("quick_looks")
@pytest.mark.parametrize("blocks", [waits_in_the_system, computes])
async def test_code_that_blocks_the_event_loop_is_interrupted_when_its_time_is_over(blocks: Callable[[], Any]) -> None:
    async def blocking() -> None:
        blocks()

    start = time.monotonic()
    with watched_loop(lambda text: None, blocked_s=0.1, limit_s=0.3):
        with pytest.raises(DeadlineError, match="blocked the event loop"):
            await call_user("the workflow", blocking, limit_s=0.3)
        with pytest.raises(DeadlineError, match=r"the hook took longer than 0\.3 s"), contained("the hook", 0.3):
            blocks()
        await asyncio.sleep(0.3)
    assert time.monotonic() - start < 30


SWALLOWS = """
import asyncio, time
from headrace.utils import interrupts, loopwatch
from headrace.utils.deadline import call_user
loopwatch._LOOK_S, loopwatch._PATIENCE = 0.1, 3

async def swallows():
    while True:
        try:
            time.sleep(1000)
        except BaseException:
            pass

async def main():
    with loopwatch.watched_loop(print, blocked_s=0.1, limit_s=0.2):
        await call_user("the workflow", swallows, limit_s=0.2)

interrupts.take_over_signals()
asyncio.run(main())
"""

LEAVES = """
import threading, time
from headrace.utils import interrupts
interrupts._THREADS_S = 0.2
threading.Thread(target=time.sleep, args=(1000,), name="my upload").start()
interrupts.exit_process(0)
"""


@pytest.mark.parametrize(
    ("script", "code", "said"),
    [(SWALLOWS, 1, "has ignored 4 interruptions; the process ends"), (LEAVES, 0, "not waited for: my upload")],
)
def test_a_process_ends_whatever_user_code_ignores_or_leaves(tmp_path: Path, script: str, code: int, said: str) -> None:
    (tmp_path / "own.py").write_text(script)
    done = subprocess.run([sys.executable, "own.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == code and said in done.stderr, done.stderr


@pytest.mark.usefixtures("quick_looks")
def test_code_that_blocks_an_event_loop_in_another_thread_is_interrupted_too() -> None:
    said: list[str] = []

    async def main() -> None:
        async def blocking() -> None:
            computes()

        with watched_loop(lambda text: None, blocked_s=0.1, limit_s=0.3):
            try:
                await call_user("the workflow", blocking, limit_s=0.3)
            except DeadlineError as error:
                said.append(str(error))

    thread = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
    thread.start()
    thread.join(30)
    assert "blocked the event loop" in said[0]


# ---- hooks, which end the run with their own error ------------------------------------------------------------------


def leave(*args: Any) -> None:
    sys.exit(0)


async def leave_later(*args: Any) -> None:
    await asyncio.sleep(0.1)
    sys.exit(0)


async def never_ends(*args: Any) -> None:
    await stubborn()


@every_schedule
@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize(("method", "said"), [(leave, "called sys.exit"), (leave_later, "called sys.exit"),
                                              (never_ends, "took longer than 5 s")])  # fmt: skip
def test_a_callback_that_exits_or_hangs_ends_the_run_with_an_error(
    tmp_path: Path, schedule: str, event: str, method: Any, said: str
) -> None:
    broken: Callback = type("Broken", (Callback,), {event: method})()
    trainer = {"steps": 9, "hook_timeout_s": 5.0}
    with pytest.raises(WorkflowError, match=f"{event} of the callback Broken {said}"):
        failing_run(tmp_path, schedule, callbacks=[broken], eval=EVAL, trainer=trainer)


def test_a_callback_that_raises_stop_iteration_is_named(tmp_path: Path) -> None:
    broken: Callback = type("Broken", (Callback,), {"on_batch_end": lambda *_: next(iter(()))})()
    with pytest.raises(WorkflowError, match="on_batch_end of the callback Broken raised StopIteration"):
        null_run(tmp_path, callbacks=[broken])


async def cancels_everything() -> None:
    for task in asyncio.all_tasks():
        task.cancel()


async def stops_the_loop() -> None:
    asyncio.get_running_loop().stop()


@pytest.mark.parametrize("escape", [cancels_everything, stops_the_loop])
def test_user_code_can_neither_cancel_the_run_nor_stop_its_event_loop(escape: Callable[[], Any]) -> None:
    async def work() -> str:
        beside = asyncio.create_task(asyncio.sleep(0.01, "beside"))
        with pytest.raises(EscapeError, match=r"user code must not (cancel a task of the run|stop the event loop)"):
            await call_user("the hook", escape, limit_s=5.0)
        return await beside

    assert run_loop(work) == "beside"


@every_schedule
def test_a_grouping_hook_that_exits_ends_the_run_with_an_error(tmp_path: Path, schedule: str) -> None:
    registry.register("grouping", "leaves", leave)
    with pytest.raises(WorkflowError, match=r'grouping hook "leaves" failed on task .*: it called sys.exit\(0\)'):
        failing_run(tmp_path, schedule, workflow={"grouping": "leaves"})


@every_schedule
def test_an_estimator_that_exits_ends_the_run_with_an_error(tmp_path: Path, schedule: str) -> None:
    registry.register("estimator", "leaves", leave)
    with pytest.raises(WorkflowError, match=r"an estimator called sys.exit\(0\)"):
        failing_run(tmp_path, schedule, algorithm={"estimator": "leaves"}, trainer={"stream": None})


@pytest.mark.parametrize("function", ["leave", "leave_later"])
def test_an_evaluation_metric_that_exits_ends_the_run_with_an_error(tmp_path: Path, function: str) -> None:
    evaluation = {**EVAL, "metrics": [f"test_boundaries:{function}"]}
    with pytest.raises(WorkflowError, match=rf'evaluation metric "test_boundaries:{function}" .*called sys.exit'):
        failing_run(tmp_path, "in step", eval=evaluation)


class Leaves:
    def __init__(self) -> None:
        sys.exit(0)


def test_code_that_exits_while_it_is_imported_or_made_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(EscapeError, match=r'the workflow "Leaves" called sys.exit\(0\)'):
        as_run_function(Leaves, {})
    script = tmp_path / "script.py"
    script.write_text("import sys\nsys.exit()\n")
    with pytest.raises(EscapeError, match=r"the import of .*script.py called sys.exit\(\)"):
        registry.load_object(f"{script}:run")


SOURCE = """
import sys
def breaks():
    yield {"instruction": "1+1="}
    raise KeyError("answer")
def leaves():
    yield {"instruction": "1+1="}
    sys.exit(0)
def at_once():
    raise KeyError("answer")
def closes():
    yield {"instruction": "1+1="}
    raise GeneratorExit
"""


@pytest.mark.parametrize(("name", "said"), [
    ("breaks", r"failed after 1 rows: KeyError: 'answer' at .*source.py:5: raise KeyError"),
    ("leaves", r"failed after 1 rows: SystemExit: 0 at .*source.py:8: sys.exit"),
    ("closes", r"failed after 1 rows: GeneratorExit:  at .*source.py:13: raise GeneratorExit"),
    ("at_once", r"failed: KeyError: 'answer' at .*source.py:10"),
])  # fmt: skip
def test_a_source_of_tasks_that_breaks_is_an_error_in_one_line(tmp_path: Path, name: str, said: str) -> None:
    (tmp_path / "source.py").write_text(SOURCE)
    with pytest.raises(DataError, match=said):
        list(read_rows(f"{tmp_path}/source.py:{name}", {}))


# ---- late results ---------------------------------------------------------------------------------------------------


def test_what_an_abandoned_episode_still_asks_for_is_neither_answered_nor_recorded() -> None:
    class Written(AttemptRecord):
        def __init__(self) -> None:
            self.events: list[str] = []

        def called(self, output: Any, role: str, seed: int, digest: str, messages: Any) -> None:
            self.events.append("call")

        def resulted(self, number: int, kind: str, name: str, digest: str, payload: Any) -> None:
            self.events.append("result")

        def finished(self, episode: Any) -> None:
            self.events.append(f"finished: {episode.error}")

    record, engine, asked = Written(), FakeEngine(), []

    class OneRecord(RunJournal):
        def open(self, group_id: int, rollout_idx: int, seed: int) -> Any:
            return record

    async def goes_on(task: Task, model: Model) -> float:
        while True:
            try:
                await asyncio.sleep(1.0)
                asked.append(await model.chat(task.messages))
                await model.tool(str, 7)
                await model.store.put("key", 1)
            except BaseException:
                asked.append(None)

    async def main() -> None:
        limits = Limits(timeout_s=2.5)
        manager = AgentLoop(goes_on, engine, char_chat(), None, limits, journal=OneRecord())
        await manager.roll_out(RolloutSpec(Task("a", instruction="Say."), 0, 0, 0), SamplingParams(max_tokens=4))
        before = list(record.events), len(engine.requests)
        await asyncio.sleep(1000.0)
        assert (record.events, len(engine.requests)) == before
        assert record.events[-1] == "finished: took longer than 2.5 s"

    run_virtual(main())
    assert len(asked) < 20


def test_a_forked_process_has_threads_of_its_own() -> None:
    async def plain() -> int:
        return await threads.call_sync_or_async(int, "7")

    assert asyncio.run(plain()) == 7  # the parent has a free thread now, which the child has not
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # instead of waiting for ever for a thread that is not there
        os._exit(asyncio.run(plain()))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
