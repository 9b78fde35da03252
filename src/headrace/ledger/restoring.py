"""What a checkpoint keeps of the ledger: how far it was, and an excerpt from which the tables are restored."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

Row = tuple[Any, ...]
Rows = Callable[[str, Iterable[Any]], list[Row]]
"""Runs a query with its values."""

GROUP: Final = (
    "group_id, epoch, place, task_id, source, size, version, state, reason, step, "
    "trained, filtered, failed, stale, pruned"
)
ENDINGS: Final = ("trained", "filtered", "failed", "stale")
_SETTLED = slice(10, 14)
"""Where a row of groups has ENDINGS."""
_OPEN = "('dispatched', 'whole')"
_AT_ONCE = 500


@dataclass(frozen=True, slots=True)
class Standing:
    """What is recorded of the time before a checkpoint: groups that had ended, their episodes by ending, batches."""

    groups: int
    batches: int
    trained: int
    filtered: int
    failed: int
    stale: int

    def __add__(self, other: Standing) -> Standing:
        return Standing(**{name: value + asdict(other)[name] for name, value in asdict(self).items()})


@dataclass(frozen=True, slots=True)
class Excerpt:
    """Rows of the ledger, as its tables have them; of a batch also its members (place, group, again)."""

    groups: tuple[Row, ...]
    batches: tuple[Row, ...]
    publications: tuple[Row, ...]

    def to_json(self) -> dict[str, Any]:
        """As lists."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Excerpt:
        """The inverse of `to_json`."""
        batches = ((*row[:-1], tuple(tuple(member) for member in row[-1])) for row in value["batches"])
        return cls(
            tuple(tuple(row) for row in value["groups"]),
            tuple(batches),
            tuple(tuple(row) for row in value["publications"]),
        )

    def standing(self) -> Standing:
        """What it adds to that of a ledger that has none of it."""
        sums = (sum(values) for values in zip(*(row[_SETTLED] for row in self.groups), strict=True))
        return Standing(len(self.groups), len(self.batches), *(sums if self.groups else (0, 0, 0, 0)))


def read_standing(rows: Rows, next_group_id: int, unfinished: Collection[int], step: int) -> Standing:
    """Of the groups with smaller ids that are not among the `unfinished`, and of the batches before a step."""
    sums = "count(*), " + ", ".join(f"coalesce(sum({name}), 0)" for name in ENDINGS)
    ended = f"FROM groups WHERE state NOT IN {_OPEN} AND"
    ((groups, *endings),) = rows(f"SELECT {sums} {ended} group_id < ?", (next_group_id,))
    for some in _in_parts(sorted(unfinished)):  # they have ended since
        ((later, *others),) = rows(f"SELECT {sums} {ended} group_id IN ({_marks(some)})", some)
        groups, endings = groups - later, [one - other for one, other in zip(endings, others, strict=True)]
    ((batches,),) = rows("SELECT count(*) FROM batches WHERE steps IS NOT NULL AND step < ?", (step,))
    return Standing(groups, batches, *endings)


def read_open(rows: Rows, next_group_id: int, unfinished: Collection[int]) -> set[int]:
    """Groups without an end that are not among the `unfinished` of a checkpoint."""
    found = rows(f"SELECT group_id FROM groups WHERE state IN {_OPEN} AND group_id < ?", (next_group_id,))
    return {group_id for (group_id,) in found} - set(unfinished)


def read_excerpt(rows: Rows, group_ids: Sequence[int], first_step: int, end_step: int) -> Excerpt:
    """The groups, where they have ended; the batches of some steps, and what was published after them."""
    steps = "step >= ? AND step < ? ORDER BY step"
    batches = rows(f"SELECT step, steps, version, pieces, recorded_at, committed_at FROM batches WHERE {steps}",
                   (first_step, end_step))  # fmt: skip
    published = rows(
        "SELECT version, fingerprint, step, published_at FROM publications WHERE step > ? AND step <= ?",
        (first_step, end_step),
    )
    return Excerpt(
        tuple(_ended(rows, group_ids)), tuple((*row, _members(rows, row[0])) for row in batches), tuple(published)
    )


def read_missing(rows: Rows, excerpt: Excerpt) -> Excerpt:
    """What of it the ledger does not have."""
    groups = {row[0] for row in _ended(rows, [row[0] for row in excerpt.groups])}
    batches = {step for (step,) in rows("SELECT step FROM batches WHERE steps IS NOT NULL", ())}
    versions = {version for (version,) in rows("SELECT version FROM publications", ())}
    return Excerpt(
        tuple(row for row in excerpt.groups if row[0] not in groups),
        tuple(row for row in excerpt.batches if row[0] not in batches),
        tuple(row for row in excerpt.publications if row[0] not in versions),
    )


def read_difference(rows: Rows, excerpt: Excerpt) -> str | None:
    """The first thing that the ledger has otherwise; None if it has all that it has as the excerpt does."""
    expected = {row[0]: row for row in excerpt.groups}
    for row in _ended(rows, list(expected)):
        if (row[:9], row[_SETTLED]) != (expected[row[0]][:9], expected[row[0]][_SETTLED]):
            return f"group {row[0]} was {expected[row[0]][7]}, and in the ledger it is {row[7]} or of another task"
    for step, *_, members in excerpt.batches:
        found = _members(rows, step)
        if found and found != members:
            return f"the batch of step {step + 1} was made of other groups"
    for version, digest, *_ in excerpt.publications:
        found = rows("SELECT fingerprint FROM publications WHERE version = ?", (version,))
        if found and found != [(digest,)]:
            return f"the weights of version {version} have another digest"
    return None


def _ended(rows: Rows, group_ids: Sequence[int]) -> list[Row]:
    query = f"SELECT {GROUP} FROM groups WHERE state NOT IN {_OPEN} AND group_id IN "
    return [row for some in _in_parts(group_ids) for row in rows(f"{query}({_marks(some)})", some)]


def _members(rows: Rows, step: int) -> tuple[Row, ...]:
    return tuple(rows("SELECT place, group_id, again FROM batch_groups WHERE step = ? ORDER BY place", (step,)))


def _in_parts(ids: Sequence[int]) -> Iterable[Sequence[int]]:
    return (ids[start : start + _AT_ONCE] for start in range(0, len(ids), _AT_ONCE))


def _marks(ids: Sequence[int]) -> str:
    return ", ".join("?" * len(ids))
