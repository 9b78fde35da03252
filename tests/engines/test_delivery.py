"""Results reach the event loop: those that are held back all at once, others as they come, and none is lost."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future

import pytest

from headrace.engines.torch.delivery import Deliveries


def on_a_thread(work: object) -> None:
    assert callable(work)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


async def test_what_is_held_is_delivered_together_at_the_end() -> None:
    deliveries, results = Deliveries(), [Future[int]() for _ in range(5)]
    waiting = [asyncio.ensure_future(deliveries.wait(result)) for result in results]
    await asyncio.sleep(0)
    holds, goes_on = threading.Event(), threading.Event()

    def work() -> None:
        with deliveries.held():
            for number, result in enumerate(results):
                result.set_result(number)
            holds.set()
            goes_on.wait(10)

    thread = threading.Thread(target=work)
    thread.start()
    await asyncio.to_thread(holds.wait, 10)
    await asyncio.sleep(0.01)
    assert not any(task.done() for task in waiting)
    goes_on.set()
    assert await asyncio.wait_for(asyncio.gather(*waiting), 10) == [0, 1, 2, 3, 4]
    thread.join()


async def test_what_is_not_held_comes_at_once() -> None:
    deliveries, result = Deliveries(), Future[str]()
    waiting = asyncio.ensure_future(deliveries.wait(result))
    await asyncio.sleep(0)
    on_a_thread(lambda: result.set_result("there"))
    assert await asyncio.wait_for(waiting, 10) == "there"


async def test_a_result_that_was_there_before_anyone_waited_is_delivered() -> None:
    deliveries, result = Deliveries(), Future[str]()
    result.set_result("early")
    assert await asyncio.wait_for(deliveries.wait(result), 10) == "early"


async def test_failures_and_cancellations_are_delivered_too() -> None:
    deliveries, failed, cancelled = Deliveries(), Future[int](), Future[int]()
    waiting = [asyncio.ensure_future(deliveries.wait(result)) for result in (failed, cancelled)]
    await asyncio.sleep(0)

    def work() -> None:
        with deliveries.held():
            failed.set_exception(OSError("went wrong"))
            cancelled.cancel()

    on_a_thread(work)
    with pytest.raises(OSError, match="went wrong"):
        await asyncio.wait_for(waiting[0], 10)
    with pytest.raises(asyncio.CancelledError):
        await waiting[1]


async def test_a_caller_that_has_gone_keeps_no_one_from_the_others() -> None:
    deliveries, results = Deliveries(), [Future[int](), Future[int]()]
    gone, stays = (asyncio.ensure_future(deliveries.wait(result)) for result in results)
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.sleep(0)
    on_a_thread(lambda: [result.set_result(7) for result in results])
    assert await asyncio.wait_for(stays, 10) == 7
    assert gone.cancelled() and not results[0].cancelled()
