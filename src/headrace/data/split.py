"""What is trained and what is kept for evaluation: a split by what is asked, so that nothing stands on both sides."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from headrace.data.task import Task
from headrace.data.untrusted import normalized
from headrace.errors import DataError

_WHOLE = 2**64


def prompt_key(task: Task) -> int:
    """A 64-bit digest of what the user says in a task; case, spacing and forms of the same letter do not count."""
    said = (str(message.get("content", "")) for message in task.messages if message["role"] == "user")
    text = " ".join(normalized("NFKC", "\n".join(said)).casefold().split())
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")


@dataclass(frozen=True, slots=True)
class Split:
    """Tasks that are trained, and tasks that are not, each in the order in which they came."""

    train: list[Task]
    held_out: list[Task]


def split_tasks(tasks: Sequence[Task], holdout: int | float) -> Split:
    """Hold out a share of the questions, or so many tasks.

    Which ones depends on nothing but their text. With a number, questions with the smallest digests are taken until
    there are enough tasks; a question that is there twice is taken twice, so there may be a few more.
    """
    if not holdout:
        return Split(list(tasks), [])
    keys = [prompt_key(task) for task in tasks]
    if isinstance(holdout, float):
        limit = int(holdout * _WHOLE)
    else:
        limit = sorted(keys)[holdout - 1] + 1 if holdout <= len(keys) else _WHOLE
    held_out = [task for task, key in zip(tasks, keys, strict=True) if key < limit]
    train = [task for task, key in zip(tasks, keys, strict=True) if key >= limit]
    if not train:
        raise DataError(f"data.holdout = {holdout} leaves nothing to train of {len(tasks)} tasks; lower it")
    return Split(train, held_out)


def overlaps(train: Iterable[Task], sets: Mapping[str, Iterable[Task]]) -> dict[str, list[Task]]:
    """The tasks of each evaluation set that ask what is also trained."""
    trained = {prompt_key(task) for task in train} if sets else set()
    return {name: [task for task in tasks if prompt_key(task) in trained] for name, tasks in sets.items()}
