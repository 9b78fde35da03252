"""User code that blocks the event loop is found, and named by its line."""

from __future__ import annotations

import asyncio
import time

from headrace.utils.loopwatch import watched_loop
from headrace.utils.usercode import where_it_failed


async def test_a_line_that_blocks_is_reported_once() -> None:
    told: list[str] = []
    with watched_loop(told.append, blocked_s=0.2):
        for _ in range(2):
            time.sleep(0.8)  # noqa: ASYNC251
            await asyncio.sleep(0)
    (text,) = told
    assert "test_loopwatch.py" in text and "time.sleep(0.8)" in text and "asyncio.to_thread" in text


async def test_a_loop_that_runs_is_left_alone() -> None:
    told: list[str] = []
    with watched_loop(told.append, blocked_s=0.5):
        await asyncio.to_thread(time.sleep, 1.2)
    assert told == []


def test_the_innermost_line_of_the_user_is_named() -> None:
    try:
        int("x")
    except ValueError as error:
        assert "test_loopwatch.py" in where_it_failed(error) and 'int("x")' in where_it_failed(error)
