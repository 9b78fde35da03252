"""Do ledger and checkpoint belong together? Compared at every start, before anything is trained.

A checkpoint is written after the ledger was synced, so its ledger knows at least what the checkpoint knows. Where it
does not (an older copy was put back, part of the file is lost), trained groups would be trained again. A checkpoint
therefore holds what the ledger recorded since the checkpoint before it, without messages: that much is restored.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import astuple, replace
from pathlib import Path

from headrace.errors import LedgerError
from headrace.ledger import Ledger, LedgerReader
from headrace.ledger.audit import find_contradiction, find_damage
from headrace.ledger.files import WITHOUT_IT, damaged
from headrace.ledger.restoring import (
    Excerpt,
    Standing,
    read_difference,
    read_excerpt,
    read_missing,
    read_open,
    read_standing,
)
from headrace.run.checkpoint import TrainerState
from headrace.tracking.jsonl import FILE_NAME, read_rows


def with_excerpt(state: TrainerState, before: TrainerState | None, ledger: LedgerReader) -> TrainerState:
    """The state with what the ledger must contain, and with what it recorded since the checkpoint `before`."""
    unfinished = {group_id for group_id, _ in state.unfinished}
    first, earlier = (before.next_group_id, before.unfinished) if before else (0, [])
    changed = {*range(first, state.next_group_id), *(group_id for group_id, _ in earlier)} - unfinished
    excerpt = read_excerpt(ledger.rows, sorted(changed), before.step if before else 0, state.step)
    standing = read_standing(ledger.rows, state.next_group_id, unfinished, state.step)
    found = {"id": ledger.identity().ledger_id, "standing": astuple(standing), "excerpt": excerpt.to_json()}
    return replace(state, ledger=found)


def reconcile(ledger: Ledger, state: TrainerState | None, branches: bool) -> list[str]:
    """Compare, and restore what is missing; what was, to be reported. Raises LedgerError where it cannot be restored.

    `branches`: the run begins with a checkpoint of another run.
    """
    step = state.step if state else 0
    if found := find_damage(ledger.rows):
        raise damaged(ledger.path, found)
    notes = _reconciled(ledger, state, branches) if state else []
    _require_chain(ledger, step)
    # last: what was restored above is no damage
    if found := find_contradiction(ledger.rows):
        raise damaged(ledger.path, found)
    for batch in ledger.batches_from(step):
        ledger.trained_rows(batch.step)  # compares the batch with its checksum
    return notes


def _reconciled(ledger: Ledger, state: TrainerState, branches: bool) -> list[str]:
    identity, theirs = ledger.identity(), state.ledger.get("id", "")
    if identity.begun_from == (theirs, state.step):
        return []  # the checkpoint that this ledger was begun with
    if theirs == identity.ledger_id:
        return _restored(ledger, state)
    if ledger.last_group_id() is None and ledger.last_batch() is None:
        ledger.begun(theirs, state.step)
        return [] if branches or not state.step else [_no_record(ledger, state.step)]
    if theirs:
        raise LedgerError(
            f"the ledger {ledger.path} is not the one that the checkpoint of step {state.step} was written with: one "
            f"of them is another run's. Put the run's own back; {WITHOUT_IT}"
        )
    return _without_excerpt(ledger, state)


def _restored(ledger: Ledger, state: TrainerState) -> list[str]:
    unfinished = {group_id for group_id, _ in state.unfinished}
    found = read_standing(ledger.rows, state.next_group_id, unfinished, state.step)
    expected, excerpt = Standing(*state.ledger["standing"]), Excerpt.from_json(state.ledger["excerpt"])
    different = read_difference(ledger.rows, excerpt)
    if different:
        raise LedgerError(
            f"the ledger {ledger.path} contradicts the checkpoint of step {state.step}: {different}. Put the run's own "
            f"back; {WITHOUT_IT}"
        )
    if found == expected:
        return []
    missing = read_missing(ledger.rows, excerpt)
    open_groups = read_open(ledger.rows, state.next_group_id, unfinished) - {row[0] for row in missing.groups}
    if open_groups or found + missing.standing() != expected:
        raise LedgerError(_behind(ledger, state, expected, found))
    ledger.restore(missing)
    return [_restoring(missing, state.step)]


def _behind(ledger: LedgerReader, state: TrainerState, expected: Standing, found: Standing) -> str:
    last = ledger.last_batch()
    upto = (last.step + (last.steps or 0)) if last else 0
    return (
        f"the ledger {ledger.path} is behind the checkpoint of step {state.step}: it has {found.batches} of "
        f"{expected.batches} batches (up to step {upto}) and {found.groups} of {expected.groups} groups that ended, "
        f"and the checkpoint can restore only the steps since the one before it. Groups would be trained twice. Put a "
        f"newer copy of the ledger back; {WITHOUT_IT}"
    )


def _without_excerpt(ledger: LedgerReader, state: TrainerState) -> list[str]:
    """The checkpoint does not know its ledger: it was written without one, or by an older program."""
    unfinished = {group_id for group_id, _ in state.unfinished}
    open_groups = read_open(ledger.rows, state.next_group_id, unfinished)
    last = ledger.last_batch()
    upto = (last.step + (last.steps or 0)) if last else 0
    if open_groups or upto < state.step:
        raise LedgerError(
            f"the ledger {ledger.path} ends at step {upto}, and the checkpoint is of step {state.step}: the steps "
            f"between were trained with ledger.enabled = false, or the ledger is an older copy. Put a newer one back, "
            f"resume with ledger.enabled = false, {WITHOUT_IT}"
        )
    return []


def _require_chain(ledger: LedgerReader, step: int) -> None:
    """The batches after the checkpoint must follow on it, and on each other: they are trained again one by one."""
    batches = ledger.batches_from(step)
    gap = first_gap([(batch.step, batch.steps) for batch in batches], step)
    if gap is not None:
        raise LedgerError(
            f"the ledger {ledger.path} has batches up to step {batches[-1].step + 1}, but not that of step {gap + 1}, "
            f"and the newest intact checkpoint is of step {step}. Put a newer checkpoint or ledger back; {WITHOUT_IT}"
        )


def first_gap(batches: Iterable[tuple[int, int | None]], step: int) -> int | None:
    """Where batches (steps before each, steps made) that should follow each other from `step` on do not."""
    expected: int | None = step
    for begins, steps in batches:
        if begins != expected:
            return step if expected is None else expected
        step, expected = begins, None if steps is None else begins + steps
    return None


def _no_record(ledger: LedgerReader, step: int) -> str:
    return (
        f"warning: there is no ledger of steps 1 to {step}, which the checkpoint contains: {ledger.path} is new. "
        f"Nothing is trained twice; the account and the record begin here"
    )


def _restoring(missing: Excerpt, step: int) -> str:
    batches = in_words([row[0] + 1 for row in missing.batches])
    return (
        f"warning: the ledger was behind the checkpoint of step {step}. Restored from the checkpoint: "
        f"{len(missing.groups)} groups that had ended"
        + (f", the batches of steps {batches}" if batches else "")
        + "; their messages are lost"
    )


def missing_steps(run_dir: Path, first: int | None, step: int, expected: Collection[int]) -> list[str]:
    """Steps that a checkpoint contains, and metrics.jsonl does not; it begins after step `first`, if that is known."""
    rows = [row for row in read_rows(run_dir / FILE_NAME) if row]
    begins = min(rows, default=step) if first is None else first + 1
    missing = sorted({one for one in expected if begins <= one <= step} - set(rows))
    if not missing:
        return []
    return [f"warning: {FILE_NAME} has no row of steps {in_words(missing)}, which the checkpoint contains"]


def in_words(numbers: Sequence[int]) -> str:
    """1, 2, 3, 7 as "1-3, 7"."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ", ".join("-".join(map(str, run)) for run in runs)
