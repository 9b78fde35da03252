"""Ranks as processes: called together, ended together."""

from __future__ import annotations

import os
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import sleepy_rank
from headrace.backends.ranks.base import Program, RanksLostError
from headrace.backends.ranks.pipes import PipeRanks
from headrace.backends.ranks.wire import Call, send
from headrace.errors import BackendError


def sleepy(timeout_s: float = 60.0) -> PipeRanks:
    ranks = PipeRanks(Program(f"{Path(sleepy_rank.__file__)}:Sleepy"), 2, timeout_s)
    ranks.start()
    return ranks


def test_ranks_that_hang_are_ended_with_their_stacks_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    ranks = sleepy(timeout_s=5.0)
    assert ranks.call("wait", [0.0, 0.0]) == [0, 1]
    with pytest.raises(RanksLostError, match="rank 1 did not answer in wait for 5 s"):
        ranks.call("wait", [0.0, 100.0])
    assert "rank 1 hangs in wait" in caplog.text and 'sleepy_rank.py", line' in caplog.text
    with pytest.raises(RanksLostError, match="start them again"):
        ranks.call("wait", [0.0, 0.0])


def test_a_rank_that_stands_still_is_noticed_though_it_does_not_take_the_call() -> None:
    ranks = sleepy(timeout_s=1.0)
    os.kill(ranks.pids[1], signal.SIGSTOP)
    with ThreadPoolExecutor(1) as thread:
        call = thread.submit(ranks.call, "echo", [b"", bytes(10 * 2**20)])  # more than a socket holds
        try:
            with pytest.raises(RanksLostError, match="rank 1 did not answer in echo for 1 s"):
                call.result(20)
        finally:
            ranks.kill()


class BeginsToAnswer:
    """In place of a rank's process: it sends the beginning of an answer, and stands still."""

    pid = 0

    def __init__(self) -> None:
        self.connection, self._theirs = socket.socketpair()
        self.output = self
        self._theirs.sendall(bytes(7) + b"\x10half")  # of 16 bytes

    def so_far(self) -> str:
        return ""

    def signal(self, number: signal.Signals) -> None: ...

    def kill(self) -> None: ...

    def end(self, grace_s: float = 0.0) -> int:
        self.connection.close()
        self._theirs.close()
        return 0


def test_a_rank_that_stands_still_in_the_middle_of_an_answer_is_noticed() -> None:
    launched: Any = BeginsToAnswer
    ranks = PipeRanks(Program("none:None"), 1, 0.5)
    ranks._workers = [launched()]
    with ThreadPoolExecutor(1) as thread:
        call = thread.submit(ranks.call, "wait", [0.0])
        try:
            with pytest.raises(RanksLostError, match=r"no rank answered in wait for 0\.5 s"):
                call.result(10)
        finally:
            ranks.kill()


def test_an_error_of_ours_leaves_the_group_as_it_was_and_a_bug_ends_it() -> None:
    ranks = sleepy()
    with pytest.raises(BackendError, match="all refuse"):
        ranks.call("refuse")
    assert ranks.call("wait", [0.0, 0.0]) == [0, 1]
    with pytest.raises(RanksLostError, match="fail failed on rank 1 of 2: ZeroDivisionError: a bug"):
        ranks.call("fail", [1, 1])
    assert ranks.pids == []


def test_ranks_end_with_their_controller_in_the_middle_of_a_call() -> None:
    ranks = sleepy()
    workers = list(ranks._workers)
    for worker in workers:  # not by ranks.call, which kills all when one has ended
        send(worker.connection, Call("wait", (100.0,)))
    time.sleep(0.5)
    for worker in workers:
        worker.connection.shutdown(2)  # what the end of this process does to it
    assert [worker._process.wait(30) for worker in workers] == [0, 0]
    ranks.kill()


def test_a_rank_that_dies_is_named_with_how_it_ended() -> None:
    ranks = sleepy()
    ranks._workers[1].kill()
    with pytest.raises(RanksLostError, match=r"rank 1 of 2 died in wait \(killed by SIGKILL\)"):
        ranks.call("wait", [0.0, 0.0])
