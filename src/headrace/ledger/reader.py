"""LedgerReader: what a ledger knows. Reads while another process writes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headrace.data.episode import Episode
from headrace.errors import LedgerError
from headrace.ledger.batch_reader import BatchReader, Row
from headrace.ledger.bodies import FIRST_PROMPT, Base, unpack_call, unpack_episode, unpack_prompt
from headrace.ledger.columns import SUMMARY, episode_fields
from headrace.ledger.files import connect_reader, damaged, ledger_file
from headrace.ledger.pack import DamagedRecordError, from_json, unpack_value, unseal
from headrace.ledger.records import (
    Account,
    CallRecord,
    EpisodeRecord,
    EpisodeState,
    GroupRecord,
    GroupState,
    IdentityRecord,
    ProcessRecord,
    ResultRecord,
    UnfinishedGroup,
)
from headrace.ledger.restoring import GROUP

_SUMMARY = ", ".join(f"e.{name}" for name in SUMMARY)
_TRAIN_EPISODE = (
    f"e.episode_id, b.body, g.task_id, g.source, e.group_id, e.rollout_idx, e.attempt, {_SUMMARY}, "
    "e.state, e.duration_s, g.state, g.reason, g.step"
)
_EVAL_EPISODE = (
    f"e.eval_episode_id, e.body, e.task_id, e.source, e.group_id, e.rollout_idx, e.attempt, {_SUMMARY}, "
    "NULL, NULL, v.name, NULL, v.step"
)
_TRAIN_FROM = "episodes e JOIN groups g USING (group_id) LEFT JOIN bodies b USING (episode_id)"
_EVAL_FROM = "eval_episodes e JOIN evaluations v USING (evaluation_id)"
_PAGE = 200  # episodes read at once: a reader that stays within one read keeps the writer's log from being emptied


class LedgerReader(BatchReader):
    """Answers from what was committed when it is asked."""

    @classmethod
    def read(cls, place: Path) -> LedgerReader:
        """Open a run folder's ledger, or the file itself, for reading. Of a subclass, too: a reader, no writer."""
        path = ledger_file(place)
        return LedgerReader(connect_reader(path), path)

    # ---- the account ----------------------------------------------------------------------------------------------

    def account(self) -> Account:
        """Where every dispatched episode is."""
        rows = self.rows("SELECT ending, sum(episodes) FROM counts GROUP BY ending")
        return _account(dict(rows))

    def accounts(self) -> dict[str, Account]:
        """The same by source."""
        found: dict[str, dict[str, int]] = {}
        for source, ending, episodes in self.rows("SELECT source, ending, episodes FROM counts"):
            found.setdefault(source, {})[ending] = episodes
        return {source: _account(counts) for source, counts in sorted(found.items())}

    def restarted(self) -> int:
        """Attempts at episodes that were given up for another."""
        return (self._row("SELECT coalesce(sum(episodes), 0) FROM counts WHERE ending = 'restarted'") or (0,))[0]

    def size_bytes(self) -> int:
        """The size of the file, without the writer's log."""
        pages = self.rows("SELECT page_count * page_size FROM pragma_page_count(), pragma_page_size()")
        return int(pages[0][0])

    def processes(self) -> list[ProcessRecord]:
        """Every start of the run, in order."""
        query = "SELECT started_at, pid, host, resumed_from, ended_at FROM processes ORDER BY process_id"
        return [ProcessRecord(*row) for row in self.rows(query)]

    def identity(self) -> IdentityRecord:
        """Which ledger it is."""
        ((ledger_id, theirs, step),) = self.rows("SELECT ledger_id, begun_from, begun_step FROM identity")
        return IdentityRecord(ledger_id, None if step is None else (theirs, step))

    # ---- groups ---------------------------------------------------------------------------------------------------

    def group_record(self, group_id: int) -> GroupRecord | None:
        """What is known of a group; None if it was never dispatched."""
        row = self._row(f"SELECT {GROUP} FROM groups WHERE group_id = ?", (group_id,))
        return None if row is None else self._group(row)

    def unfinished(self) -> list[UnfinishedGroup]:
        """Groups that were dispatched and not decided, in the order of their dispatch."""
        query = f"SELECT {GROUP} FROM groups WHERE state IN ('dispatched', 'whole') ORDER BY group_id"
        return [self._unfinished(self._group(row)) for row in self.rows(query)]

    def _group(self, row: Row) -> GroupRecord:
        with self._decoding(f"group {row[0]}"):
            return _group(row)

    def _unfinished(self, group: GroupRecord) -> UnfinishedGroup:
        rows = self.rows(
            "SELECT rollout_idx, max(attempt) FROM episodes WHERE group_id = ? AND state = 'running' "
            "GROUP BY rollout_idx",
            (group.group_id,),
        )
        episodes = {episode.rollout_idx: episode for episode in self.group(group.group_id)}
        running = {rollout: attempt for rollout, attempt in rows if rollout not in episodes}
        return UnfinishedGroup(group, episodes, running)

    def group(self, group_id: int) -> list[Episode]:
        """The finished episodes of a group, by rollout: of several attempts, the last."""
        rows = self.rows(
            f"SELECT {_TRAIN_EPISODE} FROM {_TRAIN_FROM} WHERE e.group_id = ? AND e.state IN ('finished', 'failed') "
            "ORDER BY e.rollout_idx, e.attempt",
            (group_id,),
        )
        records = [self._train_record(row) for row in rows]
        if any(record.pruned for record in records):
            raise LedgerError(
                f"the messages of group {group_id} are no longer in {self.path}; raise ledger.keep_steps to keep more, "
                f"and put a copy back if it was lost"
            )
        return list({record.episode.rollout_idx: record.episode for record in records}.values())

    def complete_group(self, group_id: int) -> list[Episode]:
        """All episodes of a group."""
        episodes, record = self.group(group_id), self.group_record(group_id)
        if record is None or len(episodes) < record.size:
            size = record.size if record else "unknown"
            raise damaged(self.path, f"it has {len(episodes)} of the {size} episodes of group {group_id}")
        return episodes

    def last_position(self) -> tuple[int, int] | None:
        """The furthest place in the stream of tasks (epoch, place) that was dispatched."""
        return self._row("SELECT epoch, place FROM groups ORDER BY epoch DESC, place DESC LIMIT 1")

    def last_group_id(self) -> int | None:
        """The largest id of a group."""
        return (self._row("SELECT max(group_id) FROM groups") or (None,))[0]

    # ---- calls and results ----------------------------------------------------------------------------------------

    def calls(self, group_id: int, rollout_idx: int, attempt: int = 0) -> list[CallRecord]:
        """The model calls of one attempt that were answered, in the order in which they began."""
        return sorted(self._calls(group_id, self._episode_id(group_id, rollout_idx, attempt)), key=lambda r: r.call)

    def results(self, group_id: int, rollout_idx: int, attempt: int = 0) -> list[ResultRecord]:
        """What tools and judgers answered to one attempt, by number."""
        rows = self.rows(
            "SELECT number, kind, name, request_digest, payload FROM results WHERE episode_id = ? ORDER BY number",
            (self._episode_id(group_id, rollout_idx, attempt),),
        )
        with self._decoding(f"tool and judger results of group {group_id}, rollout {rollout_idx}"):
            return [
                ResultRecord(number, kind, name, asked, unpack_value(unseal(payload, number, kind, name, asked)))
                for number, kind, name, asked, payload in rows
            ]

    def _episode_id(self, *rollout: int) -> int | None:
        query = "SELECT episode_id FROM episodes WHERE group_id = ? AND rollout_idx = ? AND attempt = ?"
        return (self._row(query, rollout) or (None,))[0]

    def _calls(self, group_id: int, episode_id: int | None) -> list[CallRecord]:
        """In the order in which they were recorded, so that each comes after the one that it refers to."""
        rows = self.rows(
            "SELECT call, role, seed, request_digest, params, finish_reason, temperature, body "
            "FROM calls JOIN params USING (params_id) WHERE episode_id = ? ORDER BY call_id",
            (episode_id,),
        )
        known: dict[int, Base] = {}

        def base_of(number: int) -> Base:
            if number == FIRST_PROMPT and number not in known:
                found = self._row("SELECT body FROM prompts WHERE group_id = ?", (group_id,))
                if found is None:
                    raise DamagedRecordError("the first prompt is missing")
                known[number] = unpack_prompt(unseal(found[0], group_id))
            return known[number]

        records = []
        for call, role, seed, asked, params, finish_reason, temperature, body in rows:
            with self._decoding(f"model call {call} of group {group_id}"):
                plain = unseal(body, call, role, seed, asked, finish_reason, temperature)
                output, messages = unpack_call(plain, base_of, call, finish_reason, temperature)
                record = CallRecord(output, role, seed, asked, messages, from_json(params))
            known[record.call] = Base.of_call(record)
            records.append(record)
        return records

    # ---- episodes -------------------------------------------------------------------------------------------------

    def episodes(
        self, kind: str = "train", first_step: int = 0, end_step: int | None = None
    ) -> Iterator[EpisodeRecord]:
        """Finished episodes in the order of their start; with bounds, those decided (or evaluated) at such steps."""
        train = kind == "train"
        key, columns, tables = (
            ("e.episode_id", _TRAIN_EPISODE, _TRAIN_FROM) if train else ("e.eval_episode_id", _EVAL_EPISODE, _EVAL_FROM)
        )
        step = "g.step" if train else "v.step"
        condition = "AND e.state IN ('finished', 'failed') " if train else ""
        bounds: list[int] = []
        if first_step or end_step is not None:
            condition += f"AND {step} >= ? AND {step} < ? "
            bounds = [first_step, 2**62 if end_step is None else end_step]
        last = 0
        while True:
            query = f"SELECT {columns} FROM {tables} WHERE {key} > ? {condition}ORDER BY {key} LIMIT {_PAGE}"
            rows = self.rows(query, (last, *bounds))
            yield from (self._train_record(row) if train else self._record(row, "eval", {}) for row in rows)
            if len(rows) < _PAGE:
                return
            last = rows[-1][0]

    def episode_record(self, group_id: int, rollout_idx: int, attempt: int | None = None) -> EpisodeRecord | None:
        """One finished episode: of the attempt, or the last that finished. None if there is none."""
        condition, values = ("AND e.attempt = ? ", (attempt,)) if attempt is not None else ("", ())
        row = self._row(
            f"SELECT {_TRAIN_EPISODE} FROM {_TRAIN_FROM} WHERE e.group_id = ? AND e.rollout_idx = ? {condition}"
            "AND e.state IN ('finished', 'failed') ORDER BY e.attempt DESC LIMIT 1",
            (group_id, rollout_idx, *values),
        )
        return None if row is None else self._train_record(row)

    def eval_episode_record(self, eval_episode_id: int) -> EpisodeRecord | None:
        """One episode of an evaluation, by its number in the table."""
        query = f"SELECT {_EVAL_EPISODE} FROM {_EVAL_FROM} WHERE e.eval_episode_id = ?"
        row = self._row(query, (eval_episode_id,))
        return None if row is None else self._record(row, "eval", {})

    def _train_record(self, row: Row) -> EpisodeRecord:
        calls = self._calls(row[4], row[0]) if row[1] is not None else []
        return self._record(row, "train", {record.call: record for record in calls})

    def _record(self, row: Row, kind: str, calls: dict[int, CallRecord]) -> EpisodeRecord:
        with self._decoding(f"the episode of group {row[4]}, rollout {row[5]}"):
            return _record(row, kind, calls)


def _record(row: Row, kind: str, calls: dict[int, CallRecord]) -> EpisodeRecord:
    body, task_id, source, *place = row[1:7]
    summary: dict[str, Any] = dict(zip(SUMMARY, row[7:], strict=False))
    state, duration_s, decision, reason, step = row[7 + len(SUMMARY) :]
    identity = dict(zip(("group_id", "rollout_idx", "attempt"), place, strict=True))
    columns = {"task_id": task_id, "source": source, **identity, **episode_fields(summary)}
    body = body if body is None else unseal(body, *place, summary["termination"], state)
    return EpisodeRecord(
        kind,
        Episode(**columns) if body is None else unpack_episode(body, columns, calls),
        summary["reward"],
        "failed" if state == EpisodeState.FAILED else decision,
        reason,
        step,
        summary["oldest_version"],
        summary["newest_version"],
        summary["generated_tokens"],
        duration_s,
        pruned=body is None,
    )


def _group(row: Row) -> GroupRecord:
    group_id, epoch, place, task_id, source, size, version, state, *rest, pruned = row
    known = (group_id, (epoch, place), task_id, source, size, version, GroupState(state))
    return GroupRecord(*known, *rest, pruned=bool(pruned))


def _account(counts: dict[str, int]) -> Account:
    """Nothing is counted as pending: what has no end is."""
    endings = [counts.get(name, 0) for name in ("trained", "filtered", "failed", "stale")]
    dispatched = counts.get("dispatched", 0)
    return Account(dispatched, *endings, pending=dispatched - sum(endings))
