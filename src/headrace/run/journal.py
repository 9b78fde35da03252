"""What the trainer's loops tell the ledger, and what they get back from it after a crash.

The rule: a training batch is durable in the ledger before its update is made. So after a crash the steps after the
checkpoint are made again from the recorded batches, with nothing generated anew; groups that were whole are trained as
they are; and episodes that were in flight are run again with every recorded answer handed back.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.config import RunConfig
from headrace.data.episode import Episode, ModelOutput
from headrace.data.sample import TrainBatch
from headrace.data.sampler import Draw, Position
from headrace.data.task import Message
from headrace.ledger import Account, GroupState, Ledger
from headrace.ledger.episode_record import DivergedReplay, EpisodeRecord, Journal, NoJournal
from headrace.ledger.records import BatchRecord, CallRecord, GroupRecord, ResultRecord, UnfinishedGroup
from headrace.run.agreement import reconcile, with_excerpt
from headrace.run.checkpoint import TrainerState

if TYPE_CHECKING:
    from headrace.scheduling.buffer import FinishedGroup
    from headrace.weights.base import SyncedWeights

_NOTHING_TO_TRAIN = "the batch held nothing to train"


class RunJournal:
    """The ledger of a run, or nothing: then nothing is recorded and nothing is found."""

    def __init__(self, ledger: Ledger | None) -> None:
        self._ledger = ledger
        unfinished = ledger.unfinished() if ledger else []
        self.unfinished: dict[int, UnfinishedGroup] = {item.group.group_id: item for item in unfinished}
        evaluations = ledger.evaluations() if ledger else []
        self._evaluations = {(found.step, found.name): found.metrics for found in evaluations}
        self._episodes = LedgerJournal(ledger, self.unfinished) if ledger else None
        self._saved: TrainerState | None = None
        self._restarted_before = ledger.restarted() if ledger else 0

    # ---- what was ---------------------------------------------------------------------------------------------

    @property
    def keeps(self) -> bool:
        """Whether anything is recorded."""
        return self._ledger is not None

    @property
    def resumes(self) -> bool:
        """Whether another process has recorded something before this one."""
        return self._ledger is not None and len(self._ledger.processes()) > 1

    @property
    def restarted(self) -> int:
        """Episodes that were started anew, over all processes of the run, as their workflow did not do the same."""
        return self._restarted_before + (self._episodes.restarted if self._episodes else 0)

    def account(self) -> Account:
        """Where every dispatched episode is, over all processes of the run."""
        return self._ledger.account() if self._ledger else Account()

    def next_position(self) -> tuple[int, int] | None:
        """Where in the stream of tasks the next one is to be drawn; None if none was."""
        last = self._ledger.last_position() if self._ledger else None
        return None if last is None else (last[0], last[1] + 1)

    def next_group_id(self) -> int:
        """The first id that is free."""
        last = self._ledger.last_group_id() if self._ledger else None
        return 0 if last is None else last + 1

    def knows(self, group_id: int) -> bool:
        """Whether a group is recorded."""
        return self._ledger is not None and self._ledger.group_record(group_id) is not None

    def position_of(self, group_id: int) -> Position:
        """Where the task of a recorded group was drawn."""
        found = self._ledger.group_record(group_id) if self._ledger else None
        assert found is not None, f"group {group_id} is not recorded"
        return found.position

    def filtered_among(self, group_ids: Iterable[int]) -> Iterator[tuple[int, GroupRecord]]:
        """Those of the groups that were dropped though some episodes worked, with the version that was live then."""
        for group_id in group_ids if self._ledger else ():
            assert self._ledger is not None
            found = self._ledger.group_record(group_id)
            if found is None or found.state != GroupState.FILTERED or found.step is None or found.pruned:
                continue
            yield self._version_at(found.step) if found.reason == _NOTHING_TO_TRAIN else found.step, found

    def _version_at(self, step: int) -> int:
        """The version that the batch after `step` optimizer steps was, or is to be, trained at."""
        assert self._ledger is not None
        following, last = self._ledger.batches_from(step), self._ledger.last_batch()
        if following:
            return following[0].version
        return last.version + 1 if last else 0

    def batch_begun_at(self) -> Position | None:
        """Where the tasks begin of which no batch was made yet; None if there are none. In step, it is one batch."""
        if self._ledger is None:
            return None
        last = self._ledger.last_batch()
        first = 1 + max(last.group_ids, default=-1) if last else 0
        begun: Position | None = None
        for group_id in range(first, self.next_group_id()):
            found = self._ledger.group_record(group_id)
            if found is not None and found.reason == _NOTHING_TO_TRAIN:
                begun = None
            elif found is not None and begun is None:
                begun = found.position
        return begun

    def batches_from(self, step: int) -> list[BatchRecord]:
        """Batches that were recorded after `step` optimizer steps, in order."""
        return self._ledger.batches_from(step) if self._ledger else []

    def under_way(self, recorded: Iterable[BatchRecord]) -> list[UnfinishedGroup]:
        """Groups that were started and not decided about, without those of recorded batches, in order."""
        taken = {group_id for record in recorded for group_id in record.group_ids}
        return [self.unfinished[group_id] for group_id in sorted(self.unfinished.keys() - taken)]

    def episodes_of(self, group_id: int) -> list[Episode]:
        """All episodes of a recorded group."""
        assert self._ledger is not None
        return self._ledger.complete_group(group_id)

    def fingerprint(self, version: int) -> str | None:
        """That of the weights that were published as `version`, if they were."""
        found = self._ledger.publication(version) if self._ledger else None
        return None if found is None else found.fingerprint

    def evaluation(self, step: int, names: Iterable[str]) -> dict[str, dict[str, float]] | None:
        """The recorded evaluation of a step, by set; None unless every set is there."""
        found = {name: self._evaluations.get((step, name)) for name in names}
        return None if None in found.values() else {name: dict(metrics or {}) for name, metrics in found.items()}

    def episodes(self) -> Journal:
        """The records of single episodes."""
        return self._episodes or NoJournal()

    # ---- beside a checkpoint ----------------------------------------------------------------------------------------

    def agree_with(self, state: TrainerState | None, branches: bool) -> list[str]:
        """Compare with the checkpoint that the run goes on from (None: none), and restore; what is to be reported."""
        self._saved = state
        if self._ledger is None:
            return []
        notes = reconcile(self._ledger, state, branches)
        for group_id in [] if not notes else list(self.unfinished):
            found = self._ledger.group_record(group_id)
            if found is not None and found.state.rank == 2:
                del self.unfinished[group_id]
        return notes

    def with_excerpt(self, state: TrainerState) -> TrainerState:
        """The state with what its checkpoint is to know of the ledger, which must have been flushed."""
        before, self._saved = self._saved, state
        return with_excerpt(state, before, self._ledger) if self._ledger else state

    def made_steps(self, upto: int) -> list[int] | None:
        """The steps that recorded batches ended with, up to a step; None if it is not known."""
        if self._ledger is None:
            return None
        return [
            record.step + record.steps for record in self._ledger.batches_from(0) if record.steps and record.step < upto
        ]

    @property
    def begun_at(self) -> int | None:
        """The step that the ledger begins with; None if there is none."""
        if self._ledger is None:
            return None
        begun_from = self._ledger.identity().begun_from
        return begun_from[1] if begun_from else 0

    # ---- what is ----------------------------------------------------------------------------------------------

    def resumed(self, step: int | None) -> None:
        """The run goes on from a step; None: it begins."""
        if self._ledger and step is not None:
            self._ledger.resumed(step)

    def drawn(self, group_id: int, draw: Draw, size: int, version: int) -> None:
        """A task is to be rolled out."""
        if self._ledger:
            self._ledger.dispatched(group_id, draw.position, draw.task.id, draw.task.source, size, version)

    def completed(self, finished: FinishedGroup, step: int) -> None:
        """All episodes of a group are there; it waits to be trained, or was dropped."""
        if not self._ledger:
            return
        reason, state = finished.dropped_because, GroupState.COMPLETE
        if reason is not None:
            state = GroupState.FAILED if finished.failed == len(finished.episodes) else GroupState.FILTERED
        self._ledger.decided(
            finished.group_id, state, reason=reason, step=None if reason is None else step,
            failed=finished.failed, filtered=finished.filtered,
        )  # fmt: skip

    def stale(self, finished: FinishedGroup, step: int) -> None:
        """A whole group is thrown away for its age."""
        if self._ledger:
            reason = "older than trainer.max_staleness"
            self._ledger.decided(finished.group_id, GroupState.STALE, reason=reason, step=step, stale=finished.kept)

    def nothing_to_train(self, groups: Iterable[FinishedGroup], step: int) -> None:
        """Whole groups came to no update."""
        for finished in groups if self._ledger else ():
            assert self._ledger is not None
            self._ledger.decided(
                finished.group_id, GroupState.FILTERED, reason=_NOTHING_TO_TRAIN, step=step, filtered=finished.kept
            )

    async def training(
        self,
        step: int,
        version: int,
        pieces: Sequence[Sequence[FinishedGroup]],
        again: Sequence[FinishedGroup],
        trained: Sequence[TrainBatch] = (),
    ) -> None:
        """These groups are about to be trained, in these pieces and rows. Returns when a kill cannot undo that."""
        if not self._ledger:
            return
        fresh = [group.group_id for piece in pieces for group in piece]
        sizes = [len(piece) for piece in pieces]
        self._ledger.batch(step, version, fresh, [group.group_id for group in again], sizes, trained)
        self.decide_trained(step, [group for piece in pieces for group in piece])
        await self._ledger.written()  # synced with the checkpoint: a loss of power costs the steps after it

    async def flushed(self) -> None:
        """Returns when everything told so far is on the disk."""
        if self._ledger:
            await self._ledger.flushed()

    def decide_trained(self, step: int, groups: Iterable[FinishedGroup]) -> None:
        """These groups belong to the recorded batch of `step`."""
        for finished in groups:
            assert self._ledger is not None
            self._ledger.decided(finished.group_id, GroupState.TRAINED, step=step, trained=finished.kept)

    def trained(self, step: int, steps: int, publication: SyncedWeights) -> None:
        """So many optimizer steps were made on the batch of `step`, and the weights were published."""
        if self._ledger:
            self._ledger.committed(step, steps)
            self._ledger.published(publication.version, publication.fingerprint, step + steps)

    def evaluated(self, step: int, name: str, metrics: Mapping[str, float], episodes: Sequence[Episode]) -> None:
        """One set was evaluated."""
        if self._ledger:
            self._ledger.evaluated(step, name, dict(metrics), episodes)

    def saved(self, oldest_step: int, reusable: Iterable[int]) -> None:
        """Checkpoints from `oldest_step` on are on disk: what only earlier ones would need may go."""
        if self._ledger:
            self._ledger.prune(oldest_step, list(reusable))

    def close(self) -> None:
        """Write what is left."""
        if self._ledger:
            self._ledger.close()


def open_journal(run_dir: Path, config: RunConfig) -> RunJournal:
    """The journal of a run, in its folder."""
    return RunJournal(Ledger.open(run_dir, config.ledger) if config.ledger.enabled else None)


def in_pieces(groups: Sequence[FinishedGroup], sizes: Sequence[int]) -> Iterator[tuple[Sequence[FinishedGroup], bool]]:
    """The groups as they were learned from, and whether a piece is the last."""
    ends = list(accumulate(sizes or [len(groups)]))
    for start, end in pairwise([0, *ends]):
        yield groups[start:end], end == ends[-1]


class LedgerJournal:
    """Records of episodes in the ledger. Only groups that were under way at a crash have something in theirs."""

    def __init__(self, ledger: Ledger, unfinished: Mapping[int, UnfinishedGroup]) -> None:
        self._ledger = ledger
        self._unfinished = unfinished
        self.restarted = 0

    def open(self, group_id: int, rollout_idx: int, seed: int) -> EpisodeRecord:
        before = self._unfinished.get(group_id)
        attempt = before.running.get(rollout_idx) if before else None
        if attempt is None:
            self._ledger.started(group_id, rollout_idx, 0, seed)
            return LedgerRecord(self._ledger, group_id, rollout_idx, 0, seed)
        calls = {found.call: found for found in self._ledger.calls(group_id, rollout_idx, attempt)}
        results = {found.number: found for found in self._ledger.results(group_id, rollout_idx, attempt)}
        return LedgerRecord(self._ledger, group_id, rollout_idx, attempt, seed, calls, results)

    def restart(self, record: EpisodeRecord) -> EpisodeRecord:
        assert isinstance(record, LedgerRecord)
        self.restarted += 1
        attempt = record.attempt + 1
        self._ledger.started(record.group_id, record.rollout_idx, attempt, record.seed)
        return LedgerRecord(self._ledger, record.group_id, record.rollout_idx, attempt, record.seed)


class LedgerRecord:
    """One attempt at an episode: what it was told before the crash, and where what it is told now is written."""

    keeps = True

    def __init__(
        self,
        ledger: Ledger,
        group_id: int,
        rollout_idx: int,
        attempt: int,
        seed: int,
        calls: Mapping[int, CallRecord] | None = None,
        results: Mapping[int, ResultRecord] | None = None,
    ) -> None:
        self._ledger = ledger
        self.group_id = group_id
        self.rollout_idx = rollout_idx
        self.attempt = attempt
        self.seed = seed
        self.diverged = False
        self._calls = dict(calls or {})
        self._results = dict(results or {})
        self._began_s = time.monotonic()

    @property
    def unused(self) -> bool:
        return bool(self._calls or self._results)

    def recall_call(self, number: int, digest: str) -> ModelOutput | None:
        found = self._calls.pop(number, None)
        if found is None:
            return None
        self._require(found.request_digest == digest, f"model call {number}")
        return found.output

    def recall_result(self, number: int, digest: str) -> tuple[Any] | None:
        found = self._results.pop(number, None)
        if found is None:
            return None
        self._require(found.request_digest == digest, f"{found.kind} {found.name}")
        return (found.payload,)

    def called(self, output: ModelOutput, role: str, seed: int, digest: str, messages: Sequence[Message]) -> None:
        self._ledger.called(
            self.group_id, self.rollout_idx, self.attempt, output,
            role=role, seed=seed, request_digest=digest, messages=messages,
        )  # fmt: skip

    def resulted(self, number: int, kind: str, name: str, digest: str, payload: Any) -> None:
        self._ledger.resulted(
            self.group_id, self.rollout_idx, self.attempt, number,
            kind=kind, name=name, request_digest=digest, payload=payload,
        )  # fmt: skip

    def finished(self, episode: Episode) -> None:
        self._ledger.finished(episode, time.monotonic() - self._began_s)

    def _require(self, same: bool, what: str) -> None:
        if not same:
            self.diverged = True  # beside the exception, which a workflow may catch
            raise DivergedReplay(f"{what} is not what it was before the crash: the workflow is not deterministic")
