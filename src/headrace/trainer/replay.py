"""Replay: train a recorded run once more from its ledger, batch by batch, and compare the weights at every step.

Nothing is generated: the batches, and the pieces in which they were learned from, are as they were recorded. What
happened at step N of an asynchronous run can so be looked at again and again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace.config import RunConfig
from headrace.config.compatibility import numeric_changes
from headrace.config.rules import resolve_objective
from headrace.data.task import Task
from headrace.errors import ConfigError
from headrace.evaluation.evaluate import config_of
from headrace.evaluation.setup import in_this_process
from headrace.ledger import Ledger, LedgerReader
from headrace.ledger.records import BatchRecord
from headrace.rollout.model_client import Model
from headrace.run.agreement import first_gap
from headrace.run.checkpoint import list_checkpoints, step_of
from headrace.run.stored import stored_numerics
from headrace.scheduling.buffer import FinishedGroup, TrajectoryGroupBuffer
from headrace.trainer.learner_step import LearnerStep
from headrace.trainer.recovery import learn_recorded
from headrace.trainer.setup import RunParts, UserObjects, assemble, numerics_of


@dataclass(frozen=True, slots=True)
class ReplayedStep:
    """One batch, trained once more."""

    step: int
    version: int
    metrics: dict[str, float]
    digest: str
    recorded: str | None
    """That of the weights that the run synced; None if it was killed before."""

    @property
    def same(self) -> bool | None:
        """Whether the weights are the run's, to the bit."""
        return None if self.recorded is None else self.digest == self.recorded


class Replay:
    """Of a run folder. Iterating trains; `groups(step)` shows what a batch was made of."""

    def __init__(self, run_dir: Path, until: int | None = None) -> None:
        self._ledger: LedgerReader = Ledger.read(run_dir)
        config = config_of(run_dir)
        self.config: RunConfig = resolve_objective(in_this_process(config))
        self.rounded_otherwise: list[str] = [
            str(change) for change in numeric_changes(stored_numerics(run_dir), numerics_of(self.config))
        ]
        """Why the weights of a deterministic run cannot be expected to be the same here; empty if they can."""
        batches = self._ledger.batches_from(0)
        last = max((record.step + (record.steps or 1) for record in batches), default=0)
        if until is not None and not 1 <= until <= max(last, 1):
            raise ConfigError(
                f"--until {until} is not a recorded step of {run_dir}, which has steps 1 to {last}; give one of "
                f"them, or leave --until out"
            )
        self._batches = [record for record in batches if until is None or record.step < until]
        gap = first_gap([(record.step, record.steps) for record in self._batches], 0)
        if gap:
            raise ConfigError(
                f"the ledger of {run_dir} has no batch of step {gap + 1}, but has later ones; put a copy back, or "
                f"replay what comes before with --until {gap}"
            )
        self.notes = self._missing_at_the_end(run_dir) if until is None else []
        """What a person should read."""
        if not self._batches or self._batches[0].step:
            raise ConfigError(
                f"{run_dir} has no record from its first step on; a run started from another one's checkpoint, "
                f"or whose ledger keeps only the last steps (ledger.keep_steps), cannot be replayed"
            )

    def _missing_at_the_end(self, run_dir: Path) -> list[str]:
        """Steps that a checkpoint contains, and the ledger does not."""
        last = self._batches[-1] if self._batches else None
        upto = last.step + (last.steps or 0) if last else 0
        saved = max(map(step_of, list_checkpoints(run_dir)), default=0)
        if saved <= upto or last is None:
            return []
        return [f"warning: the ledger ends at step {upto}, and there is a checkpoint of step {saved}"]

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[ReplayedStep]:
        parts = assemble(self.config, UserObjects(workflow=_never))  # nothing is rolled out: the run's own may be gone
        buffer = TrajectoryGroupBuffer(self.config)
        learner = LearnerStep(self.config, parts.backend, parts.objective, parts.policy)
        with asyncio.Runner() as runner:
            try:
                for record in self._batches:
                    yield runner.run(self._train(record, parts, buffer, learner))
            finally:
                runner.run(parts.engine.close())
                runner.run(parts.backend.close())
                self._ledger.close()

    async def _train(
        self, record: BatchRecord, parts: RunParts, buffer: TrajectoryGroupBuffer, learner: LearnerStep
    ) -> ReplayedStep:
        if record.version == 0:
            await parts.sync.sync(0)
        fresh, again = (self._groups(ids, buffer) for ids in (record.group_ids, record.again))
        await learn_recorded(learner, record, fresh, again)
        made = await learner.update(record.step)
        synced = await parts.sync.sync(record.version + 1)
        recorded = self._ledger.weight_sync(synced.version)
        return ReplayedStep(
            step=record.step + made,
            version=synced.version,
            metrics=learner.metrics.reduce(),
            digest=synced.digest,
            recorded=recorded.digest if recorded else None,
        )

    def _groups(self, group_ids: Sequence[int], buffer: TrajectoryGroupBuffer) -> list[FinishedGroup]:
        return [buffer.form(group_id, self._ledger.complete_group(group_id)) for group_id in group_ids]


async def _never(task: Task, model: Model) -> None:
    raise AssertionError("a replay rolls nothing out")
