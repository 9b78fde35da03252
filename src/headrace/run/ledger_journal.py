"""LedgerJournal: a run's journal in its ledger."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.config import RunConfig
from headrace.data.episode import Episode, ModelOutput
from headrace.data.sample import LearnedShare, TrainBatch
from headrace.data.sampler import Draw, Position
from headrace.data.task import Message
from headrace.ledger import Account, GroupState, Ledger
from headrace.ledger.episode_record import AttemptRecord, DivergedReplay
from headrace.ledger.files import damaged
from headrace.ledger.records import BatchRecord, CallRecord, GroupRecord, ResultRecord, UnfinishedGroup
from headrace.run.agreement import reconcile, with_excerpt
from headrace.run.checkpoint import TrainerState
from headrace.run.journal import RunJournal

if TYPE_CHECKING:
    from headrace.scheduling.buffer import FinishedGroup
    from headrace.weights.base import SyncedWeights

_NOTHING_TO_TRAIN = "the batch held nothing to train"


def open_journal(run_dir: Path, config: RunConfig) -> RunJournal:
    """The journal of a run, in its folder."""
    return LedgerJournal(Ledger.open(run_dir, config.ledger)) if config.ledger.enabled else RunJournal()


class LedgerJournal(RunJournal):
    """Records in a ledger, and finds what an earlier process recorded."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._unfinished = {found.group.group_id: found for found in ledger.unfinished()}
        self._evaluations = {(found.step, found.name): found.metrics for found in ledger.evaluations()}
        self._saved: TrainerState | None = None
        self._restarted = ledger.restarted()

    # ---- what was recorded ----------------------------------------------------------------------------------------

    @property
    def resumes(self) -> bool:
        return len(self._ledger.processes()) > 1

    @property
    def restarted(self) -> int:
        return self._restarted

    def account(self) -> Account:
        return self._ledger.account()

    def next_position(self) -> Position | None:
        last = self._ledger.last_position()
        return None if last is None else (last[0], last[1] + 1)

    def next_group_id(self) -> int:
        last = self._ledger.last_group_id()
        return 0 if last is None else last + 1

    def knows(self, group_id: int) -> bool:
        return self._ledger.group_record(group_id) is not None

    def position_of(self, group_id: int) -> Position:
        found = self._ledger.group_record(group_id)
        return found.position if found else super().position_of(group_id)

    def filtered_among(self, group_ids: Iterable[int]) -> Iterator[tuple[int, GroupRecord]]:
        for group_id in group_ids:
            found = self._ledger.group_record(group_id)
            if found is None or found.state != GroupState.FILTERED or found.step is None or found.pruned:
                continue
            yield self._version_at(found.step) if found.reason == _NOTHING_TO_TRAIN else found.step, found

    def _version_at(self, step: int) -> int:
        """The version that the batch after `step` optimizer steps was, or is to be, trained at."""
        following, last = self._ledger.batches_from(step), self._ledger.last_batch()
        if following:
            return following[0].version
        return last.version + 1 if last else 0

    def batch_begun_at(self) -> Position | None:
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
        return self._ledger.batches_from(step)

    def under_way(self, recorded: Iterable[BatchRecord]) -> list[UnfinishedGroup]:
        taken = {group_id for record in recorded for group_id in record.group_ids}
        return [self._unfinished[group_id] for group_id in sorted(self._unfinished.keys() - taken)]

    def episodes_of(self, group_id: int) -> list[Episode]:
        return self._ledger.complete_group(group_id)

    def weight_digest(self, version: int) -> str | None:
        found = self._ledger.weight_sync(version)
        return None if found is None else found.digest

    def evaluation(self, step: int, names: Iterable[str]) -> dict[str, dict[str, float]] | None:
        found = {name: self._evaluations.get((step, name)) for name in names}
        return None if None in found.values() else {name: dict(metrics or {}) for name, metrics in found.items()}

    # ---- beside a checkpoint --------------------------------------------------------------------------------------

    def agree_with(self, state: TrainerState | None, branches: bool) -> list[str]:
        self._saved = state
        notes = reconcile(self._ledger, state, branches)
        for group_id in list(self._unfinished) if notes else ():
            found = self._ledger.group_record(group_id)
            if found is not None and found.state.rank == 2:
                del self._unfinished[group_id]
        return notes

    def with_excerpt(self, state: TrainerState) -> TrainerState:
        before, self._saved = self._saved, state
        return with_excerpt(state, before, self._ledger)

    def made_steps(self, upto: int) -> list[int] | None:
        batches = self._ledger.batches_from(0)
        return [record.step + record.steps for record in batches if record.steps and record.step < upto]

    @property
    def begins_at(self) -> int | None:
        begun_from = self._ledger.identity().begun_from
        return begun_from[1] if begun_from else 0

    # ---- what happens ---------------------------------------------------------------------------------------------

    def resumed(self, step: int | None) -> None:
        if step is not None:
            self._ledger.resumed(step)

    def open(self, group_id: int, rollout_idx: int, seed: int) -> AttemptRecord:
        before = self._unfinished.get(group_id)
        attempt = before.running.get(rollout_idx) if before else None
        if attempt is None:
            self._ledger.started(group_id, rollout_idx, 0, seed)
            return LedgerRecord(self._ledger, group_id, rollout_idx, 0, seed)
        calls = {found.call: found for found in self._ledger.calls(group_id, rollout_idx, attempt)}
        results = {found.number: found for found in self._ledger.results(group_id, rollout_idx, attempt)}
        return LedgerRecord(self._ledger, group_id, rollout_idx, attempt, seed, calls, results)

    def restart(self, record: AttemptRecord) -> AttemptRecord:
        assert isinstance(record, LedgerRecord)
        self._restarted += 1
        attempt = record.attempt + 1
        self._ledger.started(record.group_id, record.rollout_idx, attempt, record.seed)
        return LedgerRecord(self._ledger, record.group_id, record.rollout_idx, attempt, record.seed)

    def drawn(self, group_id: int, draw: Draw, size: int, version: int) -> None:
        self._ledger.dispatched(group_id, draw.position, draw.task.id, draw.task.source, size, version)

    def completed(self, finished: FinishedGroup, step: int) -> None:
        reason, state = finished.dropped_because, GroupState.COMPLETE
        if reason is not None:
            state = GroupState.FAILED if finished.failed == len(finished.episodes) else GroupState.FILTERED
        self._ledger.decided(
            finished.group_id, state, reason=reason, step=None if reason is None else step,
            failed=finished.failed, filtered=finished.filtered,
        )  # fmt: skip

    def stale(self, finished: FinishedGroup, step: int) -> None:
        reason = "older than trainer.max_staleness"
        self._ledger.decided(finished.group_id, GroupState.STALE, reason=reason, step=step, stale=finished.kept)

    def nothing_to_train(self, groups: Iterable[FinishedGroup], step: int) -> None:
        for finished in groups:
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
        fresh = [group for piece in pieces for group in piece]
        ids, old = ([group.group_id for group in groups] for groups in (fresh, again))
        self._ledger.batch(step, version, ids, old, [len(piece) for piece in pieces], trained)
        for finished in fresh:
            self._ledger.decided(finished.group_id, GroupState.TRAINED, step=step, trained=finished.kept)
        await self._ledger.written()  # synced with the checkpoint: a loss of power costs the steps after it

    def learned(self, step: int, shares: Sequence[LearnedShare]) -> None:
        for part, share in enumerate(shares):
            self._ledger.learned(step, part, share)

    def decide_trained(self, step: int, groups: Iterable[FinishedGroup]) -> None:
        for finished in groups:  # known mostly: a kill cuts off at most the decisions on the last batch
            found = self._ledger.group_record(finished.group_id)
            if found is not None and found.state == GroupState.TRAINED and found.trained != finished.kept:
                trained = f"{found.trained} episodes of group {finished.group_id} were trained"
                raise damaged(self._ledger.path, f"{trained}, and its episodes make {finished.kept}")
            self._ledger.decided(finished.group_id, GroupState.TRAINED, step=step, trained=finished.kept)

    def trained(self, step: int, steps: int, synced: SyncedWeights) -> None:
        self._ledger.committed(step, steps)
        self._ledger.published(synced.version, synced.digest, step + steps)

    def evaluated(self, step: int, name: str, metrics: Mapping[str, float], episodes: Sequence[Episode]) -> None:
        self._ledger.evaluated(step, name, dict(metrics), episodes)

    async def flushed(self) -> None:
        await self._ledger.flushed()

    def saved(self, oldest_step: int, reusable: Iterable[int]) -> None:
        self._ledger.prune(oldest_step, list(reusable))

    def close(self) -> None:
        self._ledger.close()


def in_pieces(groups: Sequence[FinishedGroup], sizes: Sequence[int]) -> Iterator[tuple[Sequence[FinishedGroup], bool]]:
    """The groups as they were learned from, and whether a piece is the last."""
    ends = list(accumulate(sizes or [len(groups)]))
    for start, end in pairwise([0, *ends]):
        yield groups[start:end], end == ends[-1]


class LedgerRecord(AttemptRecord):
    """One attempt at an episode: the answers that it got before the crash, and where new ones are written."""

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
