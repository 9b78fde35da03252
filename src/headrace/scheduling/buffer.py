"""TrajectoryGroupBuffer: holds finished episodes until their group is complete, filters, and holds complete groups.

Bookkeeping without a clock: the trainer's loops and the simulator use the same class.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from headrace.algorithms.advantages.assign import trained_roles
from headrace.algorithms.filters import UNIFORM, drop_by_termination, drop_too_few, impute_names, reason_to_drop
from headrace.config import AgentLoopConfig
from headrace.data.codec import altered
from headrace.data.episode import Episode, Trajectory, TrajectoryGroup
from headrace.errors import WorkflowError
from headrace.registry import resolve
from headrace.utils.usercode import contained, reason_of


@dataclass(frozen=True, slots=True)
class FinishedGroup:
    """All episodes of one dispatched task, and the part of them to be trained."""

    group_id: int
    episodes: tuple[Episode, ...]
    groups: tuple[TrajectoryGroup, ...]
    kept: int
    """Episodes to be trained; 0 if the group was dropped."""
    dropped_because: str | None = None

    @property
    def failed(self) -> int:
        """Episodes that failed."""
        return sum(episode.failed for episode in self.episodes)

    @property
    def filtered(self) -> int:
        """Episodes that neither failed nor will be trained."""
        return len(self.episodes) - self.failed - self.kept

    @property
    def oldest_version(self) -> int | None:
        """The version of the oldest token to be trained; None if no policy sampled any."""
        steps = (s for group in self.groups for trajectory in group.trajectories for s in trajectory.steps)
        return min((min(step.versions) for step in steps if step.versions), default=None)

    @property
    def tokens(self) -> int:
        """Tokens of all model calls, including prompts."""
        steps = (s for episode in self.episodes for trajectory in episode.trajectories for s in trajectory.steps)
        return sum(len(step.prompt_ids) + len(step.response_ids) for step in steps)


Grouping = Callable[[Sequence[Episode]], Sequence[TrajectoryGroup]]
"""Which trajectories of one task's finished episodes are compared with each other."""


class TrajectoryGroupBuffer:
    """Holds episodes until their group is complete, and complete groups until they are trained.

    With `spill_dir`, complete groups in excess of `produce.spill_above_mb` are on disk.
    """

    def __init__(
        self, config: AgentLoopConfig, grouping: Grouping | None = None, spill_dir: Path | None = None
    ) -> None:
        """`grouping` is a function in place of the one that `workflow.grouping` names."""
        named = config.workflow.grouping
        self._filters = config.filters
        self._algorithm = config.algorithm
        self._order = config.produce.order
        self._reuse = config.produce.reuse
        self._most_used = config.produce.reuse * config.trainer.batch_size
        self._grouping: Grouping | None = grouping or (resolve("grouping", named) if named else None)
        self._hook_name = named or getattr(grouping, "__name__", repr(grouping))
        self._hook_timeout_s = config.trainer.hook_timeout_s
        self._partial: dict[int, list[Episode]] = {}
        self._complete = _Store(spill_dir, config.produce.spill_above_mb)
        self._used: dict[int, tuple[FinishedGroup, int]] = {}

    def add_episode(self, episode: Episode, group_size: int) -> FinishedGroup | None:
        """Add an episode. Returns its group if that is now complete."""
        episodes = self._partial.setdefault(episode.group_id, [])
        episodes.append(episode)
        if len(episodes) < group_size:
            return None
        del self._partial[episode.group_id]
        return self.add(episode.group_id, sorted(episodes, key=lambda e: e.rollout_idx))

    def add(self, group_id: int, episodes: Iterable[Episode]) -> FinishedGroup:
        """Add all episodes of a task. A group that filters drop is returned with the reason, but not held."""
        finished = self.form(group_id, episodes)
        if finished.dropped_because is None:
            self._complete.put(finished)
        return finished

    def form(self, group_id: int, episodes: Iterable[Episode]) -> FinishedGroup:
        """Group and filter episodes like `add`, without holding the result."""
        episodes = tuple(episodes)
        sound = [episode for episode in episodes if not episode.failed]
        kept = drop_by_termination(sound, self._filters.drop_terminations)
        groups = trained_roles(self._form([_numbered(episode) for episode in kept]), self._algorithm) if kept else []
        reason = reason_to_drop(groups, self._filters)
        if sound and not kept:
            reason = f"every episode ended by {', '.join(sorted({episode.termination for episode in sound}))}"
        elif kept and not groups:
            reason = "no trajectory of a trained role"
        elif kept and reason is not None and len(sound) < len(episodes):
            reason = _after_failures(reason, len(sound), len(episodes))
        enough = drop_too_few(groups, self._filters.min_trajectories)
        return FinishedGroup(group_id, episodes, enough, len(kept) if reason is None else 0, reason)

    def _form(self, episodes: Sequence[Episode]) -> Sequence[TrajectoryGroup]:
        """Group by role, or by the user's hook. A failing hook ends the run: no episode is at fault."""
        if self._grouping is None:
            return form_groups(episodes)
        doing = f'the grouping hook "{self._hook_name}" failed on task "{episodes[0].task_id}"'
        try:
            with contained("it", self._hook_timeout_s):
                groups = list(self._grouping(episodes))
        except Exception as cause:  # our own errors too: the message must name the hook
            raise WorkflowError(f"{doing}: {reason_of(cause)}") from cause
        wrong = [type(group).__name__ for group in groups if not isinstance(group, TrajectoryGroup)]
        if wrong:
            raise WorkflowError(f"{doing}: it must return TrajectoryGroups, got {wrong[0]}")
        return [replace(group, group_id=episodes[0].group_id) for group in groups]

    def __len__(self) -> int:
        """Complete groups that wait to be trained."""
        return len(self._complete)

    def __contains__(self, group_id: int) -> bool:
        return group_id in self._complete

    @property
    def partial_groups(self) -> int:
        """Groups with some finished and some missing episodes."""
        return len(self._partial)

    @property
    def spilled(self) -> int:
        """Complete groups on disk."""
        return self._complete.spilled

    def take(self, count: int, first: Iterable[int] = ()) -> list[FinishedGroup]:
        """Remove up to `count` complete groups: those named `first`, then by `produce.order`; sorted by dispatch."""
        chosen = [group_id for group_id in first if group_id in self._complete]
        for group_id in self._complete.ordered(self._order):
            if len(chosen) >= count:
                break
            if group_id not in chosen:
                chosen.append(group_id)
        return [self._complete.pop(group_id) for group_id in sorted(chosen)]

    @property
    def reusable(self) -> Collection[int]:
        """Trained groups that may be reused."""
        return self._used.keys()

    def retain(self, trained: Iterable[FinishedGroup]) -> None:
        """Hold trained groups that may be reused; of too many, the newest."""
        for group in trained:
            uses = self._used.pop(group.group_id, (group, 0))[1] + 1
            if uses < self._reuse:
                self._used[group.group_id] = (group, uses)
        for group_id in sorted(self._used)[: -self._most_used]:  # steps may not need all of them
            del self._used[group_id]

    def used(self) -> list[tuple[int, int]]:
        """Groups that may be reused: id, and how often they were trained."""
        return [(group_id, uses) for group_id, (_, uses) in self._used.items()]

    def restore_used(self, group: FinishedGroup, uses: int) -> None:
        """Hold a group that an earlier process trained `uses` times."""
        self._used[group.group_id] = (group, uses)

    def usable(self, is_stale: Callable[[FinishedGroup], bool]) -> int:
        """How many groups `take_used` could return."""
        return sum(not is_stale(group) for group, _ in self._used.values())

    def take_used(self, count: int, is_stale: Callable[[FinishedGroup], bool]) -> list[FinishedGroup]:
        """Up to `count` groups to reuse, the least used and newest first; discards stale ones."""
        self._used = {g: (group, uses) for g, (group, uses) in self._used.items() if not is_stale(group)}
        ranked = sorted(self._used, key=lambda g: (self._used[g][1], -g))
        return [self._used[group_id][0] for group_id in sorted(ranked[: max(count, 0)])]


_BYTES_PER_TOKEN = 200  # id, log-probabilities, version and their share of the text, as Python objects


class _Store:
    """Complete groups by id, in order of completion; above a memory limit, on disk."""

    def __init__(self, folder: Path | None, limit_mb: float) -> None:
        self._folder = folder
        self._limit = limit_mb * 1e6
        self._groups: dict[int, FinishedGroup | Path] = {}
        self._oldest: dict[int, int] = {}
        self._bytes = 0.0
        self.spilled = 0

    def __len__(self) -> int:
        return len(self._groups)

    def __contains__(self, group_id: int) -> bool:
        return group_id in self._groups

    def ordered(self, order: str) -> list[int]:
        if order == "newest":
            return list(reversed(self._groups))
        if order == "oldest_version":
            return sorted(self._groups, key=lambda group_id: self._oldest[group_id])
        return list(self._groups)

    def put(self, group: FinishedGroup) -> None:
        size = group.tokens * _BYTES_PER_TOKEN
        oldest = group.oldest_version
        self._oldest[group.group_id] = -1 if oldest is None else oldest
        if self._folder is not None and self._bytes + size > self._limit:
            self._groups[group.group_id] = self._write(group)
        else:
            self._groups[group.group_id] = group
            self._bytes += size

    def pop(self, group_id: int) -> FinishedGroup:
        held = self._groups.pop(group_id)
        del self._oldest[group_id]
        if isinstance(held, Path):
            self.spilled -= 1
            group: FinishedGroup = pickle.loads(held.read_bytes())
            held.unlink()
            return group
        self._bytes -= held.tokens * _BYTES_PER_TOKEN
        return held

    def _write(self, group: FinishedGroup) -> Path:
        assert self._folder is not None
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"group_{group.group_id}.pickle"
        path.write_bytes(pickle.dumps(group, protocol=pickle.HIGHEST_PROTOCOL))
        self.spilled += 1
        return path


def _after_failures(reason: str, sound: int, of: int) -> str:
    """The reason with the failed episodes first: those are what the user should fix."""
    failed = f"{of - sound} of {of} episodes failed"
    if reason != UNIFORM:
        return f"{failed}, which leaves {reason}"
    return f"{failed}, and {'one alone cannot be compared' if sound == 1 else 'the others have equal rewards'}"


def _numbered(episode: Episode) -> Episode:
    """The episode with `rollout_idx` on its trajectories, so that it survives grouping."""
    own = tuple(altered(trajectory, rollout_idx=episode.rollout_idx) for trajectory in episode.trajectories)
    return altered(episode, trajectories=own)


def form_groups(episodes: Sequence[Episode]) -> tuple[TrajectoryGroup, ...]:
    """Trajectories of one task, grouped by role."""
    members: dict[str, list[Trajectory]] = {}
    for episode in episodes:
        for trajectory in impute_names(episode.trajectories):
            members.setdefault(trajectory.name, []).append(trajectory)
    return tuple(
        TrajectoryGroup(episodes[0].task_id, name, tuple(trajectories), episodes[0].group_id, episodes[0].source)
        for name, trajectories in members.items()
    )


def group_by_step(episodes: Sequence[Episode]) -> list[TrajectoryGroup]:
    """A grouping hook: the n-th Steps of a role are compared with each other, each by its own reward."""
    members: dict[tuple[str, int], list[Trajectory]] = {}
    for episode in episodes:
        for trajectory in impute_names(episode.trajectories):
            for index, step in enumerate(trajectory.steps):
                reward = step.reward if step.reward is not None else trajectory.reward
                alone = replace(trajectory, steps=(step,), reward=reward)
                members.setdefault((trajectory.name, index), []).append(alone)
    first = episodes[0]
    return [
        TrajectoryGroup(first.task_id, name, tuple(trajectories), first.group_id, first.source)
        for (name, _), trajectories in members.items()
    ]
