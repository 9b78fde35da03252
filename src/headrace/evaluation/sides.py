"""Two sides on the same tasks, from ledgers: which tasks flipped, and the paired difference with its interval.

A side is an evaluation of a set at a step, or what was trained in some steps; of one run or of two. Only summaries are
read, no messages, so that it takes no longer for long episodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from headrace.data.codec import JsonData
from headrace.errors import ConfigError
from headrace.evaluation.compare import Difference, difference, mean_change
from headrace.evaluation.results_file import TaskScore
from headrace.ledger import LedgerReader

_RIGHT = 0.5  # share of right attempts from which on a task counts as right


@dataclass(frozen=True, slots=True)
class SideEpisode(JsonData):
    """An episode of a side, by where it is found: its number in `eval_episodes`, or its group and rollout."""

    eval_episode_id: int | None
    group_id: int
    rollout_idx: int
    reward: float
    right: bool
    failed: bool


@dataclass(frozen=True, slots=True)
class SideTask(JsonData):
    """A task of one side, with all attempts at it."""

    id: str
    source: str
    episodes: tuple[SideEpisode, ...]

    @property
    def score(self) -> TaskScore:
        """What the attempts came to; a failed one is wrong."""
        right, failed = sum(one.right for one in self.episodes), sum(one.failed for one in self.episodes)
        reward = sum(one.reward for one in self.episodes) / len(self.episodes)
        return TaskScore(self.id, self.source, len(self.episodes), right, failed, reward)


@dataclass(frozen=True, slots=True)
class TaskChange(JsonData):
    """A task on both sides. `flip` is "fixed" (wrong, then right), "broken" (right, then wrong) or None.

    With several attempts, a task is right if at least half of them are.
    """

    id: str
    source: str
    first: float
    second: float
    first_reward: float
    second_reward: float
    flip: str | None
    first_episodes: tuple[SideEpisode, ...]
    second_episodes: tuple[SideEpisode, ...]


@dataclass(frozen=True, slots=True)
class MeanChange(JsonData):
    """A paired difference of means, with a 95% interval (bootstrap over tasks)."""

    first: float
    second: float
    difference: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class SideComparison(JsonData):
    """The second side against the first, over the tasks that both have.

    `pass_rate` is about the share of right attempts, `reward` about the mean reward. `fixed` and `broken` count flips.
    `tasks` come broken ones first, then fixed ones, then by how much their reward changed.
    """

    tasks_in_common: int
    only_first: int
    only_second: int
    pass_rate: Difference
    reward: MeanChange
    fixed: int
    broken: int
    tasks: tuple[TaskChange, ...]


def evaluation_side(reader: LedgerReader, step: int, name: str) -> dict[str, SideTask]:
    """The evaluation of a set after so many steps, by task."""
    rows = reader.rows(
        "SELECT e.task_id, e.source, e.eval_episode_id, e.group_id, e.rollout_idx, e.reward, e.is_correct, e.error "
        "FROM eval_episodes e JOIN evaluations v USING (evaluation_id) WHERE v.step = ? AND v.name = ? "
        "ORDER BY e.eval_episode_id",
        (step, name),
    )
    if not rows:
        known = ", ".join(f'"{found.name}" at step {found.step}' for found in reader.evaluations()[-5:]) or "nothing"
        raise ConfigError(f'{reader.path} has no evaluation of "{name}" at step {step}; it has {known}')
    return _by_task(rows)


def training_side(reader: LedgerReader, first_step: int, end_step: int | None = None) -> dict[str, SideTask]:
    """What ended (trained or not) at the steps, by task; steps count those made before, as the tables do."""
    end = first_step + 1 if end_step is None else end_step
    rows = reader.rows(
        "SELECT g.task_id, g.source, NULL, e.group_id, e.rollout_idx, e.reward, e.is_correct, e.error "
        "FROM groups g JOIN episodes e USING (group_id) WHERE g.step >= ? AND g.step < ? "
        "AND e.state IN ('finished', 'failed') ORDER BY e.group_id, e.rollout_idx",
        (first_step, end),
    )
    if not rows:
        raise ConfigError(f"{reader.path} has no episodes of step {first_step + 1}; choose another step")
    return _by_task(rows)


def compare_sides(first: Mapping[str, SideTask], second: Mapping[str, SideTask], name: str = "") -> SideComparison:
    """The tasks that both have, compared pair by pair."""
    shared = [task_id for task_id in first if task_id in second]
    if not shared:
        raise ConfigError(
            f"both sides have no task in common (one has {len(first)}, the other {len(second)}); "
            "compare evaluations of one set, or steps that trained the same tasks"
        )
    pairs = [(first[task_id].score, second[task_id].score) for task_id in shared]
    changes = [_change(first[task_id], second[task_id]) for task_id in shared]
    flips = [change.flip for change in changes]
    return SideComparison(
        tasks_in_common=len(shared),
        only_first=len(first) - len(shared),
        only_second=len(second) - len(shared),
        pass_rate=difference(name, None, pairs),
        reward=MeanChange(*mean_change([a.reward for a, _ in pairs], [b.reward for _, b in pairs])),
        fixed=flips.count("fixed"),
        broken=flips.count("broken"),
        tasks=tuple(sorted(changes, key=_order)),
    )


def _change(first: SideTask, second: SideTask) -> TaskChange:
    one, other = first.score, second.score
    was, is_now = one.share >= _RIGHT, other.share >= _RIGHT
    flip = None if was == is_now else "fixed" if is_now else "broken"
    shares = (one.share, other.share, one.reward, other.reward)
    return TaskChange(first.id, first.source, *shares, flip, first.episodes, second.episodes)


def _order(change: TaskChange) -> tuple[Any, ...]:
    return (
        {"broken": 0, "fixed": 1}.get(change.flip or "", 2),
        -abs(change.second_reward - change.first_reward),
        change.id,
    )


def _by_task(rows: Iterable[tuple[Any, ...]]) -> dict[str, SideTask]:
    found: dict[str, list[SideEpisode]] = {}
    sources: dict[str, str] = {}
    for task_id, source, number, group_id, rollout_idx, reward, is_correct, error in rows:
        failed, value = error is not None, reward or 0.0
        right = not failed and (value >= 1.0 if is_correct is None else bool(is_correct))
        episode = SideEpisode(number, group_id, rollout_idx, 0.0 if failed else value, right, failed)
        found.setdefault(str(task_id), []).append(episode)
        sources.setdefault(str(task_id), source)
    return {task_id: SideTask(task_id, sources[task_id], tuple(episodes)) for task_id, episodes in found.items()}
