"""Ledger: what the run hands over to be recorded."""

from __future__ import annotations

import asyncio
import copy
import sqlite3
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from headrace.config import LedgerSection
from headrace.data.episode import Episode, ModelOutput, OwnedMessages
from headrace.data.sample import LearnedShare, TrainBatch
from headrace.data.task import Message
from headrace.ledger.files import connect_reader, connect_writer, explaining, ledger_file, lock_for_writing
from headrace.ledger.reader import LedgerReader
from headrace.ledger.recorder import Recorder, packed_result
from headrace.ledger.records import CallRecord, GroupState
from headrace.ledger.restoring import Excerpt
from headrace.ledger.writer import Writer
from headrace.utils.file_lock import FileLock

_DEFAULT = LedgerSection()


class Ledger(LedgerReader):
    """The ledger of a running run: one writer per file. Also answers what a LedgerReader does.

    Methods that record return at once and touch no disk; their events are committed in order a moment later. What is
    read includes everything recorded before. When writing fails, the next call raises a LedgerError.
    """

    def __init__(self, path: Path, lock: FileLock, writing: sqlite3.Connection, section: LedgerSection) -> None:
        super().__init__(connect_reader(path), path)
        self._lock = lock
        self._section = section
        self._writer = Writer(writing, path)

    @classmethod
    def open(cls, place: Path, section: LedgerSection = _DEFAULT, resumed_from: int | None = None) -> Ledger:
        """Create or resume the ledger of a run folder, and record this process."""
        path = ledger_file(place)
        with explaining(path, "open"):
            lock = lock_for_writing(path)
        try:
            ledger = cls(path, lock, connect_writer(path), section)
        except BaseException:
            lock.release()
            raise
        try:
            ledger._writer.put(Recorder.process_started, resumed_from)
            ledger._writer.wait(sync=False)  # a full disk is reported now, not in the middle of the first step
        except BaseException:
            ledger.close()
            raise
        return ledger

    def close(self) -> None:
        """Record the end of this process, write what is left and let go of the file."""
        try:
            super().close()  # first: the last connection folds the log into the file
            if self._writer.open:
                self._writer.put(Recorder.process_ended)
            self._writer.close()
        finally:
            self._lock.release()

    def flush(self) -> None:
        """Wait until everything recorded so far is on the disk: it survives a loss of power."""
        self._writer.wait(sync=True)

    async def flushed(self) -> None:
        """`flush` for an event loop."""
        await asyncio.to_thread(self.flush)

    async def written(self) -> None:
        """Wait until everything recorded so far survives the end of this process, if not a loss of power."""
        await asyncio.to_thread(self._writer.wait, sync=False)

    def rows(self, query: str, values: Iterable[Any] = ()) -> list[tuple[Any, ...]]:
        self._writer.wait(sync=False)
        return super().rows(query, values)

    # ---- rollouts -------------------------------------------------------------------------------------------------

    def resumed(self, step: int) -> None:
        """This process resumes from the checkpoint of a step."""
        self._writer.put(Recorder.process_resumed, step)

    def dispatched(
        self, group_id: int, position: tuple[int, int], task_id: str, source: str, size: int, version: int
    ) -> None:
        """A group of `size` rollouts of the task at a position of the sampler's stream starts under a version."""
        self._writer.put(Recorder.dispatched, group_id, position, task_id, source, size, version)

    def started(self, group_id: int, rollout_idx: int, attempt: int, seed: int) -> None:
        """An episode starts, or resumes after a crash. A new attempt gives up the one before."""
        self._writer.put(Recorder.started, (group_id, rollout_idx, attempt), seed)

    def called(
        self,
        group_id: int,
        rollout_idx: int,
        attempt: int,
        output: ModelOutput,
        *,
        role: str,
        seed: int,
        request_digest: str,
        messages: Sequence[Message],
        params: Mapping[str, Any] | None = None,
    ) -> None:
        """A model call was answered. `output.call` is its number; each is recorded once per attempt."""
        owned = messages if isinstance(messages, OwnedMessages) else OwnedMessages.copy_of(messages)
        if output.tool_calls:  # the workflow has them too, and may change them
            output = replace(output, tool_calls=copy.deepcopy(output.tool_calls))
        record = CallRecord(output, role, seed, request_digest, owned, dict(params or {}))
        self._writer.put(Recorder.called, (group_id, rollout_idx, attempt), record)

    def resulted(
        self,
        group_id: int,
        rollout_idx: int,
        attempt: int,
        number: int,
        *,
        kind: str,
        name: str,
        request_digest: str,
        payload: Any,
    ) -> None:
        """A tool or a judger (`kind`) answered. `number` orders the answers of the attempt; each is recorded once."""
        result = packed_result(number, kind, name, request_digest, payload)
        self._writer.put(Recorder.resulted, (group_id, rollout_idx, attempt), result)

    def finished(self, episode: Episode, duration_s: float | None = None) -> None:
        """An episode ended, judged or failed; `episode.attempt` says which attempt it was."""
        self._writer.put(Recorder.finished, episode, duration_s)

    # ---- decisions ------------------------------------------------------------------------------------------------

    def decided(
        self,
        group_id: int,
        state: GroupState | str,
        *,
        reason: str | None = None,
        step: int | None = None,
        trained: int = 0,
        filtered: int = 0,
        failed: int = 0,
        stale: int = 0,
    ) -> None:
        """A group is complete ("whole" on disk), or has its end; so many of its episodes found theirs with it.

        The numbers are those of `SyncCoordinator.settled`, and with an end they add up to the group's size. A state
        that the group has reached before changes nothing, so a replay may repeat it.
        """
        settled = {"trained": trained, "filtered": filtered, "failed": failed, "stale": stale}
        self._writer.put(Recorder.decided, group_id, GroupState(state), reason, step, settled)

    def batch(
        self,
        step: int,
        version: int,
        group_ids: Sequence[int],
        again: Sequence[int] = (),
        pieces: Sequence[int] = (),
        trained: Sequence[TrainBatch] = (),
    ) -> None:
        """A batch is about to be trained after `step` optimizer steps. `again` are groups trained before.

        `pieces` says how many groups were learned from at a time; empty: all at once. `trained` are the rows that
        were made of the groups, with their advantages and, once it is known, what the learner computed of their
        tokens.
        """
        batch = (step, version, tuple(group_ids), tuple(again), tuple(pieces), tuple(trained))
        self._writer.put(Recorder.batch, *batch)

    def learned(self, step: int, part: int, share: LearnedShare) -> None:
        """What the learner computed of rows of the batch of `step`, for the update number `part` on it."""
        self._writer.put(Recorder.learned, step, part, share)

    def committed(self, step: int, steps: int) -> None:
        """So many optimizer steps were made on the batch of `step`."""
        self._writer.put(Recorder.committed, step, steps)

    def published(self, version: int, digest: str, step: int) -> None:
        """The engine has the weights of a version, made by `step` optimizer steps."""
        self._writer.put(Recorder.published, version, digest, step)

    def evaluated(self, step: int, name: str, metrics: Mapping[str, float], episodes: Iterable[Episode] = ()) -> None:
        """A set was evaluated. Its episodes are no part of the account; an evaluation made again replaces the first."""
        self._writer.put(Recorder.evaluated, step, name, dict(metrics), tuple(episodes))

    def begun(self, theirs: str, step: int) -> None:
        """This ledger begins with the checkpoint of a step, which names another ledger (or none: "")."""
        self._writer.put(Recorder.begun, theirs, step)

    def restore(self, missing: Excerpt) -> None:
        """Add what a checkpoint has and this does not; returns when it is on the disk."""
        self._writer.put(Recorder.restored, missing)
        self.flush()

    def prune(self, before_step: int, keep: Collection[int] = ()) -> None:
        """Apply `ledger.keep_steps`. A run may be resumed from `before_step`: batches from there on stay whole.

        `keep` are groups that may be trained again, which stay too. So does everything that has no decision.
        """
        if self._section.keep_steps:
            self._writer.put(Recorder.prune, before_step, self._section.keep_steps, frozenset(keep))
