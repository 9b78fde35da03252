"""Model calls and episodes as bodies: what a call shares with the one before is not stored again, nor is what an
episode's Steps share with its calls."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any, Final

from headrace.data.episode import NO_ROLLOUT, Episode, ModelOutput, OwnedMessages, Step, Trajectory
from headrace.data.routing import RoutedExperts
from headrace.data.task import Message
from headrace.ledger.pack import DamagedRecordError, Packer, expand, runs, same_floats, unpack
from headrace.ledger.records import CallRecord

FIRST_PROMPT: Final = -1
"""Stands for the first prompt of the group where the number of an earlier call may stand."""

_INTEGERS = ("prompt_ids", "response_ids")
_FLOATS = ("logprobs", "advantage")
_STEP_FIELDS = tuple(field.name for field in fields(Step))
_values = attrgetter(*_STEP_FIELDS)
_BLANK = Step((), ())
_OF: Final = {"of"}
assert _STEP_FIELDS == (
    "prompt_ids", "response_ids", "logprobs", "versions", "messages", "text", "reward", "advantage", "temperature",
    "finish_reason", "teacher_messages", "call", "routed_experts",
), "_fields_of knows them in this order"  # fmt: skip


@dataclass(frozen=True, slots=True)
class Base:
    """What a later prompt may begin with: `number` is that of a call, or FIRST_PROMPT."""

    number: int
    tokens: tuple[Any, ...]
    messages: tuple[Message, ...]
    routed: RoutedExperts | None = None

    @classmethod
    def of_call(cls, record: CallRecord) -> Base:
        """The conversation after a call."""
        output = record.output
        tokens = output.prompt_ids + output.completion_ids
        return cls(record.call, tokens, (*record.messages, output.message), output.routed_experts)


def shared_prefix(ours: Sequence[Any], theirs: Sequence[Any]) -> int:
    """How many items both begin with."""
    most = min(len(ours), len(theirs))
    if ours[:most] == theirs[:most]:
        return most
    return bisect_left(range(1, most + 1), True, key=lambda size: ours[:size] != theirs[:size])


# ---- calls -----------------------------------------------------------------------------------------------------------


def pack_prompt(tokens: Sequence[Any], messages: Sequence[Message]) -> bytes:
    """The first prompt of a group."""
    packer = Packer()
    packer.integers(tokens)
    return packer.packed(list(messages))


def unpack_prompt(body: bytes) -> Base:
    """The inverse of `pack_prompt`."""
    messages, (tokens,) = unpack(body)
    return Base(FIRST_PROMPT, tokens, tuple(messages))


def pack_call(record: CallRecord, base: Base | None) -> bytes:
    """A call without what it shares with its base, its role, seed and other columns of its own."""
    output, packer = record.output, Packer()
    tokens = shared_prefix(output.prompt_ids, base.tokens) if base else 0
    messages = shared_prefix(record.messages, base.messages) if base else 0
    same = same_floats(output.logprobs, output.model_logprobs)  # at temperature 1, without top_p and top_k
    packer.integers(output.prompt_ids[tokens:])
    packer.integers(output.completion_ids)
    packer.floats(output.logprobs)
    packer.floats(() if same else output.model_logprobs)
    packer.integers(runs(output.versions))
    value = {"text": output.text, "messages": list(record.messages[messages:])}
    if base:
        value["base"] = [base.number, tokens, messages]
    if (routed := output.routed_experts) is not None:
        rows = routed.shared(base.routed) if base else 0
        value["routed"] = [rows, _packed_routing(routed.rows(rows), packer)]
    if not output.model_logprobs and output.logprobs:
        value["unscored"] = True
    if output.content != output.text:
        value["content"] = output.content
    if output.reasoning is not None:
        value["reasoning"] = output.reasoning
    if output.tool_calls:
        value["tool_calls"] = list(output.tool_calls)
    return packer.packed(value, plain=not (value["messages"] or output.tool_calls))


def unpack_call(
    body: bytes, base_of: Callable[[int], Base], call: int, finish_reason: str, temperature: float
) -> tuple[ModelOutput, OwnedMessages]:
    """The inverse of `pack_call`. `base_of` gives the base of a number."""
    value, arrays = unpack(body)
    prompt, completion, logprobs, model_logprobs, versions, *_ = arrays
    messages, base = value["messages"], None
    if "base" in value:
        number, shared_tokens, shared_messages = value["base"]
        base = base_of(number)
        prompt = base.tokens[:shared_tokens] + prompt
        messages = [*base.messages[:shared_messages], *messages]
    output = ModelOutput(
        text=value["text"],
        prompt_ids=prompt,
        completion_ids=completion,
        logprobs=logprobs,
        model_logprobs=model_logprobs if "unscored" in value or len(model_logprobs) == len(logprobs) else logprobs,
        versions=expand(versions),
        finish_reason=finish_reason,
        temperature=temperature,
        content=value.get("content", value["text"]),
        reasoning=value.get("reasoning"),
        tool_calls=tuple(value.get("tool_calls", ())),
        call=call,
        routed_experts=_unpacked_routing(value["routed"], base, arrays) if "routed" in value else None,
    )
    return output, OwnedMessages(messages)


def _packed_routing(routed: RoutedExperts, packer: Packer) -> list[int]:
    return [packer.numbers(array("B", routed.experts)), routed.slots, routed.width]


def _unpacked_routing(value: Sequence[Any], base: Base | None, arrays: Sequence[Any]) -> RoutedExperts:
    rows, (number, slots, width) = value
    own = RoutedExperts(bytes(arrays[number]), slots, width)
    if not rows:
        return own
    if base is None or base.routed is None:
        raise DamagedRecordError("it continues the experts of a call that has none")
    return RoutedExperts(base.routed.rows(0, rows).experts + own.experts, slots, width)


# ---- episodes --------------------------------------------------------------------------------------------------------


def pack_episode(episode: Episode, calls: Mapping[int, CallRecord], unstorable: Mapping[str, Any]) -> bytes:
    """The trajectories; a Step of a recorded call is the call's number and what is different in it.

    `unstorable` holds fields of the episode that a column cannot hold as they are.
    """
    packer = Packer()
    trajectories = [
        [
            trajectory.name,
            trajectory.reward,
            [_packed_step(step, calls, packer) for step in trajectory.steps],
            # known by the episode, unless a workflow says something else
            *([] if trajectory.rollout_idx == NO_ROLLOUT else [trajectory.rollout_idx]),
        ]
        for trajectory in episode.trajectories
    ]
    # mostly: each Step is what its call returned
    plain = all(type(name) is str and all(step.keys() <= _OF for step in steps) for name, _, steps, *_ in trajectories)
    return packer.packed([trajectories, dict(unstorable)] if unstorable else [trajectories], plain and not unstorable)


def unpack_episode(body: bytes, columns: Mapping[str, Any], calls: Mapping[int, CallRecord]) -> Episode:
    """The inverse of `pack_episode`; `columns` are the episode's other fields."""
    (trajectories, *unstorable), arrays = unpack(body)
    built = tuple(
        Trajectory(tuple(_unpacked_step(step, calls, arrays) for step in steps), name, reward, *rollout_idx)
        for name, reward, steps, *rollout_idx in trajectories
    )
    return Episode(**{**columns, **(unstorable[0] if unstorable else {}), "trajectories": built})


def _fields_of(record: CallRecord | None) -> tuple[Any, ...]:
    """The fields of the Step that `Step.from_model_output` makes of a call, or of an empty one."""
    if record is None:
        return _values(_BLANK)
    said = record.output  # checked when it was made, so no Step is made to check it again
    return (
        said.prompt_ids, said.completion_ids, said.logprobs, said.versions, record.messages, said.text, None, None,
        said.temperature, said.finish_reason, None, said.call, said.routed_experts,
    )  # fmt: skip


def _packed_step(step: Step, calls: Mapping[int, CallRecord], packer: Packer) -> dict[str, Any]:
    record = calls.get(step.call)
    value: dict[str, Any] = {} if record is None else {"of": step.call}
    for name, ours, theirs in zip(_STEP_FIELDS, _values(step), _fields_of(record), strict=True):
        if ours is not theirs and not _same(name, ours, theirs):
            value[name] = _packed_field(name, ours, packer)
    return value


def _unpacked_step(value: Mapping[str, Any], calls: Mapping[int, CallRecord], arrays: Sequence[Any]) -> Step:
    base = _fields_of(calls[value["of"]] if "of" in value else None)
    own = {name: _unpacked_field(name, item, arrays) for name, item in value.items() if name != "of"}
    return Step(**dict(zip(_STEP_FIELDS, base, strict=True)) | own)


def _same(name: str, ours: Any, theirs: Any) -> bool:
    if name in _FLOATS:
        return same_floats(ours, theirs)
    return bool(ours == theirs) and (not isinstance(ours, float) or repr(ours) == repr(theirs))


def _packed_field(name: str, value: Any, packer: Packer) -> Any:
    if value is None:
        return None
    if name in _INTEGERS:
        return packer.integers(value)
    if name == "versions":
        return packer.integers(runs(value))
    if name in _FLOATS:
        return packer.floats(value)
    if name == "routed_experts":
        return _packed_routing(value, packer)
    return list(value) if isinstance(value, OwnedMessages) else value


def _unpacked_field(name: str, value: Any, arrays: Sequence[Any]) -> Any:
    if value is None:
        return None
    if name == "versions":
        return expand(arrays[value])
    if name in _INTEGERS or name in _FLOATS:
        return arrays[value]
    if name == "routed_experts":
        return _unpacked_routing((0, value), None, arrays)
    return OwnedMessages(value) if name in ("messages", "teacher_messages") else value
