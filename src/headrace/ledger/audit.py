"""Does a ledger contradict itself? Checked when a run is resumed: what is found here would train groups wrongly.

SQLite notices damage to the structure of the file, and checksums damage to bodies. What is checked here is what the
tables say about each other: every group has one end, and counts, groups, batches and episodes agree on it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

from headrace.ledger.records import EpisodeState, GroupState
from headrace.ledger.restoring import ENDINGS, Rows

MOST_CHECKED_BYTES: Final = 64 << 20
"""Up to this size the indexes are compared with their tables, too, which takes a second for so much."""


def find_damage(rows: Rows) -> str | None:
    """What is wrong with the structure of the file; None if nothing is. Reads all of it."""
    ((size,),) = rows("SELECT page_count * page_size FROM pragma_page_count(), pragma_page_size()", ())
    check = "integrity_check" if size <= MOST_CHECKED_BYTES else "quick_check"
    ((found,), *_) = rows(f"PRAGMA {check}(1)", ())
    return None if found == "ok" else str(found).splitlines()[-1]  # the first line may be the name of the database


def find_contradiction(rows: Rows) -> str | None:
    """The first thing that the tables disagree about; None if they agree on everything."""
    checks: tuple[Callable[[Rows], Iterable[str]], ...] = (_groups, _counts, _batches, _bodies, _members, _episodes)
    return next((found for check in checks for found in check(rows)), None)


def _groups(rows: Rows) -> Iterator[str]:
    """A group's state and the endings of its episodes: the tables refuse only what does not add up."""
    states = _quoted(GroupState)
    found = rows(
        f"SELECT group_id, state, size, {', '.join(ENDINGS)} FROM groups WHERE state NOT IN ({states}) "
        "OR (state = 'dispatched' AND trained + filtered + failed + stale > 0) "
        "OR (state = 'whole' AND (trained + stale > 0 OR filtered + failed >= size)) "
        "OR (state = 'trained' AND (trained = 0 OR stale > 0)) OR (state = 'stale' AND (stale = 0 OR trained > 0)) "
        "OR (state IN ('filtered', 'failed') AND trained + stale > 0) ORDER BY group_id LIMIT 1",
        (),
    )
    for group_id, state, size, *endings in found:
        ended = ", ".join(f"{count} {name}" for name, count in zip(ENDINGS, endings, strict=True))
        yield f'group {group_id} is "{state}", and of its {size} episodes there are {ended}'


def _counts(rows: Rows) -> Iterator[str]:
    names = ("dispatched", *ENDINGS)
    sums = ", ".join(f"sum({column})" for column in ("size", *ENDINGS))
    by_groups = {
        (source, name): episodes
        for source, *found in rows(f"SELECT source, {sums} FROM groups GROUP BY source", ())
        for name, episodes in zip(names, found, strict=True)
    }
    counts = rows("SELECT source, ending, episodes FROM counts WHERE ending != 'restarted'", ())
    by_counts = {(source, ending): episodes for source, ending, episodes in counts}
    for source, name in sorted(by_groups.keys() | by_counts.keys()):
        ours, theirs = by_counts.get((source, name), 0), by_groups.get((source, name), 0)
        if ours != theirs:
            yield f'{ours} episodes of source "{source}" were counted as {name}, and its groups have {theirs}'


def _members(rows: Rows) -> Iterator[str]:
    """Groups and the batches that held them. A kill can cost the decisions on the last batch only."""
    found = rows(
        "SELECT b.step, b.group_id, g.state FROM batch_groups b LEFT JOIN groups g USING (group_id) "
        "WHERE NOT again AND g.state IS NOT 'trained' AND NOT (g.state IS 'whole' AND b.step IS "
        "(SELECT step FROM batches WHERE steps IS NULL ORDER BY step DESC LIMIT 1)) ORDER BY b.step LIMIT 1",
        (),
    )
    for step, group_id, state in found:
        what = "is not recorded" if state is None else f'is "{state}"'
        yield f"group {group_id} was trained in the batch of step {step + 1}, and {what}"
    twice = "SELECT group_id, min(step), max(step) FROM batch_groups WHERE NOT again GROUP BY 1 HAVING count(*) > 1"
    for group_id, first, last in rows(f"{twice} LIMIT 1", ()):
        yield f"group {group_id} is new in the batches of step {first + 1} and of step {last + 1}"
    nowhere = (
        "SELECT group_id FROM groups g WHERE state = 'trained' AND NOT EXISTS "
        "(SELECT 1 FROM batch_groups b WHERE b.group_id = g.group_id AND NOT again) LIMIT 1"
    )
    for (group_id,) in rows(nowhere, ()):
        yield f"group {group_id} was trained, and is in no batch"


def _batches(rows: Rows) -> Iterator[str]:
    """A batch and the groups that are listed for it."""
    listed = "SELECT step, count(*), max(place), count(*) FILTER (WHERE NOT again) FROM batch_groups GROUP BY step"
    members: dict[int, tuple[int, ...]] = {step: tuple(found) for step, *found in rows(listed, ())}
    for step, pieces in rows("SELECT step, pieces FROM batches ORDER BY step", ()):
        count, last, fresh = members.pop(step, (0, -1, 0))
        expected = _sum(pieces)
        if expected is None:
            yield f'the pieces of the batch of step {step + 1} are "{pieces}"'
        elif expected and expected != fresh:
            yield f"the batch of step {step + 1} was made of {expected} groups, and {fresh} are listed"
        elif not count or count != last + 1:
            yield f"the batch of step {step + 1} lists {count} groups, the last as number {last + 1}"
    for step in sorted(members):
        yield f"groups are listed for a batch of step {step + 1}, and there is none"


def _bodies(rows: Rows) -> Iterator[str]:
    """Rows and tokens belong to a batch, and tokens to rows. They are decoded, and their checksums compared, on use."""
    kinds = (("batch_rows", "batches", "rows", "batch"), ("batch_tokens", "batch_rows", "the learner's values", "rows"))
    for table, owner, what, missing in kinds:
        for (step,) in rows(f"SELECT step FROM {table} WHERE step NOT IN (SELECT step FROM {owner}) LIMIT 1", ()):
            yield f"there are {what} of a batch of step {step + 1}, and no {missing}"


def _episodes(rows: Rows) -> Iterator[str]:
    """Of groups without an end, which are resumed. Those of batches are complete when they are read, or refused."""
    of_open = "FROM groups g JOIN episodes e USING (group_id) WHERE g.state IN ('dispatched', 'whole') AND"
    wrong = f"e.rollout_idx NOT BETWEEN 0 AND g.size - 1 OR e.state NOT IN ({_quoted(EpisodeState)})"
    for group_id, rollout, state in rows(f"SELECT group_id, rollout_idx, e.state {of_open} ({wrong}) LIMIT 1", ()):
        yield f'group {group_id} has an episode of rollout {rollout} that is "{state}"'
    ended = (
        "SELECT g.group_id, g.size, count(DISTINCT e.rollout_idx) FROM groups g LEFT JOIN episodes e "
        "ON e.group_id = g.group_id AND e.state IN ('finished', 'failed') WHERE g.state = 'whole' "
        "GROUP BY g.group_id HAVING count(DISTINCT e.rollout_idx) != g.size LIMIT 1"
    )
    for group_id, size, found in rows(ended, ()):
        yield f"group {group_id} is complete, and {found} of its {size} episodes are there"


def _sum(pieces: Any) -> int | None:
    """How many groups the pieces of a batch stand for; None if they are no pieces."""
    try:
        values = json.loads(pieces)
        return sum(values) if isinstance(values, list) else None
    except (ValueError, TypeError):
        return None


def _quoted(states: type[GroupState] | type[EpisodeState]) -> str:
    return ", ".join(f"'{state}'" for state in states)
