"""What the page of an episode shows: the conversation by turns, every token with what is known of it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.data.episode import Episode, Step, Trajectory
from headrace.ledger.export import plain
from headrace.ledger.reader import LedgerReader
from headrace.ledger.records import CallRecord, EpisodeRecord, ResultRecord
from headrace.models.token_text import TokenTexts
from headrace.viewer.learned import TokenColumns, learned_columns
from headrace.viewer.store import Missing, RunView, has_times
from headrace.viewer.texts import short

MOST_TOKENS = 20_000  # of one prompt or reply
MOST_TEXT = 2 << 20  # characters of one message
Row = dict[str, Any]


def episode_page(view: RunView, group_id: int, rollout_idx: int, attempt: int | None) -> Row:
    """One rollout of a group: by default its last attempt."""
    with view.ledger() as reader:
        attempts = _attempts(reader, group_id, rollout_idx)
        if not attempts:
            raise Missing(f"group {group_id} has no rollout {rollout_idx} on record")
        chosen = next(
            (one for one in attempts if one["attempt"] == attempt), None if attempt is not None else attempts[-1]
        )
        if chosen is None:
            raise Missing(f"rollout {rollout_idx} of group {group_id} has no attempt {attempt}")
        place = (group_id, rollout_idx, chosen["attempt"])
        group = reader.rows(
            "SELECT task_id, source, size, version, state, reason, step FROM groups WHERE group_id = ?", (group_id,)
        )[0]
        record = reader.episode_record(*place)
        calls = {call.call: call for call in reader.calls(*place)}
        results = reader.results(*place)
        learned = learned_columns(reader, record)
        steps = [step + 1 for step in reader.steps_of(group_id)]
    names = ("task_id", "source", "size", "version", "state", "reason", "step")
    found: Row = dict(zip(names, group, strict=True))
    episode = record.episode if record else _unfinished(found, place, calls)
    return {
        "kind": "train",
        "group_id": group_id,
        "rollout_idx": rollout_idx,
        "attempt": chosen["attempt"],
        "attempts": attempts,
        "task_id": short(str(found["task_id"])),
        "source": short(found["source"]),
        "size": found["size"],
        "group_state": found["state"],
        "reason": short(found["reason"]),
        "step": None if found["step"] is None else found["step"] + 1,
        "trained_at": steps,
        **_facts(record, episode, chosen),
        "results": [_result(result) for result in results],
        "has_texts": view.texts is not None,
        "trajectories": trajectories_of(episode, calls, view.texts, learned),
    }


def evaluated_page(view: RunView, eval_episode_id: int) -> Row:
    """One episode of an evaluation."""
    with view.ledger() as reader:
        record = reader.eval_episode_record(eval_episode_id)
    if record is None:
        raise Missing(f"evaluation episode {eval_episode_id} is not on record")
    episode = record.episode
    return {
        "kind": "eval",
        "id": eval_episode_id,
        "set": record.decision,
        "step": record.step,
        "group_id": episode.group_id,
        "rollout_idx": episode.rollout_idx,
        "attempt": episode.attempt,
        "attempts": [],
        "task_id": short(str(episode.task_id)),
        "source": short(episode.source),
        **_facts(record, episode, {}),
        "results": [],
        "has_texts": view.texts is not None,
        "trajectories": trajectories_of(episode, {}, view.texts, {}),
    }


def _attempts(reader: LedgerReader, group_id: int, rollout_idx: int) -> list[Row]:
    times = "started_at, finished_at" if has_times(reader) else "NULL, NULL"
    rows = reader.rows(
        f"SELECT attempt, state, termination, reward, error, duration_s, seed, {times} FROM episodes "
        "WHERE group_id = ? AND rollout_idx = ? ORDER BY attempt",
        (group_id, rollout_idx),
    )
    names = (
        "attempt", "state", "termination", "reward", "error", "duration_s", "seed", "started_at", "finished_at",
    )  # fmt: skip
    return [dict(zip(names, (short(plain(value)) for value in row), strict=True)) for row in rows]


def _unfinished(group: Row, place: tuple[int, int, int], calls: Mapping[int, CallRecord]) -> Episode:
    """What an episode in flight, or one that was given up, had got so far."""
    roles: dict[str, list[Step]] = {}
    for call in sorted(calls.values(), key=lambda one: one.call):
        roles.setdefault(call.role, []).append(Step.from_model_output(call.output, call.messages))
    trajectories = tuple(Trajectory(tuple(steps), role) for role, steps in roles.items())
    return Episode(str(group["task_id"]), trajectories, *place)


def _facts(record: EpisodeRecord | None, episode: Episode, attempt: Row) -> Row:
    state = attempt.get("state", "finished")
    return {
        "state": "failed" if record is not None and episode.failed else state,
        "decision": record.decision if record else None,
        "reward": plain(record.reward) if record else None,
        "is_correct": episode.is_correct,
        "termination": str(episode.termination) if record else None,
        "error": None if episode.error is None else _cut(episode.error),
        "metrics": plain(episode.metrics),
        "seed": str(episode.seed if record else attempt.get("seed")),  # more digits than a number in a browser has
        "oldest_version": record.oldest_version if record else None,
        "newest_version": record.newest_version if record else None,
        "generated_tokens": record.generated_tokens if record else episode.generated_tokens,
        "duration_s": record.duration_s if record else None,
        "started_at": attempt.get("started_at"),
        "finished_at": attempt.get("finished_at"),
        "pruned": record.pruned if record else False,
    }


def _result(result: ResultRecord) -> Row:
    payload = plain(result.payload)
    verdict = None
    if result.kind == "judger" and isinstance(payload, list) and len(payload) == 3:
        verdict = {"reward": payload[0], "is_correct": payload[1], "metrics": payload[2]}
    return {
        "number": result.number,
        "kind": result.kind,
        "name": result.name,
        "verdict": verdict,
        "payload": _cut(payload if isinstance(payload, str) else json.dumps(payload, ensure_ascii=False)),
    }


# ---- turns -----------------------------------------------------------------------------------------------------------


def trajectories_of(
    episode: Episode,
    calls: Mapping[int, CallRecord],
    texts: TokenTexts | None,
    learned: Mapping[tuple[int, int], TokenColumns],
) -> list[Row]:
    """The trajectories with their turns; `learned` is by the numbers of trajectory and Step."""
    found: list[Row] = []
    for number, trajectory in enumerate(episode.trajectories):
        turns: list[Row] = []
        before: Step | None = None
        for place, step in enumerate(trajectory.steps):
            turns.append(_turn(step, before, calls.get(step.call), texts, learned.get((number, place))))
            before = step
        found.append({"name": trajectory.name, "reward": plain(trajectory.final_reward), "turns": turns})
    return found


def _turn(
    step: Step, before: Step | None, call: CallRecord | None, texts: TokenTexts | None, learned: TokenColumns | None
) -> Row:
    so_far = (*before.prompt_ids, *before.response_ids) if before else ()
    extends = bool(before) and step.prompt_ids[: len(so_far)] == so_far
    known = _known_messages(step, before)
    params = call.params if call else {}
    return {
        "call": step.call,
        "messages": [_message(message) for message in step.messages[known:]],
        "known_messages": known,
        "text": _cut(step.text),
        "reasoning": _cut(call.output.reasoning) if call and call.output.reasoning else None,
        "tool_calls": plain(list(call.output.tool_calls)) if call else [],
        "finish_reason": str(step.finish_reason),
        "temperature": step.temperature,
        "params": plain(params),
        "reward": plain(step.reward),
        "broken_prefix": before is not None and not extends,
        "prompt": {"shared": len(so_far) if extends else 0, **_prompt(step, len(so_far) if extends else 0, texts)},
        "reply": _reply(step, call, texts, learned),
    }


def _known_messages(step: Step, before: Step | None) -> int:
    """How many messages the turn before has shown already, with its reply."""
    if before is None:
        return 0
    size = len(before.messages)
    if step.messages[:size] != before.messages or len(step.messages) <= size:
        return 0
    return size + (step.messages[size].get("role") == "assistant")


def _message(message: Mapping[str, Any]) -> Row:
    content = message.get("content")
    others = {key: value for key, value in message.items() if key not in ("role", "content")}
    return {
        "role": str(message.get("role", "")),
        "content": _cut(content if isinstance(content, str) else json.dumps(plain(content), ensure_ascii=False)),
        "size": len(content) if isinstance(content, str) else None,
        "more": plain(others),
    }


def _cut(text: str) -> str:
    return text if len(text) <= MOST_TEXT else text[:MOST_TEXT] + f"\n… {len(text) - MOST_TEXT} more characters"


def _prompt(step: Step, start: int, texts: TokenTexts | None) -> Row:
    ids = step.prompt_ids[start:]
    return {"tokens": len(step.prompt_ids), **_shown(ids[:MOST_TOKENS], texts), "cut": max(0, len(ids) - MOST_TOKENS)}


def _shown(ids: Sequence[Any], texts: TokenTexts | None) -> Row:
    return {
        "ids": [token if isinstance(token, int) else None for token in ids],
        "texts": texts.texts(ids) if texts else None,
        "special": [n for n, token in enumerate(ids) if texts and token in texts.special] if texts else [],
    }


def _reply(step: Step, call: CallRecord | None, texts: TokenTexts | None, learned: TokenColumns | None) -> Row:
    most = slice(0, MOST_TOKENS)
    own = step.advantage if step.advantage is not None and len(step.advantage) == len(step.response_ids) else None
    model = call.output.model_logprobs if call and call.output.model_logprobs != step.logprobs else None
    columns: Row = {
        "logprob": step.logprobs and list(step.logprobs[most]),
        "model_logprob": list(model[most]) if model and len(model) == len(step.response_ids) else None,
        "version": step.versions and list(step.versions[most]),
        "advantage": own and list(own[most]),
    }
    if learned is not None:
        columns |= {name: values[most] for name, values in learned.items()}
    return {
        "tokens": len(step.response_ids),
        **_shown(step.response_ids[most], texts),
        "cut": max(0, len(step.response_ids) - MOST_TOKENS),
        "columns": plain({name: values for name, values in columns.items() if values is not None}),
    }
