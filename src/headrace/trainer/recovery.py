"""Recovery: where an interrupted run stands, by its ledger and its newest checkpoint, and its recorded steps repeated.

The ledger knows more than the checkpoint. Only of groups that no ledger has (or that of the run which this one began
from) the checkpoint knows more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from headrace.data.sampler import Position, TaskSampler
from headrace.ledger import Account
from headrace.ledger.records import BatchRecord
from headrace.run.checkpoint import TrainerState
from headrace.run.journal import RunJournal
from headrace.run.ledger_journal import in_pieces
from headrace.run.random_state import restore_random_states
from headrace.scheduling.buffer import FinishedGroup, TrajectoryGroupBuffer
from headrace.scheduling.lifecycle import GroupLifecycle, LiveGroup
from headrace.scheduling.producer import resume_groups
from headrace.scheduling.staleness import StalenessPolicy
from headrace.trainer.learner_step import LearnerStep


@dataclass(frozen=True, slots=True)
class Start:
    """Where a run starts: at its beginning, or where it was interrupted."""

    step: int = 0
    version: int = 0
    position: Position = (0, 0)
    """Where the next task is drawn."""
    next_group_id: int = 0
    recorded: tuple[BatchRecord, ...] = ()
    """Batches after the checkpoint, which are trained again from the record."""
    account: Account = field(default_factory=Account)
    state: TrainerState | None = None


def find_start(journal: RunJournal, buffer: TrajectoryGroupBuffer, state: TrainerState | None) -> Start:
    """By ledger and checkpoint."""
    step = state.step if state else 0
    recorded = tuple(journal.batches_from(step))
    return Start(
        step=step,
        version=state.version if state else 0,
        position=max(journal.next_position() or (0, 0), state.sampler_position if state else (0, 0)),
        next_group_id=max(journal.next_group_id(), state.next_group_id if state else 0),
        recorded=recorded,
        account=_account_before(recorded, journal, buffer),
        state=state,
    )


def _account_before(recorded: Sequence[BatchRecord], journal: RunJournal, buffer: TrajectoryGroupBuffer) -> Account:
    """Where every episode is; those of the recorded steps count as trained when these are repeated."""
    trained = 0
    for record in recorded:  # the decisions on the last one may have been cut off by the crash
        groups = [buffer.form(group_id, journal.episodes_of(group_id)) for group_id in record.group_ids]
        journal.decide_trained(record.step, groups)
        trained += sum(group.kept for group in groups)
    account = journal.account()
    return replace(account, trained=account.trained - trained, pending=account.pending + trained)


def restore_loops(
    start: Start,
    journal: RunJournal,
    sampler: TaskSampler,
    buffer: TrajectoryGroupBuffer,
    lifecycle: GroupLifecycle,
    policy: StalenessPolicy,
) -> list[LiveGroup]:
    """Put what an earlier process knew back into the parts of the loops; its groups without an end."""
    state = start.state
    unknown = [found for found in state.unfinished if not journal.knows(found[0])] if state else []
    resumed = resume_groups(lifecycle, sampler, journal.under_way(start.recorded), unknown)
    before = (state.unfinished, state.next_group_id) if state else ((), 0)
    since = (*(group_id for group_id, _ in before[0]), *range(before[1], start.next_group_id))
    sampler.restore(start.position, state.extra.get("curriculum") if state else None)
    for version, group in journal.filtered_among(since):
        draw = sampler.draw_at(group.position)
        sampler.observe(version, group.group_id, draw, journal.episodes_of(group.group_id))
    if state is not None:
        restore_random_states(state.random)
        policy.restore(state.extra.get("policy"))
        for group_id, uses in state.extra.get("used", ()):
            if journal.knows(group_id):
                buffer.restore_used(lifecycle.form_recorded(group_id), uses)
    return resumed


async def learn_recorded(
    learner: LearnerStep, record: BatchRecord, fresh: Sequence[FinishedGroup], again: Sequence[FinishedGroup]
) -> None:
    """Learn from a recorded batch as the run did: in the same pieces. The update is the caller's."""
    learner.begin(record.version)
    for piece, last in in_pieces(fresh, record.pieces):
        await learner.learn(piece, again if last else ())


def other_weights(step: int, digest: str, recorded: str) -> str:
    """What to report of a repeated step that gave other weights."""
    return (
        f"step {step}, repeated from its record, gave other weights (digest {digest}, not {recorded}): the "
        f"same up to rounding, unless the installation has changed; run.deterministic = true makes them equal"
    )
