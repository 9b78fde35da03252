"""Rows of verl (prompt, response, mask, log-probabilities) as Steps, and Steps as such rows. No verl here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from headrace.data.episode import FinishReason, ModelOutput, Step, Trajectory
from headrace.data.sample import merge_steps
from headrace.errors import WorkflowError


def steps_of(
    prompt_ids: Sequence[int],
    response_ids: Sequence[int],
    mask: Sequence[int],
    logprobs: Sequence[float] | None,
    calls: Sequence[ModelOutput],
    decode: Callable[[Sequence[int]], str],
) -> tuple[Step, ...]:
    """The trained parts of the row, each with the call that sampled it: they merge into the same row, mask and all.

    A token that is to be trained and that no call has sampled there is an error: it has no version, and its
    log-probability would be made up.
    """
    if len(mask) != len(response_ids) or (logprobs is not None and len(logprobs) != len(mask)):
        raise WorkflowError(
            f"the agent loop returned {len(response_ids)} response tokens, {len(mask)} mask entries and "
            f"{'no' if logprobs is None else len(logprobs)} log-probabilities; they must be equally many"
        )
    row, start = [*prompt_ids, *response_ids], len(prompt_ids)
    steps: list[Step] = []
    for begin, end, call in _parts(row, start, mask, calls):
        at = begin - len(call.prompt_ids)  # within the reply
        done = at + end - begin
        given = call.logprobs[at:done] if logprobs is None else tuple(logprobs[begin - start : end - start])
        cut = done < len(call.completion_ids)
        steps.append(
            Step(
                tuple(row[:begin]),
                tuple(row[begin:end]),
                logprobs=given,
                versions=call.versions[at:done],
                text=decode(row[begin:end]) if cut or at else call.text,
                temperature=call.temperature,
                finish_reason=FinishReason.LENGTH if cut and end == len(row) else call.finish_reason,
                call=call.call,
                routed_experts=None if call.routed_experts is None else call.routed_experts.rows(0, end - 1),
            )
        )
    return tuple(steps)


def _parts(
    row: Sequence[int], start: int, mask: Sequence[int], calls: Sequence[ModelOutput]
) -> Iterator[tuple[int, int, ModelOutput]]:
    """Stretches of trained tokens of one call: from, to, and the call."""
    covered = [found for call in reversed(calls) if (found := _covered(row, call)) is not None]  # the latest one counts
    begin, current = -1, None
    for at in range(start, len(row) + 1):
        sampled = _sampled_at(row, at, covered) if at < len(row) and mask[at - start] else None
        if current is not None and sampled is not current:
            yield begin, at, current
        if sampled is not current:
            begin, current = at, sampled


def _covered(row: Sequence[int], call: ModelOutput) -> tuple[int, int, ModelOutput] | None:
    """From where to where the row is what the call sampled after what the call was asked."""
    first = len(call.prompt_ids)
    if list(call.prompt_ids) != list(row[:first]):
        return None
    same = 0
    for sampled, token in zip(call.completion_ids, row[first:], strict=False):
        if sampled != token:
            break
        same += 1
    return first, first + same, call


def _sampled_at(row: Sequence[int], at: int, covered: Sequence[tuple[int, int, ModelOutput]]) -> ModelOutput:
    for first, last, call in covered:
        if first <= at < last:
            return call
    raise WorkflowError(
        f"the agent loop trains token {row[at]} at position {at} of its row, which no model call has sampled there; "
        f"its mask must be 0"
    )


@dataclass(frozen=True, slots=True)
class Row:
    """What verl trains of one rollout."""

    prompt_ids: list[int]
    response_ids: list[int]
    mask: list[int]
    logprobs: list[float]


def row_of_steps(trajectory: Trajectory) -> Row:
    """The Steps of a trajectory as one row. Steps that do not continue each other are refused: verl takes one row."""
    if not trajectory.steps:
        raise WorkflowError("the workflow made no model call, so there is nothing that verl could train")
    samples = merge_steps(trajectory)
    if len(samples) != 1:
        raise WorkflowError(
            f"the workflow changed its conversation, which makes {len(samples)} rows, and verl trains one row per "
            f"rollout; only append messages, or train it with Headrace"
        )
    (sample,) = samples
    start = len(trajectory.steps[0].prompt_ids)
    mask = list(sample.loss_mask[start - 1 :])
    logprobs = [float(value) if kept else 0.0 for value, kept in zip(sample.logprobs[start - 1 :], mask, strict=True)]
    return Row(list(sample.tokens[:start]), list(sample.tokens[start:]), mask, logprobs)
