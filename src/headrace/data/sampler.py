"""Which task comes next: a pure function of (seed, position), so that a resumed run sees the same suffix."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from headrace.data.episode import Episode
from headrace.data.task import Task
from headrace.errors import ConfigError

Position = tuple[int, int]
"""Epoch, and index within its order."""


class Draw(NamedTuple):
    """A task, and where in the stream it stands: `draw_at(position)` gives it again."""

    position: Position
    task: Task


class TaskSampler:
    """An endless stream of tasks, epoch after epoch. Its state is `position` = (epoch, tasks drawn of it)."""

    def __init__(
        self,
        tasks: Sequence[Task],
        batch_size: int,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = True,
        order: Callable[[int], list[int]] | None = None,
    ) -> None:
        """`order(epoch)` lists the indices of the tasks in the order in which that epoch draws them."""
        if drop_last and len(tasks) < batch_size:
            raise ConfigError(
                f"trainer.batch_size is {batch_size}, but there are only {len(tasks)} tasks; "
                f"lower it or set data.drop_last = false"
            )
        self._tasks = list(tasks)
        self._batch_size = batch_size
        self._seed = seed
        self._shuffle = shuffle
        self._drop_last = drop_last
        self._order = lru_cache(maxsize=2)(order or self._new_order)
        self.position: Position = (0, 0)

    def digest(self) -> str:
        """Of the ids of its tasks, in their order: where it differs, a position means another task."""
        ids = "\0".join(str(task.id) for task in self._tasks)
        return hashlib.blake2b(ids.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()

    def __len__(self) -> int:
        """Batches in one epoch."""
        count = len(self._tasks) // self._batch_size
        return count if self._drop_last else -(-len(self._tasks) // self._batch_size)

    def next_batch(self) -> list[Draw]:
        """The next batch, all of one epoch; the last, short one is dropped or returned short."""
        epoch, drawn = self.position
        left = len(self._tasks) - drawn
        if left == 0 or (self._drop_last and left < self._batch_size):
            epoch, drawn, left = epoch + 1, 0, len(self._tasks)
        size = min(self._batch_size, left)
        self.position = (epoch, drawn + size)
        return [self.draw_at((epoch, index)) for index in range(drawn, drawn + size)]

    def size_at(self, position: Position) -> int:
        """How many tasks the batch has that begins there: fewer where an epoch ends with a short one."""
        return self._batch_size if self._drop_last else min(self._batch_size, len(self._tasks) - position[1])

    def next(self) -> Draw:
        """One more task, to replace one whose group was dropped."""
        epoch, drawn = self.position
        if drawn == len(self._tasks):
            epoch, drawn = epoch + 1, 0
        self.position = (epoch, drawn + 1)
        return self.draw_at((epoch, drawn))

    def draw_at(self, position: Position) -> Draw:
        """What was, or will be, drawn there."""
        epoch, index = position
        return Draw((epoch, index), self._tasks[self._order(epoch)[index]])

    def state(self) -> dict[str, Any] | None:
        """What a checkpoint keeps beside the position, as JSON; None if there is nothing more."""
        return None

    def restore(self, position: Position, state: dict[str, Any] | None) -> None:
        """Resume where a run stood: the inverse of `position` and `state`."""
        self.position = position

    def observe(self, version: int, group_id: int, draw: Draw, episodes: Iterable[Episode]) -> None:
        """A group that was drawn here has its end, at this version. A curriculum learns from it."""

    def end_version(self, version: int) -> None:
        """All groups of a version are trained: later draws may depend on how they went."""

    def metrics(self) -> dict[str, float]:
        """Metrics of what was drawn since they were last asked for."""
        return {}

    def _new_order(self, epoch: int) -> list[int]:
        return epoch_order(len(self._tasks), self._seed, epoch, self._shuffle)


def epoch_order(size: int, seed: int | str, epoch: int, shuffle: bool) -> list[int]:
    """Every number below `size` once: in an order that depends on seed and epoch, or as they are."""
    order = list(range(size))
    if shuffle:
        random.Random(f"{seed}/{epoch}").shuffle(order)
    return order
