"""Mixtures: several sources in one stream, by weight. A pure function of (seed, epoch)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from headrace.data.sampler import epoch_order
from headrace.data.task import Task
from headrace.errors import ConfigError


class MixtureOrder:
    """The order of an epoch over tasks that stand source after source.

    An epoch has as many draws as there are tasks. Each source has the same number of them in every epoch, by its
    weight, and goes through its own tasks at its own pace: all of them come once before any comes again.
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[float], seed: int = 0, shuffle: bool = True) -> None:
        self._sizes = list(sizes)
        self._seed = seed
        self._shuffle = shuffle
        self.draws = shares(sum(sizes), weights)
        """How many draws of an epoch each source has."""

    def __call__(self, epoch: int) -> list[int]:
        """The index of the task at each position."""
        coming = [iter(self._tasks_of(source, epoch)) for source in range(len(self._sizes))]
        return [next(coming[source]) for source in self._turns(epoch)]

    def _turns(self, epoch: int) -> list[int]:
        """The source at each position: evenly spread or, with shuffle, in random order."""
        spread = [((turn + 0.5) / draws, source) for source, draws in enumerate(self.draws) for turn in range(draws)]
        turns = [source for _, source in sorted(spread)]
        if self._shuffle:
            random.Random(f"{self._seed}/mixture/{epoch}").shuffle(turns)
        return turns

    def _tasks_of(self, source: int, epoch: int) -> list[int]:
        """A source's share of an epoch: it continues where the epoch before ended."""
        size, draws, before = self._sizes[source], self.draws[source], sum(self._sizes[:source])
        first, last = epoch * draws, (epoch + 1) * draws
        passes = range(first // size, -(-last // size))
        tasks = [
            task for number in passes for task in epoch_order(size, f"{self._seed}/{source}", number, self._shuffle)
        ]
        skipped = first - passes.start * size
        return [before + task for task in tasks[skipped : skipped + draws]]


def shares(count: int, weights: Sequence[float]) -> list[int]:
    """`count` divided by weight into whole numbers of at least 1; the largest remainders are rounded up."""
    if count < len(weights):
        raise ConfigError(f"a mixture of {len(weights)} sources has only {count} tasks; add tasks")
    exact = [count * weight / sum(weights) for weight in weights]
    found = [max(1, int(share)) for share in exact]
    by_remainder = sorted(range(len(weights)), key=lambda source: (found[source] - exact[source], source))
    for source in by_remainder[: max(0, count - sum(found))]:
        found[source] += 1
    while sum(found) > count:  # the smallest were rounded up to 1
        found[found.index(max(found))] -= 1
    return found


def named(tasks: Sequence[Task], name: str) -> list[Task]:
    """The tasks of one source, with ids that no other source has."""
    return [replace(task, id=f"{name}/{task.id}") for task in tasks]
