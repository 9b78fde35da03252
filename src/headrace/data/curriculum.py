"""A curriculum by success rate: tasks near the target are drawn more often.

The stream of tasks is the same function of position as without a curriculum. The curriculum only skips positions, so a
recorded draw can be repeated from its position, whatever the rates are then. Whether a position is skipped depends on
the position, the seed and the rates. The rates change only with a new version: all draws of one version see the same
rates, in whatever order its groups finish.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace.config import CurriculumSection
from headrace.data.episode import Episode
from headrace.data.sampler import Draw, Position, TaskSampler
from headrace.data.seeds import derive_seed
from headrace.data.task import Task
from headrace.errors import ConfigError

_ALL = 2.0**63  # derive_seed gives numbers below this


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a finished group went, and the version at whose end it is counted."""

    version: int
    group_id: int
    key: str
    success: float


@dataclass(slots=True)
class Curriculum:
    """Running success rates, and how often a task is drawn by them."""

    section: CurriculumSection
    target: float
    rates: dict[str, float] = field(default_factory=dict)
    pending: dict[int, Outcome] = field(default_factory=dict)
    """Outcomes that are not counted yet, by group id."""

    def chance(self, key: str) -> float:
        """How likely a position with this key is drawn; 1 for what was never tried."""
        rate = self.rates.get(key)
        if rate is None:
            return 1.0
        distance = abs(rate - self.target) / max(self.target, 1 - self.target)
        return 1.0 - (1.0 - self.section.least) * distance

    def observe(self, outcome: Outcome) -> None:
        """A group has ended."""
        self.pending[outcome.group_id] = outcome

    def count(self, version: int) -> None:
        """A version has ended: its outcomes become part of the rates, in the order of their ids."""
        ended = sorted(group_id for group_id, outcome in self.pending.items() if outcome.version <= version)
        for group_id in ended:
            outcome = self.pending.pop(group_id)
            before = self.rates.get(outcome.key)
            kept = 0.0 if before is None else self.section.memory
            self.rates[outcome.key] = kept * (before or 0.0) + (1 - kept) * outcome.success

    def state(self) -> dict[str, Any]:
        """As JSON, for a checkpoint."""
        waiting = [[found.version, found.group_id, found.key, found.success] for found in self.pending.values()]
        return {"rates": dict(self.rates), "pending": waiting}

    def restore(self, state: dict[str, Any]) -> None:
        """The inverse of `state`."""
        self.rates = dict(state["rates"])
        self.pending = {found[1]: Outcome(*found) for found in state["pending"]}


class CurriculumSampler(TaskSampler):
    """A TaskSampler that skips positions. Its batches are all full, and may reach into the next epoch."""

    def __init__(
        self,
        section: CurriculumSection,
        tasks: Sequence[Task],
        batch_size: int,
        seed: int = 0,
        shuffle: bool = True,
        order: Callable[[int], list[int]] | None = None,
    ) -> None:
        super().__init__(tasks, batch_size, seed, shuffle, order=order)
        assert section.target is not None
        self.curriculum = Curriculum(section, section.target)
        self._key_of = key_function(section.by, tasks)
        self.drawn = self.passed_over = 0

    def next_batch(self) -> list[Draw]:
        """The next batch, always full."""
        return [self.next() for _ in range(self._batch_size)]

    def size_at(self, position: Position) -> int:
        """Every batch is full."""
        return self._batch_size

    def next(self) -> Draw:
        """The next task that is not skipped."""
        while True:
            draw = super().next()
            number = derive_seed("curriculum", self._seed, *draw.position) / _ALL
            if number < self.curriculum.chance(self._key_of(draw.task)):
                self.drawn += 1
                return draw
            self.passed_over += 1

    def observe(self, version: int, group_id: int, draw: Draw, episodes: Iterable[Episode]) -> None:
        """A group has ended. Failed episodes do not count: they say nothing about the difficulty of the task."""
        right = [_is_right(episode) for episode in episodes if not episode.failed]
        if right:
            self.curriculum.observe(Outcome(version, group_id, self._key_of(draw.task), sum(right) / len(right)))

    def end_version(self, version: int) -> None:
        """The outcomes of the version become part of the rates."""
        self.curriculum.count(version)

    def state(self) -> dict[str, Any]:
        """The rates."""
        return self.curriculum.state()

    def restore(self, position: Position, state: dict[str, Any] | None) -> None:
        """With the rates, if there are any."""
        super().restore(position, state)
        if state is not None:
            self.curriculum.restore(state)

    def metrics(self) -> dict[str, float]:
        """How much was skipped since this was last asked, and the rates."""
        positions, rates = self.drawn + self.passed_over, self.curriculum.rates
        found = {"curriculum/passed_over": self.passed_over / positions} if positions else {}
        if rates:
            found |= {"curriculum/known": float(len(rates)), "curriculum/rate": sum(rates.values()) / len(rates)}
        self.drawn = self.passed_over = 0
        return found


def key_function(by: str, tasks: Iterable[Task]) -> Callable[[Task], str]:
    """What a task shares its success rate by; every task must have it."""
    if by == "task":
        return lambda task: task.id
    if by == "source":
        return lambda task: task.source
    name = by.removeprefix("metadata.")
    if name == by:
        raise ConfigError(f'data.curriculum.by is "task", "source" or "metadata.NAME", got "{by}"')
    for task in tasks:
        if name not in task.metadata:
            raise ConfigError(
                f'data.curriculum.by is "{by}", and the metadata of task "{task.id}" has no "{name}"; '
                f"it has {', '.join(task.metadata) or 'nothing'}"
            )
    return lambda task: json.dumps(task.metadata[name], sort_keys=True, default=str)


def _is_right(episode: Episode) -> bool:
    return episode.is_correct if episode.is_correct is not None else episode.reward >= 1.0
