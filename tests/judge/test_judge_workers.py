"""Worker processes: killed when late, replaced, and gone when nobody needs them."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.errors import ConfigError, InfrastructureError
from headrace.judge.pool import WorkerCrashError, WorkerFailedError, WorkerPool, WorkerTimeoutError

MATCHES = "headrace.judge.text:matches"
BOMB = ("(a+)+$", "a" * 40 + "b", 0, False)  # never gives up the interpreter's lock
SIMPLE = ("b", "abc", 0, False)


def alive(pid: int) -> bool:
    """Whether a process is there, and not only its status."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def eventually(true: Callable[[], bool], within_s: float = 10.0) -> bool:
    end = time.monotonic() + within_s
    while not true() and time.monotonic() < end:
        time.sleep(0.02)
    return true()


async def test_nothing_starts_before_it_is_needed_and_close_ends_all() -> None:
    pool = WorkerPool(MATCHES, workers=2)
    assert pool.pids == []
    assert await pool.call(*SIMPLE) is True
    (pid,) = pool.pids
    assert await pool.call(*SIMPLE) is True and pool.pids == [pid]
    await pool.close()
    assert pool.pids == [] and not alive(pid)


async def test_a_late_request_kills_its_worker_and_no_other_request_is_lost() -> None:
    pool = WorkerPool(MATCHES, workers=2, time_s=0.5)
    try:
        results = await asyncio.gather(
            *(pool.call(*(BOMB if number in (1, 4) else SIMPLE)) for number in range(8)), return_exceptions=True
        )
        assert [type(result) for result in results] == [
            WorkerTimeoutError if number in (1, 4) else bool for number in range(8)
        ]
        assert await pool.call(*SIMPLE) is True and len(pool.pids) <= 2
    finally:
        await pool.close()


async def test_a_caller_that_gives_up_takes_its_worker_along() -> None:
    pool = WorkerPool(MATCHES, workers=1, time_s=60)
    try:
        await pool.call(*SIMPLE)
        (pid,) = pool.pids
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await pool.call(*BOMB)
        assert not alive(pid)
        assert await pool.call(*SIMPLE) is True
    finally:
        await pool.close()


async def test_signals_that_stop_the_run_leave_its_workers_alone() -> None:
    pool = WorkerPool(MATCHES, workers=1)
    try:
        await pool.call(*SIMPLE)
        (pid,) = pool.pids
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(pid, number)
        assert await pool.call(*SIMPLE) is True and pool.pids == [pid]
    finally:
        await pool.close()


async def test_a_worker_that_is_killed_fails_its_own_request_only() -> None:
    pool = WorkerPool(MATCHES, workers=1, time_s=30)
    try:
        await pool.call(*SIMPLE)
        asked = asyncio.create_task(pool.call(*BOMB))
        await asyncio.sleep(0.1)
        os.kill(pool.pids[0], signal.SIGKILL)
        with pytest.raises(WorkerCrashError):
            await asked
        assert await pool.call(*SIMPLE) is True
    finally:
        await pool.close()


async def test_an_error_of_the_function_comes_back_and_the_worker_stays() -> None:
    pool = WorkerPool(MATCHES, workers=1)
    try:
        with pytest.raises(WorkerFailedError, match="error: missing"):
            await pool.call("(", "", 0, False)
        (pid,) = pool.pids
        assert await pool.call(*SIMPLE) is True and pool.pids == [pid]
    finally:
        await pool.close()


async def test_a_worker_that_cannot_start_is_an_infrastructure_failure_with_the_command_to_try() -> None:
    with pytest.raises(InfrastructureError, match=r"-m headrace\.judge\.worker no_such_module:f"):
        await WorkerPool("no_such_module:f").call()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # asyncio's, of a loop closed too early
def test_a_pool_serves_one_event_loop_after_the_other() -> None:
    pool = WorkerPool(MATCHES, workers=1)

    async def ask() -> list[int]:
        assert await pool.call(*SIMPLE) is True
        return pool.pids

    (first,) = asyncio.run(ask())

    async def ask_and_close() -> list[int]:
        pids = await ask()
        await pool.close()
        return pids

    (second,) = asyncio.run(ask_and_close())
    gc.collect()  # here, where asyncio's warning is expected
    assert first != second and eventually(lambda: not alive(first) and not alive(second))


@pytest.mark.parametrize("arguments", [{"workers": 0}, {"time_s": 0}, {"memory_mb": -1}])
def test_a_pool_of_nothing_is_refused(arguments: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="must be positive"):
        WorkerPool(MATCHES, **arguments)


PARENT = """
import asyncio
from headrace.judge.pool import WorkerPool

async def main():
    pool = WorkerPool("headrace.judge.text:matches", workers=2, time_s=3)
    await asyncio.gather(pool.call("b", "b", 0, False), pool.call("b", "b", 0, False))
    print(*pool.pids, flush=True)
    await pool.call("(a+)+$", "a" * 40 + "b", 0, False)

asyncio.run(main())
"""


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM])
def test_workers_die_with_their_parent_even_if_it_is_killed(sent: signal.Signals) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pids = [int(word) for word in parent.stdout.readline().split()]
    assert len(pids) == 2 and all(alive(pid) for pid in pids)
    time.sleep(0.2)  # one of them works now, the other waits
    parent.send_signal(sent)
    parent.wait()
    parent.stdout.close()
    assert eventually(lambda: not any(alive(pid) for pid in pids))
