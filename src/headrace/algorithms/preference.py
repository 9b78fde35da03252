"""Preference pairs: the best of a group against its worst, for objective "dpo"."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.config import DpoSection
from headrace.data.codec import JsonData
from headrace.data.episode import TrajectoryGroup
from headrace.data.sample import Sample, merge_steps

# why a group gives no pair, in the order in which it is asked
SKIP_REASONS: tuple[str, ...] = ("fewer_than_two", "multi_step", "tie", "small_gap", "different_prompts")


@dataclass(frozen=True, slots=True)
class PreferencePair(JsonData):
    """A chosen and a rejected Sample, of the same prompt."""

    chosen: Sample
    rejected: Sample
    task_id: str
    chosen_reward: float
    rejected_reward: float


def form_pairs(groups: Sequence[TrajectoryGroup], dpo: DpoSection) -> tuple[list[PreferencePair], dict[str, int]]:
    """At most one pair per group, and how many groups were skipped for each reason (0 where none)."""
    pairs: list[PreferencePair] = []
    skipped = dict.fromkeys(SKIP_REASONS, 0)
    for group in groups:
        formed = _form_pair(group, dpo)
        if isinstance(formed, str):
            skipped[formed] += 1
        else:
            pairs.append(formed)
    return pairs, skipped


def _form_pair(group: TrajectoryGroup, dpo: DpoSection) -> PreferencePair | str:
    """The group's pair, or the reason why it has none."""
    members = group.trajectories
    if len(members) < 2:
        return "fewer_than_two"
    if any(len(member.steps) != 1 for member in members):
        return "multi_step"
    rewards = group.rewards()  # raises where one is missing
    indices = range(len(members))
    # first among the best and last among the worst: two different ones even in a tie
    best, worst = max(indices, key=rewards.__getitem__), min(reversed(indices), key=rewards.__getitem__)
    if dpo.drop_ties and rewards[best] == rewards[worst]:
        return "tie"
    if rewards[best] - rewards[worst] < dpo.min_reward_gap:
        return "small_gap"
    if members[best].steps[0].prompt_ids != members[worst].steps[0].prompt_ids:
        return "different_prompts"
    return PreferencePair(
        _sample(group, best), _sample(group, worst), group.task_id, float(rewards[best]), float(rewards[worst])
    )


def _sample(group: TrajectoryGroup, index: int) -> Sample:
    (sample,) = merge_steps(group.trajectories[index], task_id=group.task_id, group_id=group.group_id)
    return sample
