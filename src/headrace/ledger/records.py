"""What is read out of a ledger."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from headrace.data.episode import Episode, ModelOutput, OwnedMessages
from headrace.data.sample import ClipState
from headrace.ledger.account import Account as Account


class GroupState(StrEnum):
    """Where a group is. It only moves forward: dispatched, complete, and one of four final states."""

    DISPATCHED = "dispatched"
    COMPLETE = "whole"  # the name on disk. All episodes are there, and some wait to be trained
    TRAINED = "trained"
    FILTERED = "filtered"
    FAILED = "failed"
    STALE = "stale"

    @property
    def rank(self) -> int:
        """0, 1, and 2 for a final state."""
        return {GroupState.DISPATCHED: 0, GroupState.COMPLETE: 1}.get(self, 2)


class EpisodeState(StrEnum):
    """Where one attempt at an episode is."""

    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    RESTARTED = "restarted"  # given up for another attempt


@dataclass(frozen=True, slots=True)
class ProcessRecord:
    """One start of the run. `ended_at` is None while it runs, and for ever if it was killed."""

    started_at: float
    pid: int
    host: str
    resumed_from: int | None
    ended_at: float | None


@dataclass(frozen=True, slots=True)
class GroupRecord:
    """One dispatched task. `step` is that of the batch that last held the group, or of its other ending."""

    group_id: int
    position: tuple[int, int]
    task_id: str
    source: str
    size: int
    version: int
    state: GroupState
    reason: str | None = None
    step: int | None = None
    trained: int = 0
    filtered: int = 0
    failed: int = 0
    stale: int = 0
    pruned: bool = False

    @property
    def pending(self) -> int:
        """Episodes that have not found their end."""
        return self.size - self.trained - self.filtered - self.failed - self.stale


@dataclass(frozen=True, slots=True)
class IdentityRecord:
    """Which ledger it is, and the checkpoint that it was begun with: the ledger that it names, and its step."""

    ledger_id: str
    begun_from: tuple[str, int] | None = None


@dataclass(frozen=True, slots=True)
class UnfinishedGroup:
    """A group without a decision: its finished episodes by rollout, and the attempts that were in flight."""

    group: GroupRecord
    episodes: dict[int, Episode]
    running: dict[int, int]
    """Rollout to the number of its attempt; `calls` and `results` of that attempt hold what it got so far."""


@dataclass(frozen=True, slots=True)
class CallRecord:
    """One model call: what was asked and what was returned."""

    output: ModelOutput
    role: str
    seed: int
    request_digest: str
    messages: OwnedMessages
    params: dict[str, Any]

    @property
    def call(self) -> int:
        """Which of the episode's calls it was."""
        return self.output.call


@dataclass(frozen=True, slots=True)
class ResultRecord:
    """What a tool or a judger answered."""

    number: int
    kind: str
    name: str
    request_digest: str
    payload: Any


@dataclass(frozen=True, slots=True)
class BatchRecord:
    """The composition of a training batch. `step` is how many optimizer steps were made before it.

    `steps` is how many were made on it: None until it is committed, which is to say, until its update was made.
    """

    step: int
    version: int
    group_ids: tuple[int, ...]
    again: tuple[int, ...]
    """Groups that had been trained before."""
    steps: int | None = None
    pieces: tuple[int, ...] = ()
    """How many groups were learned from at a time, one number after the other; empty: all at once."""


@dataclass(frozen=True, slots=True)
class TrainedRow:
    """One row of a training batch, with the advantages of its trained tokens.

    `rollout_idx` is -1 where a grouping hook did not say. A row of a preference pair has no advantages; it is the
    `preferred` one or the other.
    """

    group_id: int
    rollout_idx: int
    role: str
    tokens: int
    advantages: tuple[float, ...] | None
    preferred: bool | None = None


@dataclass(frozen=True, slots=True)
class LearnerRow:
    """What the learner computed of one row of a training batch, before the update that was made on it.

    `mask` has an entry for every target of the row (token i + 1 of its tokens; see `Sample`), 1 where it was trained.
    The others have one entry for each trained target, in order; None where the backend did not know them.
    """

    mask: tuple[int, ...]
    logprobs: tuple[float, ...]
    entropies: tuple[float, ...] | None = None
    clip_states: tuple[ClipState, ...] | None = None


@dataclass(frozen=True, slots=True)
class WeightSyncRecord:
    """Weights that were handed to the engine."""

    version: int
    digest: str
    step: int


@dataclass(frozen=True, slots=True)
class EvaluationRecord:
    """One evaluation of one set."""

    step: int
    name: str
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True)
class EpisodeRecord:
    """A finished episode with what became of it. Without its body (`pruned`), the episode has no trajectories.

    `decision` is its own where it failed, else its group's. For `kind` "eval" it is the name of the set.
    """

    kind: str
    episode: Episode
    reward: float
    decision: str
    reason: str | None
    step: int | None
    oldest_version: int | None
    newest_version: int | None
    generated_tokens: int
    duration_s: float | None
    pruned: bool
