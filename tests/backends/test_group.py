"""LearnerGroup and ranks that are lost at odd moments. The ranks only count."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from headrace.backends.fsdp.group import LearnerGroup
from headrace.backends.ranks.base import RanksLostError


class Counting:
    """Ranks that add up the steps that they made. Some die when they are started."""

    def __init__(self, size: int, dies: bool) -> None:
        self.size, self._dies = size, dies
        self.steps = 0

    def start(self) -> None:
        if self._dies:
            raise RanksLostError("rank 1 of 2 died in start")

    def call(self, method: str, *per_rank: Sequence[Any]) -> list[Any]:
        self.steps += method == "optim_step"
        return [self.steps] * self.size

    def call_on(self, rank: int, method: str, *arguments: Any) -> Any:
        return None

    def host(self) -> str:
        return ""

    def local(self) -> tuple[int, ...]:
        return ()

    def kill(self) -> None: ...


class Grows:
    """Room for another rank after the first checkpoint; `deaths` of the groups that are started then."""

    def __init__(self, deaths: int) -> None:
        self._groups: Iterator[Counting] = iter(
            [Counting(1, False), *(Counting(2, True) for _ in range(deaths)), Counting(2, False)]
        )
        self._grown = False

    def new(self) -> Counting:
        return next(self._groups)

    def has_more(self) -> bool:
        more, self._grown = not self._grown, True
        return more


@pytest.mark.parametrize("deaths", [0, 1, 2])
def test_ranks_that_are_lost_while_the_group_grows_are_started_again(deaths: int, tmp_path: Path) -> None:
    group = LearnerGroup(Grows(deaths), 48)
    group.save(tmp_path)
    group.optim_step(1e-3, 1.0)
    group.saved(tmp_path)
    assert group.ranks.size == 2 and group.restarts == deaths + 1
    assert group.optim_step(1e-3, 1.0) == 2  # the step since the checkpoint was repeated
    group.close()


def test_ranks_that_are_lost_again_and_again_end_the_run(tmp_path: Path) -> None:
    group = LearnerGroup(Grows(3), 48)
    group.save(tmp_path)
    with pytest.raises(RanksLostError, match="died in start; ranks were lost 3 times in the same call"):
        group.saved(tmp_path)
