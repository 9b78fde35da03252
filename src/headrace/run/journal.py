"""RunJournal: what the loops of a run record, and what they find again after a crash.

The rule: a training batch is durable before its update is made. So after a crash the steps after the checkpoint are
repeated from the recorded batches, with nothing generated again; complete groups are trained as they are; and episodes
that were in flight run again, with every recorded answer given back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from headrace.data.episode import Episode
from headrace.data.sample import LearnedShare, TrainBatch
from headrace.data.sampler import Draw, Position
from headrace.errors import LedgerError
from headrace.ledger.account import Account
from headrace.ledger.episode_record import AttemptRecord
from headrace.ledger.records import BatchRecord, GroupRecord, UnfinishedGroup

if TYPE_CHECKING:
    from headrace.run.checkpoint import TrainerState
    from headrace.scheduling.buffer import FinishedGroup
    from headrace.weights.base import SyncedWeights


class RunJournal:
    """Records nothing and finds nothing: for runs without a ledger. `LedgerJournal` does both."""

    # ---- what was recorded ----------------------------------------------------------------------------------------

    @property
    def resumes(self) -> bool:
        """Whether another process has recorded something before this one."""
        return False

    @property
    def restarted(self) -> int:
        """Episodes that were restarted, over all processes of the run, as their workflow did not do the same."""
        return 0

    def account(self) -> Account:
        """Where every dispatched episode is, over all processes of the run."""
        return Account()

    def next_position(self) -> Position | None:
        """Where in the stream of tasks the next one is to be drawn; None if none was."""
        return None

    def next_group_id(self) -> int:
        """The first id that is free."""
        return 0

    def knows(self, group_id: int) -> bool:
        """Whether a group is recorded."""
        return False

    def position_of(self, group_id: int) -> Position:
        """Where the task of a recorded group was drawn."""
        raise LedgerError(f"group {group_id} is not recorded; run with ledger.enabled = true to record groups")

    def filtered_among(self, group_ids: Iterable[int]) -> Iterator[tuple[int, GroupRecord]]:
        """Those of the groups that were dropped though some episodes worked, with the version that was live then."""
        return iter(())

    def batch_begun_at(self) -> Position | None:
        """Where the tasks begin of which no batch was made yet; None if there are none."""
        return None

    def batches_from(self, step: int) -> list[BatchRecord]:
        """Batches that were recorded after `step` optimizer steps, in order."""
        return []

    def under_way(self, recorded: Iterable[BatchRecord]) -> list[UnfinishedGroup]:
        """Groups without an end, in order; not those of the recorded batches, which are trained from there."""
        return []

    def episodes_of(self, group_id: int) -> list[Episode]:
        """All episodes of a recorded group."""
        raise LedgerError(f"group {group_id} is not recorded; run with ledger.enabled = true to record groups")

    def weight_digest(self, version: int) -> str | None:
        """That of the weights that were synced as `version`, if they were."""
        return None

    def evaluation(self, step: int, names: Iterable[str]) -> dict[str, dict[str, float]] | None:
        """The recorded evaluation of a step, by set; None unless every set is there."""
        return None

    # ---- beside a checkpoint --------------------------------------------------------------------------------------

    def agree_with(self, state: TrainerState | None, branches: bool) -> list[str]:
        """Compare with the checkpoint that the run resumes from (None: none), and restore; what is to be reported.

        `branches`: the run begins with a checkpoint of another run.
        """
        return []

    def with_excerpt(self, state: TrainerState) -> TrainerState:
        """The state with what its checkpoint is to know of the ledger, which must have been flushed."""
        return state

    def made_steps(self, upto: int) -> list[int] | None:
        """The steps that recorded batches ended with, up to a step; None if it is not known."""
        return None

    @property
    def begins_at(self) -> int | None:
        """The step that the record begins with; None if there is none."""
        return None

    # ---- what happens ---------------------------------------------------------------------------------------------

    def resumed(self, step: int | None) -> None:
        """The run resumes from a step; None: it begins."""

    def open(self, group_id: int, rollout_idx: int, seed: int) -> AttemptRecord:
        """The record of the newest attempt at an episode, which may hold something already."""
        return AttemptRecord()

    def restart(self, record: AttemptRecord) -> AttemptRecord:
        """An empty record for another attempt, in place of one that turned out to be of no use."""
        return AttemptRecord()

    def drawn(self, group_id: int, draw: Draw, size: int, version: int) -> None:
        """A task is to be rolled out."""

    def completed(self, finished: FinishedGroup, step: int) -> None:
        """All episodes of a group are there; it waits to be trained, or was dropped."""

    def stale(self, finished: FinishedGroup, step: int) -> None:
        """A complete group is dropped for its age."""

    def nothing_to_train(self, groups: Iterable[FinishedGroup], step: int) -> None:
        """Complete groups came to no update."""

    async def training(
        self,
        step: int,
        version: int,
        pieces: Sequence[Sequence[FinishedGroup]],
        again: Sequence[FinishedGroup],
        trained: Sequence[TrainBatch] = (),
    ) -> None:
        """These groups are about to be trained, in these pieces and rows. Returns when a kill cannot undo that."""

    def learned(self, step: int, shares: Sequence[LearnedShare]) -> None:
        """What the learner computed of the rows of the batch of `step`, where several updates were made on it."""

    def decide_trained(self, step: int, groups: Iterable[FinishedGroup]) -> None:
        """These groups belong to the recorded batch of `step`."""

    def trained(self, step: int, steps: int, synced: SyncedWeights) -> None:
        """So many optimizer steps were made on the batch of `step`, and the engine has the weights."""

    def evaluated(self, step: int, name: str, metrics: Mapping[str, float], episodes: Sequence[Episode]) -> None:
        """One set was evaluated."""

    async def flushed(self) -> None:
        """Returns when everything recorded so far is on the disk."""

    def saved(self, oldest_step: int, reusable: Iterable[int]) -> None:
        """Checkpoints from `oldest_step` on are on disk: what only earlier ones would need may be deleted."""

    def close(self) -> None:
        """Write what is left."""
