"""Recorder: turns events into rows. It belongs to the writer's thread, which also begins and ends the transactions."""

from __future__ import annotations

import os
import socket
import sqlite3
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.data.episode import Episode
from headrace.data.sample import LearnedShare, TrainBatch
from headrace.errors import LedgerError
from headrace.ledger.bodies import Base, pack_call, pack_episode, pack_prompt, unpack_prompt
from headrace.ledger.columns import stored_text, summary, unstorable
from headrace.ledger.pack import pack_value, seal, to_json, unseal
from headrace.ledger.pending import BODY, CALLED, EVALUATED, FINISHED, RESULTED, STARTED, PendingRows
from headrace.ledger.reader import LedgerReader
from headrace.ledger.records import CallRecord, EpisodeState, GroupState, ResultRecord
from headrace.ledger.restoring import ENDINGS, GROUP, Excerpt
from headrace.ledger.rows import pack_rows
from headrace.ledger.tokens import pack_tokens

Rollout = tuple[int, int, int]
"""Group id, rollout index, attempt."""


@dataclass(slots=True)
class _Attempt:
    """An episode in flight: its row, and its calls so far, which later prompts and the finished episode refer to."""

    episode_id: int
    calls: dict[int, CallRecord] = field(default_factory=dict)
    results: set[int] = field(default_factory=set)
    last_of_role: dict[str, Base] = field(default_factory=dict)

    def add(self, record: CallRecord) -> None:
        self.calls[record.call] = record
        self.last_of_role[record.role] = Base.of_call(record)


class Recorder:
    """One method per event. A repeated event, as a replay after a crash brings it, changes nothing."""

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self._connection = connection
        self._execute = connection.execute
        self._reader = LedgerReader(connection, path)
        self._pending = PendingRows(connection)
        (self._last_episode_id,) = self._execute("SELECT coalesce(max(episode_id), 0) FROM episodes").fetchone()
        self._fresh: dict[int, set[int]] = {}  # undecided groups of this process: their rollouts that have begun
        self._attempts: dict[Rollout, _Attempt] = {}
        self._prompts: dict[int, Base] = {}
        self._tasks: dict[int, tuple[Any, str]] = {}
        self._params: dict[str, int] = {}
        self._counted: Counter[tuple[str, str]] = Counter()
        self._process_id: int | None = None

    def before_commit(self) -> None:
        """Write what waits, and bring the counts up to date, in the transaction of what they count."""
        self._pending.write()
        rows = [(source, ending, count) for (source, ending), count in self._counted.items()]
        self._connection.executemany(
            "INSERT INTO counts VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET episodes = episodes + excluded.episodes",
            rows,
        )
        self._counted.clear()

    # ---- the process ----------------------------------------------------------------------------------------------

    def process_started(self, resumed_from: int | None) -> None:
        row = (time.time(), os.getpid(), socket.gethostname(), resumed_from)
        done = self._execute("INSERT INTO processes (started_at, pid, host, resumed_from) VALUES (?, ?, ?, ?)", row)
        self._process_id = done.lastrowid

    def process_resumed(self, step: int) -> None:
        self._execute("UPDATE processes SET resumed_from = ? WHERE process_id = ?", (step, self._process_id))

    def process_ended(self) -> None:
        self._execute("UPDATE processes SET ended_at = ? WHERE process_id = ?", (time.time(), self._process_id))

    # ---- rollouts -------------------------------------------------------------------------------------------------

    def dispatched(
        self, group_id: int, position: tuple[int, int], task_id: str, source: str, size: int, version: int
    ) -> None:
        row = (group_id, *position, stored_text(task_id), stored_text(source), size, version, GroupState.DISPATCHED)
        done = self._execute(
            "INSERT INTO groups (group_id, epoch, place, task_id, source, size, version, state) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING",
            row,
        )
        if done.rowcount:
            self._counted[stored_text(source), "dispatched"] += size
            self._fresh[group_id] = set()
            return
        recorded = self._execute(
            "SELECT epoch, place, task_id, source, size FROM groups WHERE group_id = ?", (group_id,)
        ).fetchone()
        if tuple(recorded) != row[1:6]:
            raise LedgerError(
                f"group {group_id} was dispatched as {tuple(recorded)} and now as {row[1:6]} (epoch, place, task, "
                "source, size); a resumed run must have the same tasks, seed and rollout.group_size"
            )

    def started(self, rollout: Rollout, seed: int) -> None:
        group_id, rollout_idx, attempt = rollout
        begun = self._fresh.get(group_id)
        if attempt == 0 and begun is not None and rollout_idx not in begun:
            begun.add(rollout_idx)
            self._last_episode_id += 1
            self._pending.add(STARTED, (self._last_episode_id, *rollout, EpisodeState.RUNNING, seed, time.time()))
            self._attempts[rollout] = _Attempt(self._last_episode_id)
            return
        is_new = self._insert_episode(rollout, seed)
        if is_new:
            self._attempts[rollout] = _Attempt(self._last_episode_id)
        if is_new and attempt:
            given_up = self._execute(
                "UPDATE episodes SET state = ? WHERE group_id = ? AND rollout_idx = ? AND attempt < ? AND state = ?",
                (EpisodeState.RESTARTED, group_id, rollout_idx, attempt, EpisodeState.RUNNING),
            )
            for earlier in range(attempt):
                self._attempts.pop((group_id, rollout_idx, earlier), None)
            self._counted[self._task(group_id)[1], "restarted"] += given_up.rowcount

    def called(self, rollout: Rollout, record: CallRecord) -> None:
        attempt, output = self._attempt(rollout), record.output
        if record.call in attempt.calls:
            raise _recorded_before(f"call {record.call}", rollout)
        base = attempt.last_of_role.get(record.role) or self._first_prompt(rollout[0], record)
        asked = (record.call, stored_text(record.role), record.seed, record.request_digest)
        sizes = (len(output.prompt_ids), len(output.completion_ids))
        ended = (stored_text(output.finish_reason), float(output.temperature))
        body = seal(pack_call(record, base), *asked, *ended)
        self._pending.add(CALLED, (attempt.episode_id, *asked, self._params_id(record.params), *sizes, *ended, body))
        attempt.add(record)

    def resulted(self, rollout: Rollout, result: ResultRecord) -> None:
        attempt = self._attempt(rollout)
        if result.number in attempt.results:
            raise _recorded_before(f"result {result.number}", rollout)
        attempt.results.add(result.number)
        row = (attempt.episode_id, result.number, result.kind, stored_text(result.name))
        self._pending.add(RESULTED, (*row, result.request_digest, result.payload))

    def finished(self, episode: Episode, duration_s: float | None) -> None:
        rollout = (episode.group_id, episode.rollout_idx, episode.attempt)
        attempt = self._attempt(rollout)
        state = EpisodeState.FAILED if episode.failed else EpisodeState.FINISHED
        self._pending.add(FINISHED, (attempt.episode_id, state, duration_s, time.time(), *summary(episode)))
        body = pack_episode(episode, attempt.calls, unstorable(episode, *self._task(episode.group_id)))
        self._pending.add(BODY, (attempt.episode_id, seal(body, *rollout, stored_text(episode.termination), state)))
        del self._attempts[rollout]

    # ---- decisions ------------------------------------------------------------------------------------------------

    def decided(
        self, group_id: int, state: GroupState, reason: str | None, step: int | None, settled: Mapping[str, int]
    ) -> None:
        found = self._execute("SELECT state, source FROM groups WHERE group_id = ?", (group_id,)).fetchone()
        if found is None:
            raise LedgerError(f"group {group_id} is {state}, but was never dispatched")
        before = GroupState(found[0])
        if state == before or state.rank < before.rank:
            return  # a replay: it is known
        if before.rank == state.rank:
            raise LedgerError(f"group {group_id} was {before} and cannot be {state}: an episode has one end")
        try:
            self._execute(
                "UPDATE groups SET state = ?, reason = coalesce(?, reason), step = coalesce(?, step, ?), "
                "trained = trained + ?, filtered = filtered + ?, failed = failed + ?, stale = stale + ? "
                "WHERE group_id = ?",
                (state, reason and stored_text(reason), step, self._steps_made(), *settled.values(), group_id),
            )
        except sqlite3.IntegrityError:
            raise _wrong_sum(group_id, state, settled, self._reader.group_record(group_id)) from None
        for ending, episodes in settled.items():
            self._counted[found[1], ending] += episodes
        if state.rank == 2:
            for held in (self._prompts, self._tasks, self._fresh):
                held.pop(group_id, None)

    def batch(
        self,
        step: int,
        version: int,
        group_ids: Sequence[int],
        again: Sequence[int],
        pieces: Sequence[int],
        trained: Sequence[TrainBatch],
    ) -> None:
        known = self._reader.batch_record(step)
        if known is not None:
            if (known.group_ids, known.again) != (tuple(group_ids), tuple(again)):
                raise LedgerError(
                    f"the batch of step {step + 1} was recorded with groups {known.group_ids} and {known.again} again, "
                    f"and is now made of {tuple(group_ids)} and {tuple(again)}; it is to be trained as it is"
                )
            return
        self._execute(
            "INSERT INTO batches (step, version, pieces, recorded_at) VALUES (?, ?, ?, ?)",
            (step, version, to_json(list(pieces)), time.time()),
        )
        members = [(group_id, 0) for group_id in group_ids] + [(group_id, 1) for group_id in again]
        self._connection.executemany(
            "INSERT INTO batch_groups VALUES (?, ?, ?, ?)", [(step, place, *one) for place, one in enumerate(members)]
        )
        self._connection.executemany(
            "UPDATE groups SET step = ? WHERE group_id = ?", [(step, group_id) for group_id, _ in members]
        )
        if trained:
            body = seal(pack_rows(trained), step, version, tuple(group_ids), tuple(again))
            self._execute("INSERT INTO batch_rows VALUES (?, ?)", (step, body))
            if all(one.learned is not None for one in trained):
                self._insert_tokens(step, 0, pack_tokens(trained))

    def learned(self, step: int, part: int, share: LearnedShare) -> None:
        self._insert_tokens(step, part, pack_tokens([share.batch], share.places))

    def _insert_tokens(self, step: int, part: int, body: bytes) -> None:
        """A step that is repeated stays as it was recorded at first."""
        row = (step, part, seal(body, step, part))
        self._execute("INSERT INTO batch_tokens VALUES (?, ?, ?) ON CONFLICT DO NOTHING", row)

    def committed(self, step: int, steps: int) -> None:
        done = self._execute(
            "UPDATE batches SET steps = ?, committed_at = coalesce(committed_at, ?) WHERE step = ?",
            (steps, time.time(), step),
        )
        if not done.rowcount:
            raise LedgerError(f"the batch of step {step + 1} is committed, but was never recorded")

    def published(self, version: int, digest: str, step: int) -> None:
        self._execute("INSERT OR REPLACE INTO publications VALUES (?, ?, ?, ?)", (version, digest, step, time.time()))

    def evaluated(self, step: int, name: str, metrics: Mapping[str, float], episodes: Sequence[Episode]) -> None:
        query = "SELECT evaluation_id FROM evaluations WHERE step = ? AND name = ?"
        old = self._execute(query, (step, name)).fetchone()
        if old is not None:  # made again after a crash
            self._pending.write()
            self._execute("DELETE FROM eval_episodes WHERE evaluation_id = ?", old)
            self._execute("DELETE FROM evaluations WHERE evaluation_id = ?", old)
        done = self._execute(
            "INSERT INTO evaluations (step, name, metrics, evaluated_at) VALUES (?, ?, ?, ?)",
            (step, name, stored_text(to_json(dict(metrics))), time.time()),
        )
        for episode in episodes:
            task_id, source = stored_text(episode.task_id), stored_text(episode.source)
            place = (episode.group_id, episode.rollout_idx, episode.attempt)
            body = pack_episode(episode, {}, unstorable(episode, task_id, source))
            body = seal(body, *place, stored_text(episode.termination), None)
            self._pending.add(EVALUATED, (done.lastrowid, task_id, source, *place, *summary(episode), body))

    # ---- what a checkpoint knows better -----------------------------------------------------------------------------

    def begun(self, theirs: str, step: int) -> None:
        self._execute("UPDATE identity SET begun_from = ?, begun_step = ?", (theirs, step))

    def restored(self, missing: Excerpt) -> None:
        """Rows of groups, batches and weight syncs. Messages of the groups stay lost, unless they are there."""
        for row in missing.groups:
            self._restore_group(row)
        for *batch, members in missing.batches:
            self._execute("INSERT OR REPLACE INTO batches VALUES (?, ?, ?, ?, ?, ?)", batch)
            self._execute("DELETE FROM batch_groups WHERE step = ?", (batch[0],))
            rows = [(batch[0], *member) for member in members]
            self._connection.executemany("INSERT INTO batch_groups VALUES (?, ?, ?, ?)", rows)
        self._connection.executemany("INSERT OR IGNORE INTO publications VALUES (?, ?, ?, ?)", missing.publications)

    def _restore_group(self, row: Sequence[Any]) -> None:
        group_id, source, size, pruned = row[0], row[4], row[5], row[-1]
        known = self._reader.group_record(group_id)
        if known is None:
            self._counted[source, "dispatched"] += size
        for ending, episodes in zip(ENDINGS, row[10:14], strict=True):
            self._counted[source, ending] += episodes - (getattr(known, ending) if known else 0)
        ((bodies,),) = self._execute(
            "SELECT count(*) FROM episodes JOIN bodies USING (episode_id) WHERE group_id = ?", (group_id,)
        ).fetchall()
        self._execute(
            f"INSERT OR REPLACE INTO groups ({GROUP}) VALUES ({', '.join('?' * len(row))})",
            (*row[:-1], pruned or int(bodies < size)),
        )

    # ---- retention ------------------------------------------------------------------------------------------------

    def prune(self, before_step: int, keep_steps: int, keep: Collection[int]) -> None:
        """Delete the messages of groups that ended, or were last trained, before the step and too long ago."""
        self._pending.write()
        limit = min(before_step, self._steps_made() - keep_steps)
        found = self._execute(
            "SELECT group_id FROM groups "
            "WHERE pruned = 0 AND state IN ('trained', 'filtered', 'failed', 'stale') AND step < ?",
            (limit,),
        ).fetchall()
        groups = [row for row in found if row[0] not in keep]
        for table in ("calls", "results", "bodies"):
            self._connection.executemany(
                f"DELETE FROM {table} WHERE episode_id IN (SELECT episode_id FROM episodes WHERE group_id = ?)", groups
            )
        self._connection.executemany("DELETE FROM prompts WHERE group_id = ?", groups)
        for table in ("batch_rows", "batch_tokens"):
            self._execute(f"DELETE FROM {table} WHERE step < ?", (limit,))
        self._connection.executemany("UPDATE groups SET pruned = 1 WHERE group_id = ?", groups)

    # ---- what is looked up ----------------------------------------------------------------------------------------

    def _attempt(self, rollout: Rollout) -> _Attempt:
        """The episode in flight; one that an earlier process began is read back."""
        if rollout not in self._attempts:
            self._insert_episode(rollout, None)
            self._fresh.get(rollout[0], set()).add(rollout[1])
            (episode_id,) = self._execute(
                "SELECT episode_id FROM episodes WHERE group_id = ? AND rollout_idx = ? AND attempt = ?", rollout
            ).fetchone()
            self._attempts[rollout] = attempt = _Attempt(episode_id)
            for record in self._reader.calls(*rollout):
                attempt.add(record)
            numbers = self._execute("SELECT number FROM results WHERE episode_id = ?", (episode_id,))
            attempt.results.update(number for (number,) in numbers)
        return self._attempts[rollout]

    def _insert_episode(self, rollout: Rollout, seed: int | None) -> bool:
        """Begin an episode that may be there already; whether it was not."""
        self._pending.write()
        done = self._execute(
            "INSERT INTO episodes (episode_id, group_id, rollout_idx, attempt, state, seed, started_at) "
            "VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING",
            (self._last_episode_id + 1, *rollout, EpisodeState.RUNNING, seed, time.time()),
        )
        self._last_episode_id += done.rowcount
        return bool(done.rowcount)

    def _first_prompt(self, group_id: int, record: CallRecord) -> Base:
        """The prompt that the group's rollouts have in common, which is stored once: it is that of its first call."""
        if group_id not in self._prompts:
            stored = self._execute("SELECT body FROM prompts WHERE group_id = ?", (group_id,)).fetchone()
            body = unseal(stored[0], group_id) if stored else pack_prompt(record.output.prompt_ids, record.messages)
            if stored is None:
                self._execute("INSERT INTO prompts VALUES (?, ?)", (group_id, seal(body, group_id)))
            self._prompts[group_id] = unpack_prompt(body)
        return self._prompts[group_id]

    def _params_id(self, params: Mapping[str, Any]) -> int:
        key = repr(params)  # faster than JSON, and few runs have many
        if key not in self._params:
            text = stored_text(to_json(params))
            self._execute("INSERT INTO params (params) VALUES (?) ON CONFLICT DO NOTHING", (text,))
            found = self._execute("SELECT params_id FROM params WHERE params = ?", (text,)).fetchone()
            self._params[key] = found[0]
        return self._params[key]

    def _task(self, group_id: int) -> tuple[Any, str]:
        """Task id and source, as they are stored."""
        if group_id not in self._tasks:
            found = self._execute("SELECT task_id, source FROM groups WHERE group_id = ?", (group_id,)).fetchone()
            if found is None:
                raise LedgerError(f"an episode of group {group_id} was recorded, but the group was never dispatched")
            self._tasks[group_id] = found
        return self._tasks[group_id]

    def _steps_made(self) -> int:
        """How many optimizer steps were made, as far as it is recorded."""
        found = self._execute("SELECT step + coalesce(steps, 0) FROM batches ORDER BY step DESC LIMIT 1").fetchone()
        return found[0] if found else 0


def packed_result(number: int, kind: str, name: str, request_digest: str, payload: Any) -> ResultRecord:
    """A result as it is stored: packed at once, as the workflow may change what it got."""
    sealed = seal(pack_value(payload), number, kind, stored_text(name), request_digest)
    return ResultRecord(number, kind, name, request_digest, sealed)


def _recorded_before(what: str, rollout: Rollout) -> LedgerError:
    group_id, rollout_idx, attempt = rollout
    return LedgerError(
        f"{what} of group {group_id}, rollout {rollout_idx}, attempt {attempt} was recorded before; an episode that is "
        "started afresh needs a new attempt"
    )


def _wrong_sum(group_id: int, state: GroupState, settled: Mapping[str, int], known: Any) -> LedgerError:
    return LedgerError(
        f"group {group_id} becomes {state} with {dict(settled)}, which does not add up: "
        f"it has {known.size} episodes, of which {known.pending} had no end yet"
    )
