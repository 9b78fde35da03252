"""Samples (training rows) and the merging of Steps into them.

All per-token fields are aligned with the targets: a row of n tokens has n - 1 of each, entry i belonging to token
i + 1, which the model predicts from tokens 0..i.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from headrace.data.codec import JsonData, as_tuples
from headrace.data.episode import NO_ROLLOUT, Step, Trajectory
from headrace.data.routing import RoutedExperts, require_routing
from headrace.errors import DataError

NO_VERSION = -1  # a token that no policy sampled: prompt, tool result, demonstration
_PER_TARGET = ("loss_mask", "logprobs", "versions", "advantages", "old_logprobs", "reference_logprobs", "returns")


@dataclass(frozen=True, slots=True)
class Sample(JsonData):
    """One training row. Steps whose prompt extends the row before are merged into it.

    `old_logprobs` are the learner's own at the start of the batch, if several updates are made on it;
    `reference_logprobs` are there if the objective compares with a reference, `returns` if a value head is trained,
    `routed_experts` if all its Steps have them.
    """

    tokens: tuple[Any, ...]
    loss_mask: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    advantages: tuple[float, ...]
    old_logprobs: tuple[float, ...] | None = None
    reference_logprobs: tuple[float, ...] | None = None
    returns: tuple[float, ...] | None = None
    temperature: float = 1.0
    role: str = "agent"
    task_id: str = ""
    group_id: int = 0
    reward: float | None = None
    rollout_idx: int = NO_ROLLOUT
    routed_experts: RoutedExperts | None = None

    def __post_init__(self) -> None:
        as_tuples(self, "tokens", *_PER_TARGET)
        require_routing("Sample", self.routed_experts, self.tokens)
        targets = len(self.tokens) - 1
        for name in _PER_TARGET:
            values = getattr(self, name)
            if values is not None and len(values) != targets:
                raise DataError(
                    f"Sample: {name} has length {len(values)}, but {len(self.tokens)} tokens have {targets} targets"
                )

    @property
    def trained_tokens(self) -> int:
        """Targets that count in the loss."""
        return sum(self.loss_mask)


class ClipState(IntEnum):
    """What a loss and its correction did with a trained token."""

    KEPT = 0
    CLIPPED = 1  # its ratio was clipped, and that changed its loss
    DROPPED = 2  # its loss left it out (dppo)
    MASKED = 3  # a correction gave it weight 0 (icepop)
    REJECTED = 4  # a correction rejected its row


@dataclass(frozen=True, slots=True)
class LearnerValues:
    """What the learner computed of a batch's trained targets, before the update: per sample, one value per target.

    Only targets that the loss mask keeps are there. `entropies` (of the whole distribution, at the sample's
    temperature) and `clip_states` are empty where a backend does not know them.
    """

    logprobs: tuple[tuple[float, ...], ...]
    entropies: tuple[tuple[float, ...], ...] = ()
    clip_states: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """Samples of one `forward_backward`, each with the weight that its token losses carry, cut into micro-batches.

    `micro_batches` holds indices into `samples`; `sequences` is what a mean over sequences divides by. The gradient
    of a step is its global normaliser times the sum over all tokens of weight times loss. The
    normaliser goes to `optim_step`, when the step is complete: so the result does not depend on how the step was cut.
    `rejected` are indices of samples that `forward_backward` found to be out of the loss: the normaliser does not count
    them. `learned` is what it computed of the others, too; None before it.
    """

    samples: tuple[Sample, ...]
    weights: tuple[float, ...]
    micro_batches: tuple[tuple[int, ...], ...]
    sequences: int
    rejected: frozenset[int] = frozenset()
    learned: LearnerValues | None = None


@dataclass(frozen=True, slots=True)
class LearnedShare:
    """Rows of a step's batch that one of its several updates was made on, by their place in it."""

    places: tuple[int, ...]
    batch: TrainBatch


class _Row:
    """A row under construction."""

    def __init__(self, step: Step, place: int) -> None:
        self.tokens: list[Any] = []
        self.mask: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.advantages: list[float] = []
        self.temperature = step.temperature
        self.routed = step.routed_experts
        self.parts: list[tuple[int, int, int]] = []
        self.extend(step, place)

    def continues_with(self, step: Step) -> bool:
        size = len(self.tokens)
        return (
            step.temperature == self.temperature
            and len(step.prompt_ids) >= size
            and list(step.prompt_ids[:size]) == self.tokens
        )

    def extend(self, step: Step, place: int) -> None:
        new_prompt = step.prompt_ids[len(self.tokens) :]
        count = len(step.response_ids)
        self.parts.append((place, len(new_prompt), count))
        self.tokens += [*new_prompt, *step.response_ids]
        self.mask += [0] * len(new_prompt) + [1] * count
        self.logprobs += [0.0] * len(new_prompt) + list(step.logprobs or [0.0] * count)
        self.versions += [NO_VERSION] * len(new_prompt) + list(step.versions or [NO_VERSION] * count)
        self.advantages += [0.0] * len(new_prompt) + _advantages(step)
        if self.routed is None or step.routed_experts is None:
            self.routed = None
        elif self.routed is not step.routed_experts:  # tokens keep the experts that they had when they were sampled
            self.routed = self.routed.then(step.routed_experts)


def _advantages(step: Step) -> list[float]:
    count = len(step.response_ids)
    if step.advantage is None:
        return [0.0] * count
    if len(step.advantage) != count:
        raise DataError(f"a Step has {len(step.advantage)} advantages, but {count} response tokens")
    return list(step.advantage)


def merge_steps(trajectory: Trajectory, **identity: Any) -> list[Sample]:
    """Rows of one trajectory: a Step whose prompt begins with a row so far extends it, else a new row begins.

    Masks come from lengths, not token values: a sampled end-of-sequence or padding id is a real token. Advantages are
    those of the Steps (0 where a Step has none yet); a list of another length than the response is an error.
    """
    return [
        Sample(
            tokens=tuple(row.tokens),
            # entry i belongs to target i + 1: the first token is never a target
            loss_mask=tuple(row.mask[1:]),
            logprobs=tuple(row.logprobs[1:]),
            versions=tuple(row.versions[1:]),
            advantages=tuple(row.advantages[1:]),
            temperature=row.temperature,
            role=trajectory.name,
            reward=trajectory.final_reward,
            rollout_idx=trajectory.rollout_idx,
            routed_experts=row.routed,
            **identity,
        )
        for row in _rows(trajectory.steps)
    ]


def merged_parts(trajectory: Trajectory) -> list[list[tuple[int, int, int]]]:
    """What each row of `merge_steps` was merged from: the number of the Step, its new prompt tokens, its response."""
    return [row.parts for row in _rows(trajectory.steps)]


def _rows(steps: Sequence[Step]) -> list[_Row]:
    rows: list[_Row] = []
    for place, step in enumerate(steps):
        if not step.prompt_ids:
            raise DataError("a Step must have at least one prompt token: the first token of a row is never a target")
        # any row: a role may hold several conversations in turns. The newest first, which it nearly always is
        for row in reversed(rows):
            if row.continues_with(step):
                row.extend(step, place)
                break
        else:
            rows.append(_Row(step, place))
    return rows
