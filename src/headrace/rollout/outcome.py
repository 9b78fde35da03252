"""From what a workflow returned, or raised, to the episode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from headrace.data.episode import Episode, FinishReason, TerminationReason, Trajectory, is_number
from headrace.data.task import Task
from headrace.errors import WorkflowError
from headrace.rollout.model_client import Model
from headrace.rollout.workflow import Outcome


@dataclass(frozen=True, slots=True)
class RolloutSpec:
    """Which rollout this is: everything that its random numbers depend on."""

    task: Task
    group_id: int
    rollout_idx: int
    seed: int


def to_episode(outcome: Outcome, model: Model, spec: RolloutSpec) -> Episode:
    """The episode of what a workflow returned."""
    identity: dict[str, Any] = {
        "task_id": spec.task.id,
        "group_id": spec.group_id,
        "rollout_idx": spec.rollout_idx,
        "seed": spec.seed,
        "source": spec.task.source,
    }
    diverged = {"diverged_prefixes": float(model.diverged_prefixes)} if model.diverged_prefixes else {}
    # of a model behind a URL, which counts its tokens and does not return them
    if model.spending.tokens > model.returned_tokens():
        diverged["response_tokens"] = float(model.spending.tokens)
    if isinstance(outcome, Episode):
        episode = replace(outcome, metrics={**diverged, **outcome.metrics}, **identity)
    else:
        trajectories = _to_trajectories(outcome, model)
        cut = any(t.steps and t.steps[-1].finish_reason != FinishReason.STOP for t in trajectories)
        reason = model.spending.met or (TerminationReason.LENGTH if cut else TerminationReason.DONE)
        episode = Episode(trajectories=tuple(trajectories), termination=reason, metrics=diverged, **identity)
    if not episode.failed and not any(t.steps for t in episode.trajectories):
        raise WorkflowError("the workflow made no model call and returned no steps, so there is nothing to train")
    return episode


def _to_trajectories(outcome: Outcome, model: Model) -> list[Trajectory]:
    if outcome is None:
        return model.trajectories()
    if is_number(outcome):
        return model.trajectories(float(outcome))  # type: ignore[arg-type]
    found: Sequence[Any] = outcome if isinstance(outcome, list) else [outcome]
    wrong = [type(item).__name__ for item in found if not isinstance(item, Trajectory)]
    if wrong:
        raise WorkflowError(
            "a workflow returns an Episode, a Trajectory, a list of Trajectories, a number or None, got "
            f"{'a list with ' if isinstance(outcome, list) else ''}{wrong[0]}"
        )
    return list(found)


def failed_episode(spec: RolloutSpec, model: Model, reason: TerminationReason, error: str) -> Episode:
    """An episode that ended with an error; what was said until then is kept."""
    return Episode(
        task_id=spec.task.id,
        trajectories=tuple(model.trajectories()),
        group_id=spec.group_id,
        rollout_idx=spec.rollout_idx,
        seed=spec.seed,
        source=spec.task.source,
        termination=reason,
        is_correct=False,
        error=error,
    )
