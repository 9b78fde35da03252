"""Ranks as processes: called together, ended together."""

from __future__ import annotations

import time
from pathlib import Path

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
