"""What a training backend is: the protocol that the trainer drives, and that every backend's contract suite tests."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

from headrace.config import AlgorithmSection, RunConfig
from headrace.data.episode import Step
from headrace.data.sample import LearnerValues, TrainBatch
from headrace.engines.base import ModelHost
from headrace.errors import ConfigError
from headrace.tracking.metrics import MetricsAggregator

Scorer = Literal["policy", "reference"]
"""Which model scores rows."""


@dataclass(frozen=True, slots=True)
class Trained:
    """What `forward_backward` found: metrics, and per sample the policy's log-probability of every trained target.

    `rejected` are the samples, by their index, that a correction took out of the loss: they do not count in the
    normaliser either. `entropies` and `clip_states` (see `ClipState`) are per sample and trained target, as the
    log-probabilities are; a backend that does not know them leaves them empty.
    """

    metrics: MetricsAggregator
    logprobs: tuple[tuple[float, ...], ...]
    rejected: frozenset[int] = frozenset()
    entropies: tuple[tuple[float, ...], ...] = ()
    clip_states: tuple[tuple[int, ...], ...] = ()

    @property
    def learned(self) -> LearnerValues:
        """What is recorded of the trained tokens."""
        return LearnerValues(self.logprobs, self.entropies, self.clip_states)


class Backend(Protocol):
    """Owns the trainable model, and knows no engine. Gradients accumulate until `optim_step`."""

    tokenizer: Any
    transports: ClassVar[tuple[str, ...]]
    """How it can send weights to an engine."""

    @staticmethod
    def check(config: RunConfig) -> None:
        """Raise ConfigError, with the remedy, for an option that this backend cannot honour.

        Called on the class, before anything is loaded, also by a dry run.
        """
        ...

    def host(self, transport: str) -> ModelHost:
        """What the run's engine needs of this backend, and the sender of one of its transports. Called once."""
        ...

    async def forward_backward(self, batch: TrainBatch, algorithm: AlgorithmSection) -> Trained:
        """Add the gradient of the batch's summed, weighted token losses to what has accumulated."""
        ...

    async def optim_step(self, lr: float, grad_scale: float) -> MetricsAggregator:
        """Multiply the accumulated gradient with `grad_scale`, clip it, apply it, and forget it."""
        ...

    async def compute_logprobs(self, batch: TrainBatch, of: Scorer = "policy") -> list[list[float]]:
        """Per sample, the log-probability of every target at the sample's temperature.

        Under the current weights, or under the reference: the policy as the run began.
        """
        ...

    async def compute_values(self, batch: TrainBatch) -> list[list[float]]:
        """Per sample, the value head's estimate before every target."""
        ...

    async def teacher_logprobs(self, steps: Sequence[Step]) -> list[list[float]]:
        """Per step, the teacher's log-probability of every response token."""
        ...

    async def refresh_teacher(self) -> None:
        """Copy the policy's weights, as they are now, into the teacher."""
        ...

    async def save(self, folder: Path) -> None:
        """Write weights and optimizer state."""
        ...

    async def load(self, folder: Path) -> None:
        """Read what `save` wrote."""
        ...

    async def export(self, folder: Path) -> None:
        """Write an ordinary model folder in Hugging Face format."""
        ...

    async def close(self) -> None:
        """Free what the backend holds."""
        ...


@runtime_checkable
class Snapshots(Protocol):
    """What a backend may also do: copy its state, so that it is written to disk while training continues."""

    async def snapshot(self) -> Callable[[Path], None]:
        """Copy in memory what `save` would write now; the function returned writes it, on a thread of its own.

        The next snapshot is taken when that one has been written: its memory may be used again.
        """
        ...


@runtime_checkable
class ComesBack(Protocol):
    """What a backend may also do: recover by itself from the loss of a part, by the newest checkpoint."""

    def saved(self, folder: Path) -> None:
        """What `save` wrote last, or a snapshot, is sealed and at `folder` now. Called on any thread."""
        ...


@runtime_checkable
class SaysNumerics(Protocol):
    """What a backend may also do: say what the bits of its results depend on, apart from the configuration."""

    @staticmethod
    def numerics(config: RunConfig) -> dict[str, str]:
        """By name, such as the versions of libraries. A deterministic run is resumed only where all of it is the same.

        Called on the class, before anything is loaded.
        """
        ...


@runtime_checkable
class ChecksMachine(Protocol):
    """What a backend may also do: refuse to start on a machine that lacks what it needs."""

    @staticmethod
    def check_machine(config: RunConfig) -> None:
        """Raise ConfigError for what is missing. Called on the class before all other checks, but not by a dry run."""
        ...


@runtime_checkable
class SaysWhere(Protocol):
    """What a backend may also do: say in a few words what it computes on, and how."""

    @property
    def where(self) -> str:
        """For people, at start-up; empty if there is nothing to choose."""
        ...


def refuse_changed(config: RunConfig, *keys: str) -> None:
    """Raise ConfigError if one of these settings is not at its default: for what a backend does not honour."""
    for key in keys:
        asked, usual = (attrgetter(key)(one) for one in (config, RunConfig()))
        if asked != usual:
            raise ConfigError(
                f'{key} = {json.dumps(asked)} does nothing with backend "{config.backend.name}"; leave it at '
                f"{json.dumps(usual)}, or use another backend"
            )


def offending_samples(batch: TrainBatch, indices: Sequence[int], limit: int = 5) -> str:
    """A short report of samples for an error message."""
    lines = []
    for index in indices[:limit]:
        sample = batch.samples[index]
        advantages = [a for a, m in zip(sample.advantages, sample.loss_mask, strict=True) if m]
        lines.append(
            f'  task "{sample.task_id}", role {sample.role}: {len(sample.tokens)} tokens, {len(advantages)} trained, '
            f"advantages {min(advantages):.3g}..{max(advantages):.3g}, reward {sample.reward}"
        )
    if len(indices) > limit:
        lines.append(f"  and {len(indices) - limit} more")
    return "\n".join(lines)
