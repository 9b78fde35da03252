"""The tokens of one episode with everything that is known of each: what a viewer shows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from headrace.data.episode import NO_ROLLOUT, Trajectory
from headrace.data.sample import Sample, merge_steps, merged_parts
from headrace.ledger.reader import LedgerReader
from headrace.ledger.records import EpisodeRecord, LearnerRow, TrainedRow


@dataclass(frozen=True, slots=True)
class TokenRow:
    """One row of tokens: a conversation as the model saw it, prompts and responses in one.

    A trajectory has one row, and another for every Step whose prompt does not begin with a row before (`broken`: a
    prefix was broken). All lists have one entry for each token. None stands for what there is not: a prompt token has
    no version, a token that was not trained has no advantage.
    """

    trajectory: int
    """Which of the episode's."""
    role: str
    broken: bool
    temperature: float
    ids: tuple[Any, ...]
    """Integers, or opaque blocks (an image)."""
    steps: tuple[int, ...]
    """Which Step of the trajectory brought the token."""
    sampled: tuple[bool, ...]
    """Whether it is of a response; else of a prompt."""
    logprobs: tuple[float | None, ...]
    """Of the sampler, when it was sampled."""
    versions: tuple[int | None, ...]
    trained: tuple[bool | None, ...]
    """None: it is not known, as nothing is recorded of the batch, or no longer."""
    advantages: tuple[float | None, ...]
    learner_logprobs: tuple[float | None, ...]
    """Of the learner, before the update."""
    ratios: tuple[float | None, ...]
    """exp(learner's - sampler's log-probability)."""
    entropies: tuple[float | None, ...]
    clip_states: tuple[str | None, ...]
    """Names of `ClipState` in lower case: kept, clipped, dropped, masked, rejected."""
    preferred: bool | None = None
    """Of a preference pair: whether it was the preferred one."""

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def episode_tokens(reader: LedgerReader, record: EpisodeRecord, step: int | None = None) -> list[TokenRow]:
    """The rows of an episode (see `LedgerReader.episode_record`), trajectory after trajectory.

    `step` says as which batch trained it (as tables count: steps made before); by default the last that did. Empty
    where the messages are no longer there (`ledger.keep_steps`).
    """
    trained = _trained_rows(reader, record, step)
    rows: list[TokenRow] = []
    for number, trajectory in enumerate(record.episode.trajectories):
        if not all(one.prompt_ids for one in trajectory.steps):  # an engine that gives no tokens
            continue
        merged = zip(merge_steps(_plain(trajectory)), merged_parts(trajectory), strict=True)
        for place, (sample, parts) in enumerate(merged):
            rows.append(_token_row(number, place > 0, sample, parts, _take(trained, trajectory.name, sample)))
    return rows


_Trained = tuple[TrainedRow, LearnerRow | None]


def _trained_rows(reader: LedgerReader, record: EpisodeRecord, step: int | None) -> list[_Trained] | None:
    """Of the episode, in the order in which they were made of it; None if that is not known."""
    if record.kind != "train" or record.decision == "failed":
        return []
    place = (record.episode.group_id, record.episode.rollout_idx)
    steps = reader.steps_of(place[0])
    if not steps:
        return []
    at = steps[-1] if step is None else step
    found = reader.trained_rows(at)
    if found is None or any((row.group_id, row.rollout_idx) == (place[0], NO_ROLLOUT) for row in found):
        return None
    learned = reader.learner_rows(at) or (None,) * len(found)
    pairs = zip(found, learned, strict=True)
    return [(row, values) for row, values in pairs if (row.group_id, row.rollout_idx) == place]


def _take(trained: list[_Trained] | None, role: str, sample: Sample) -> _Trained | bool | None:
    """The first that fits the row, which is taken out; False if it was not trained, None if that is not known."""
    if trained is None:
        return None
    for number, (row, values) in enumerate(trained):
        if row.role == role and _fits(row, values, sample):
            return trained.pop(number)
    return False


def _fits(row: TrainedRow, values: LearnerRow | None, sample: Sample) -> bool:
    if values is None:  # which of its tokens the staleness policy left out is not known
        return row.tokens == sample.trained_tokens
    return len(values.mask) == len(sample.loss_mask) and all(
        ours >= theirs for ours, theirs in zip(sample.loss_mask, values.mask, strict=True)
    )


def _token_row(
    trajectory: int, broken: bool, sample: Sample, parts: Sequence[tuple[int, int, int]], trained: Any
) -> TokenRow:
    steps = tuple(step for step, prompt, response in parts for _ in range(prompt + response))
    sampled = tuple(kind for _, prompt, response in parts for kind in [False] * prompt + [True] * response)
    first = [None]  # the first token is no target
    has_versions = [None if version < 0 else version for version in sample.versions]
    logprobs = [value if v is not None else None for value, v in zip(sample.logprobs, has_versions, strict=True)]
    row, values = trained if isinstance(trained, tuple) else (None, None)
    was = sample.loss_mask if values is None else values.mask
    columns = _columns(row, values, was)
    learner = columns["logprobs"]
    pairs = zip(learner, [*first, *logprobs], strict=True)
    return TokenRow(
        trajectory,
        sample.role,
        broken,
        sample.temperature,
        sample.tokens,
        steps,
        sampled,
        (*first, *logprobs),
        (*first, *has_versions),
        _was_trained(trained, was, len(sample.tokens)),
        columns["advantages"],
        learner,
        tuple(None if a is None or b is None else _exp(a - b) for a, b in pairs),
        columns["entropies"],
        columns["clip_states"],
        row.preferred if row is not None else None,
    )


def _was_trained(trained: Any, mask: Sequence[int], tokens: int) -> tuple[bool | None, ...]:
    if trained is None:
        return (None,) * tokens
    return (False, *map(bool, mask)) if trained is not False else (False,) * tokens


def _columns(row: TrainedRow | None, values: LearnerRow | None, mask: Sequence[int]) -> dict[str, tuple[Any, ...]]:
    """What belongs to trained targets, spread over all tokens."""
    names = (
        None if values is None or values.clip_states is None else [state.name.lower() for state in values.clip_states]
    )
    given: dict[str, Sequence[Any] | None] = {
        "advantages": None if row is None else row.advantages,
        "logprobs": None if values is None else values.logprobs,
        "entropies": None if values is None else values.entropies,
        "clip_states": names,
    }
    return {name: _spread(found, mask) for name, found in given.items()}


def _spread(values: Sequence[Any] | None, mask: Sequence[int]) -> tuple[Any, ...]:
    if values is None:
        return (None,) * (len(mask) + 1)
    left = iter(values)
    return (None, *(next(left) if kept else None for kept in mask))


def _exp(value: float) -> float:
    return math.exp(min(value, 700.0))


def _plain(trajectory: Trajectory) -> Trajectory:
    """Without advantages of its own, which may be of a wrong length: those that it was trained with are recorded."""
    return replace(trajectory, steps=tuple(replace(step, advantage=None) for step in trajectory.steps))
