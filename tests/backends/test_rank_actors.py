"""Ranks as actors, without a cluster: what counts as progress, and what as a hang."""

from __future__ import annotations

import itertools
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from headrace.backends.ranks.base import Program, RanksLostError

pytest.importorskip("ray")

from ray.exceptions import GetTimeoutError

from headrace.backends.ranks import actors
from headrace.backends.ranks.actors import RayRanks


class Hangs:
    """An actor in a call that never ends, on a machine so busy that it says only now and then how far it is."""

    def __init__(self) -> None:
        self.call = self.progress = self.stacks = self
        self._asked = itertools.count()

    def options(self, **_: Any) -> Hangs:
        return self

    def remote(self, *_: Any) -> Any:
        return f"call {next(self._asked)}"


@pytest.fixture
def busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray, of which every second question is answered in time, with the same number each time."""
    asked = itertools.count()

    def wait(references: list[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        time.sleep(0.02)
        return [], references

    def get(_: Any, timeout: float) -> list[int]:
        if next(asked) % 2:
            raise GetTimeoutError
        return [3]

    monkeypatch.setattr(actors.ray, "wait", wait)
    monkeypatch.setattr(actors.ray, "get", get)
    monkeypatch.setattr(actors.ray, "kill", lambda _: None)


@pytest.mark.usefixtures("busy")
def test_ranks_that_say_only_now_and_then_that_they_hang_are_ended() -> None:
    ranks = RayRanks(Program("none:None"), [{}], 0.3)
    ranks._actors = [Hangs()]
    with ThreadPoolExecutor(1) as thread:
        call = thread.submit(ranks.call, "wait", [0.0])
        try:
            with pytest.raises(RanksLostError, match=r"no rank answered in wait for 0\.3 s"):
                call.result(10)
        finally:
            if not call.done():
                actors.ray.wait = _fails  # type: ignore[assignment]


def _fails(*_: Any, **__: Any) -> Any:
    raise AssertionError("the call has not ended")
