"""What is to be known of tasks before they are trained: `headrace data inspect` shows it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from headrace.data.split import overlaps, prompt_key
from headrace.data.task import Task

_SHOWN = 3
Length = Callable[[Task], int]


@dataclass(frozen=True, slots=True)
class Lengths:
    """How long prompts are."""

    mean: float
    median: float
    q95: float
    max: int

    @classmethod
    def of(cls, values: Sequence[int]) -> Lengths:
        """Statistics of some lengths."""
        middle, high = (float(found) for found in np.percentile(values, [50, 95]))
        return cls(float(np.mean(values)), middle, high, max(values))


@dataclass(frozen=True, slots=True)
class Overlap:
    """Tasks of an evaluation set that ask what is also trained."""

    tasks: int
    shared: int
    ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """All statistics. Plain data, for tables and for JSON."""

    tasks: int
    held_out: int
    sources: dict[str, int]
    draws: dict[str, float]
    """Share of the draws that each source of a mixture has; empty without a mixture."""
    with_answer: int
    characters: Lengths
    tokens: Lengths | None
    duplicates: int
    """Tasks that ask what a task before them asks."""
    duplicate_ids: tuple[tuple[str, str], ...]
    bad_rows: tuple[str, ...]
    evaluation: dict[str, Overlap]
    samples: tuple[Task, ...] = field(default=())

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {**asdict(self), "samples": [task.to_dict() for task in self.samples]}


def inspect_tasks(
    tasks: Sequence[Task],
    *,
    held_out: Sequence[Task] = (),
    bad_rows: Sequence[str] = (),
    sets: Mapping[str, Sequence[Task]] | None = None,
    draws: Mapping[str, float] | None = None,
    tokens: Length | None = None,
) -> Report:
    """The report on what is to be trained; `tokens` gives the length of a prompt in tokens."""
    pairs = _duplicates(tasks)
    sets = sets or {}
    return Report(
        tasks=len(tasks),
        held_out=len(held_out),
        sources=dict(Counter(task.source for task in tasks).most_common()),
        draws=dict(draws or {}),
        with_answer=sum(task.answer is not None for task in tasks),
        characters=Lengths.of([characters(task) for task in tasks]),
        tokens=Lengths.of([tokens(task) for task in tasks]) if tokens else None,
        duplicates=len(pairs),
        duplicate_ids=tuple(pairs[:_SHOWN]),
        bad_rows=tuple(bad_rows),
        evaluation={
            name: Overlap(len(sets[name]), len(shared), tuple(task.id for task in shared[:_SHOWN]))
            for name, shared in overlaps(tasks, sets).items()
        },
        samples=_samples(tasks),
    )


def characters(task: Task) -> int:
    """The length of a task's messages, in characters."""
    return sum(len(str(message.get("content") or "")) for message in task.messages)


def _duplicates(tasks: Sequence[Task]) -> list[tuple[str, str]]:
    """Ids of tasks that ask the same: the first, and the later one."""
    first: dict[int, str] = {}
    pairs: list[tuple[str, str]] = []
    for task in tasks:
        before = first.setdefault(prompt_key(task), task.id)
        if before != task.id:
            pairs.append((before, task.id))
    return pairs


def _samples(tasks: Sequence[Task]) -> tuple[Task, ...]:
    """The first task of each source, then others from the beginning, the middle and the end."""
    firsts = {task.source: task for task in reversed(tasks)}
    spread = [tasks[0], tasks[len(tasks) // 2], tasks[-1]]
    chosen = {task.id: task for task in (*list(reversed(firsts.values()))[:_SHOWN], *spread)}
    return tuple(chosen.values())[:_SHOWN]
