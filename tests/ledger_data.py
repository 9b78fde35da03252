"""What the tests of the ledger share: made-up conversations, and recording them."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from hypothesis import strategies as st

from headrace.data.episode import Episode, FinishReason, ModelOutput, OwnedMessages, Step, TerminationReason, Trajectory
from headrace.ledger import CallRecord, Ledger, ResultRecord, digest

finite = st.floats(allow_nan=False, allow_infinity=False)
singles = st.floats(max_value=0, allow_nan=False, allow_infinity=False, width=32)
texts = st.text(st.characters(codec=None, categories=("L", "N", "P", "S", "Zs", "Cc", "Cs")), max_size=12)
values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | finite | texts | st.binary(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(texts | st.integers(), inner, max_size=3)
    ),
    max_leaves=6,
)
messages = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "tool"]), "content": texts},
    optional={"extra": values, "$exact": values},
)
ids = st.integers(0, 200) | st.integers(0, 200_000)
tokens: st.SearchStrategy[Any] = st.lists(ids, min_size=1, max_size=8).map(tuple)
blocks = st.lists(ids | st.dictionaries(texts, texts, max_size=2), min_size=1, max_size=4).map(tuple)
rewards = st.none() | finite


@dataclass(frozen=True)
class Played:
    """One attempt: what the model and the tools said, and the episode that came of it."""

    calls: tuple[CallRecord, ...]
    results: tuple[ResultRecord, ...]
    episode: Episode


@st.composite
def outputs(draw: st.DrawFn, prompt: tuple[Any, ...], call: int) -> ModelOutput:
    """A reply to a prompt."""
    said = draw(st.lists(ids, max_size=6).map(tuple))
    count = len(said)
    numbers = draw(st.sampled_from([singles, finite]))
    logprobs = tuple(draw(st.lists(numbers, min_size=count, max_size=count)))
    other = st.lists(numbers, min_size=count, max_size=count).map(tuple)
    text = draw(texts)
    return ModelOutput(
        text=text,
        prompt_ids=prompt,
        completion_ids=said,
        logprobs=logprobs,
        model_logprobs=draw(st.just(logprobs) | other),
        versions=tuple(sorted(draw(st.lists(st.integers(0, 3), min_size=count, max_size=count)))),
        finish_reason=draw(st.sampled_from(list(FinishReason))),
        temperature=draw(st.floats(0, 2)),
        content=draw(st.just(text) | texts),
        reasoning=draw(st.none() | texts),
        tool_calls=tuple(draw(st.lists(st.dictionaries(texts, values, max_size=2), max_size=2))),
        call=call,
    )


@st.composite
def conversations(draw: st.DrawFn, prompt: tuple[Any, ...], task: dict[str, Any]) -> tuple[CallRecord, ...]:
    """Calls of a few roles that go on, change their history or begin anew."""
    records: list[CallRecord] = []
    for call in range(draw(st.integers(0, 4))):
        role = draw(st.sampled_from(["agent", "judge"]))
        before = next((record for record in reversed(records) if record.role == role), None)
        how = draw(st.sampled_from(["go on", "change", "anew"]))
        asked, history = prompt, [task]
        if before is not None and how != "anew":
            asked = before.output.prompt_ids + before.output.completion_ids + draw(tokens)
            history = [*before.messages, before.output.message, draw(messages)]
        if how == "change":
            asked, history = asked[: len(asked) // 2] + draw(tokens | blocks), [*history[1:], draw(messages)]
        output = draw(outputs(asked, call))
        params = {"temperature": output.temperature, "stop": ("a",)}
        records.append(CallRecord(output, role, call * 7, digest(call, asked), OwnedMessages.copy_of(history), params))
    return tuple(records)


@st.composite
def custom_steps(draw: st.DrawFn) -> Step:
    """A Step that no call returned."""
    said = draw(tokens)
    sampled = draw(st.booleans())
    return Step(
        prompt_ids=draw(tokens | blocks),
        response_ids=said,
        logprobs=tuple(draw(finite) for _ in said) if sampled else None,
        versions=(3,) * len(said) if sampled else None,
        messages=tuple(draw(st.lists(messages, max_size=2))),
        text=draw(texts),
        reward=draw(rewards),
        advantage=draw(st.none() | st.lists(finite, max_size=4).map(tuple)),
        temperature=draw(st.floats(0, 2)),
        teacher_messages=draw(st.none() | st.lists(messages, max_size=2).map(tuple)),
        call=draw(st.integers(0, 5)),
    )


@st.composite
def plays(draw: st.DrawFn, prompt: tuple[Any, ...], task: dict[str, Any], rollout_idx: int = 0) -> Played:
    """An attempt whose episode is made of its calls, some of them changed, and of Steps of its own."""
    calls = draw(conversations(prompt, task))
    trajectories = [
        Trajectory(tuple(draw(_changed(record)) for record in calls if record.role == role), role, draw(rewards))
        for role in ("agent", "judge")
    ]
    trajectories.append(Trajectory(tuple(draw(st.lists(custom_steps(), max_size=2))), draw(texts), draw(rewards)))
    results = tuple(
        ResultRecord(number, draw(st.sampled_from(["tool", "judger"])), "search", digest(number), draw(values))
        for number in range(draw(st.integers(0, 2)))
    )
    episode = Episode(
        task_id="task",
        trajectories=tuple(draw(st.lists(st.sampled_from(trajectories), max_size=3))),
        rollout_idx=rollout_idx,
        seed=draw(st.integers(0, 2**63 - 1) | st.integers()),
        source=draw(st.just("default") | texts),
        termination=draw(st.sampled_from(list(TerminationReason)) | texts),
        is_correct=draw(st.none() | st.booleans()),
        metrics=draw(st.dictionaries(texts, finite, max_size=2)),
        error=draw(st.none() | texts),
    )
    return Played(calls, results, episode)


@st.composite
def _changed(draw: st.DrawFn, record: CallRecord) -> Step:
    step = Step.from_model_output(record.output, record.messages)
    changes: dict[str, Any] = {
        "reward": draw(rewards),
        "advantage": draw(st.none() | st.just((0.5,) * len(step.response_ids))),
        "text": draw(st.just(step.text) | texts),
        "messages": draw(st.just(step.messages) | st.lists(messages, max_size=1).map(tuple)),
        "prompt_ids": draw(st.just(step.prompt_ids) | tokens),
        "logprobs": draw(st.just(step.logprobs) | st.just((-0.0,) * len(step.response_ids))),
    }
    return replace(step, **changes)


def play(ledger: Ledger, played: Played) -> None:
    """Record an attempt from start to end."""
    place = (played.episode.group_id, played.episode.rollout_idx, played.episode.attempt)
    ledger.started(*place, 0)
    for record in played.calls:
        ledger.called(
            *place,
            record.output,
            role=record.role,
            seed=record.seed,
            request_digest=record.request_digest,
            messages=record.messages,
            params=record.params,
        )
    for result in played.results:
        ledger.resulted(
            *place,
            result.number,
            kind=result.kind,
            name=result.name,
            request_digest=result.request_digest,
            payload=result.payload,
        )
    ledger.finished(played.episode, 0.5)


def simple_episode(group_id: int, rollout_idx: int = 0, words: int = 40, attempt: int = 0) -> Played:
    """An episode of one call that depends on nothing but its place."""
    logprobs = struct.unpack("4f", struct.pack("4f", -0.1, -0.2, -0.3, -0.4))
    text = " ".join(f"word{group_id * 31 + number}" for number in range(words))
    output = ModelOutput(text, (1, 2, group_id), (3, 4, 5, 6), logprobs, logprobs, (0, 0, 1, 1), content=text)
    asked = OwnedMessages(({"role": "user", "content": f"task {group_id}"},))
    record = CallRecord(output, "agent", 5, digest(group_id), asked, {})
    trajectory = Trajectory((Step.from_model_output(output, asked),), reward=float(rollout_idx))
    episode = Episode(f"task {group_id}", (trajectory,), group_id, rollout_idx, attempt)
    return Played((record,), (), episode)


def dispatch(ledger: Ledger, group_id: int, size: int = 1, source: str = "default") -> None:
    """Dispatch a group to the place of its own number."""
    ledger.dispatched(group_id, (0, group_id), f"task {group_id}", source, size, 0)


def train(ledger: Ledger, step: int, group_ids: Sequence[int], size: int = 1) -> None:
    """Record a batch of whole groups and its update."""
    ledger.batch(step, step, group_ids)
    ledger.committed(step, 1)
    for group_id in group_ids:
        ledger.decided(group_id, "trained", step=step, trained=size)
    ledger.published(step + 1, f"digest {step}", step + 1)
