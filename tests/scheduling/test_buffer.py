"""The buffer: episodes become whole groups, filtered, handed out in order, on disk if they are many."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fakes import episode, step, trajectory
from headrace.config import (
    AlgorithmSection,
    FilterSection,
    ProduceSection,
    RoleSection,
    RunConfig,
    TrainerSection,
    WorkflowSection,
)
from headrace.data.episode import Episode, Step, TerminationReason, Trajectory, TrajectoryGroup
from headrace.errors import DataError, WorkflowError
from headrace.scheduling.buffer import FinishedGroup, TrajectoryGroupBuffer, form_groups, group_by_step

FAILED = episode(1.0, error="broke")


def buffer(algorithm: AlgorithmSection | None = None, grouping: Any = None, **filters: Any) -> TrajectoryGroupBuffer:
    config = RunConfig(filters=FilterSection(**filters), algorithm=algorithm or AlgorithmSection())
    return TrajectoryGroupBuffer(config, grouping)


def test_trajectories_are_grouped_by_role() -> None:
    episodes = [
        Episode("t", (trajectory(1.0, "solver"), trajectory(0.5, "critic")), group_id=4, source="s"),
        Episode("t", (trajectory(0.0, "solver"),), group_id=4, source="s"),
        Episode("t", (trajectory(0.25, "critic"), trajectory(0.75, "solver")), group_id=4, source="s"),
    ]
    groups = form_groups(episodes)
    assert {group.name: group.rewards() for group in groups} == {"solver": (1.0, 0.0, 0.75), "critic": (0.5, 0.25)}
    assert {(group.task_id, group.group_id, group.source) for group in groups} == {("t", 4, "s")}


def test_several_trajectories_of_one_role_in_one_episode_are_all_compared() -> None:
    (group,) = form_groups([episode(1.0, 0.0), episode(0.5)])
    assert group.rewards() == (1.0, 0.0, 0.5)


def test_failed_episodes_are_left_out_and_counted() -> None:
    finished = buffer().add(0, [episode(1.0), FAILED, episode(0.0)])
    assert finished.groups[0].rewards() == (1.0, 0.0)
    assert finished.failed == 1 and len(finished.episodes) == 3
    assert finished.dropped_because is None


def test_a_group_whose_episodes_all_failed_is_dropped() -> None:
    kept = buffer()
    assert kept.add(0, [FAILED, FAILED]).dropped_because == "every episode failed"
    kept.add(1, [episode(1.0)])
    assert [item.group_id for item in kept.take(1)] == [1]


@pytest.mark.parametrize("rewards", [(1.0, 1.0, 1.0), (0.0, 0.0), (0.5,)])
def test_a_uniform_group_is_dropped_when_asked_for(rewards: tuple[float, ...]) -> None:
    episodes = [episode(reward) for reward in rewards]
    assert buffer(drop_uniform=True).add(0, episodes).dropped_because == "uniform rewards"
    assert buffer().add(0, episodes).dropped_because is None


def test_a_failed_episode_does_not_save_a_uniform_group() -> None:
    lone = buffer(drop_uniform=True).add(0, [episode(0.0), FAILED])
    assert lone.dropped_because == "1 of 2 episodes failed, and one alone cannot be compared"
    equal = buffer(drop_uniform=True).add(0, [episode(0.0), episode(0.0), FAILED])
    assert equal.dropped_because == "1 of 3 episodes failed, and the others have equal rewards"


def test_a_group_is_kept_when_one_of_its_roles_differs() -> None:
    episodes = [Episode("t", (trajectory(1.0, "solver"), trajectory(reward, "critic"))) for reward in (0.0, 1.0)]
    assert buffer(drop_uniform=True).add(0, episodes).dropped_because is None


def test_a_mixture_of_set_and_missing_rewards_names_the_group() -> None:
    with pytest.raises(DataError, match='group of task "t", role "agent"'):
        buffer(drop_uniform=True).add(0, [episode(1.0), Episode("t", (Trajectory(()),))])


def test_episodes_that_ended_for_a_dropped_reason_are_left_out() -> None:
    cut = episode(1.0, termination=TerminationReason.LENGTH)
    finished = buffer(drop_terminations=("length",)).add(0, [cut, episode(0.0), episode(0.5)])
    assert finished.groups[0].rewards() == (0.0, 0.5) and finished.failed == 0
    assert buffer(drop_terminations=("length",)).add(0, [cut, cut]).dropped_because == "every episode ended by length"
    assert buffer().add(0, [cut, cut]).dropped_because is None


def test_a_group_that_is_left_too_small_is_dropped() -> None:
    finished = buffer(min_trajectories=2).add(0, [episode(1.0), FAILED])
    assert finished.dropped_because == "1 of 2 episodes failed, which leaves fewer than 2 trajectories"
    assert buffer(min_trajectories=2).add(0, [episode(1.0), episode(0.0)]).dropped_because is None


def test_a_role_that_is_not_trained_is_left_out() -> None:
    algorithm = AlgorithmSection(roles={"critic": RoleSection(train=False)})
    both = Episode("t", (trajectory(1.0, "solver"), trajectory(0.5, "critic")))
    assert [group.name for group in buffer(algorithm).add(0, [both]).groups] == ["solver"]
    only = buffer(algorithm).add(0, [Episode("t", (trajectory(0.5, "critic"),))])
    assert only.dropped_because == "no trajectory of a trained role"


def test_an_own_grouping_says_what_is_compared() -> None:
    def all_together(episodes: Sequence[Episode]) -> list[TrajectoryGroup]:
        return [TrajectoryGroup("t", "all", tuple(t for one in episodes for t in one.trajectories))]

    both = Episode("t", (trajectory(1.0, "solver"), trajectory(0.5, "critic")))
    (group,) = buffer(grouping=all_together).add(0, [both, FAILED, both]).groups
    assert (group.name, group.rewards()) == ("all", (1.0, 0.5, 1.0, 0.5))


def test_grouping_by_step_compares_the_same_steps_by_their_own_rewards() -> None:
    def two_steps(first: float, second: float | None) -> Episode:
        return Episode(
            "t", (Trajectory((step([1], [2], reward=first), step([1, 2], [3], reward=second)), reward=0.75),)
        )

    groups = group_by_step([two_steps(1.0, None), two_steps(0.0, 0.25)])
    assert [group.rewards() for group in groups] == [(1.0, 0.0), (0.75, 0.25)]
    assert [[len(t.steps) for t in group.trajectories] for group in groups] == [[1, 1], [1, 1]]


def test_a_grouping_hook_that_fails_is_named_with_its_cause() -> None:
    def by_score(episodes: Sequence[Episode]) -> list[TrajectoryGroup]:
        return [{}["score"]]

    def by_reward(episodes: Sequence[Episode]) -> list[TrajectoryGroup]:
        raise DataError("no reward")  # an error of ours does not say where it came from either

    with pytest.raises(
        WorkflowError, match='grouping hook "by_score" failed on task "t": KeyError: \'score\''
    ) as raised:
        buffer(grouping=by_score).add(0, [episode(1.0)])
    assert isinstance(raised.value.__cause__, KeyError)
    with pytest.raises(WorkflowError, match='grouping hook "by_reward" failed on task "t": DataError: no reward'):
        buffer(grouping=by_reward).add(0, [episode(1.0)])


@pytest.mark.parametrize("returned", [None, [(trajectory(1.0),)]])
def test_a_grouping_hook_must_return_groups(returned: Any) -> None:
    with pytest.raises(WorkflowError, match='grouping hook "<lambda>" failed on task "t"'):
        buffer(grouping=lambda episodes: returned).add(0, [episode(1.0)])


def test_a_grouping_hook_is_called_by_the_name_that_the_run_file_gives_it() -> None:
    config = RunConfig(workflow=WorkflowSection(grouping="my_agent.py:by_score"))
    with pytest.raises(WorkflowError, match=r'grouping hook "my_agent\.py:by_score" failed'):
        TrajectoryGroupBuffer(config, lambda episodes: 1 / 0).add(0, [episode(1.0)])  # type: ignore[return-value]


# ---- from episodes to groups -----------------------------------------------------------------------------------------


def of_group(group_id: int, rollout_idx: int, reward: float = 1.0, **fields: Any) -> Episode:
    return episode(reward, group_id=group_id, rollout_idx=rollout_idx, **fields)


def test_a_group_is_complete_when_its_last_episode_comes() -> None:
    kept = buffer()
    assert kept.add_episode(of_group(4, 2), 3) is None and kept.partial_groups == 1
    assert kept.add_episode(of_group(5, 0), 3) is None and kept.partial_groups == 2
    assert kept.add_episode(of_group(4, 0), 3) is None
    assert len(kept) == 0 and 4 not in kept
    finished = kept.add_episode(of_group(4, 1), 3)
    assert finished is not None and finished.group_id == 4 and finished.kept == 3
    assert [one.rollout_idx for one in finished.episodes] == [0, 1, 2]
    assert len(kept) == 1 and 4 in kept and kept.partial_groups == 1


def test_a_group_that_is_dropped_when_complete_leaves_nothing_behind() -> None:
    kept = buffer(drop_uniform=True)
    assert kept.add_episode(of_group(4, 0), 2) is None
    finished = kept.add_episode(of_group(4, 1), 2)
    assert finished is not None and finished.dropped_because == "uniform rewards"
    assert (finished.kept, finished.filtered, finished.failed) == (0, 2, 0)
    assert len(kept) == 0 and kept.partial_groups == 0


def test_failed_filtered_and_kept_episodes_add_up() -> None:
    cut = episode(1.0, termination=TerminationReason.LENGTH)
    finished = buffer(drop_terminations=("length",)).add(0, [episode(1.0), FAILED, cut, episode(0.0)])
    assert (finished.kept, finished.failed, finished.filtered) == (2, 1, 1)


# ---- hand-out --------------------------------------------------------------------------------------------------------


def sampled(*versions: int) -> Episode:
    """An episode whose tokens were sampled under these versions."""
    return Episode("t", (Trajectory((step([1], range(2, 2 + len(versions)), versions=versions),), reward=1.0),))


def ordered(order: Any, spill_dir: Path | None = None, **produce: Any) -> TrajectoryGroupBuffer:
    return TrajectoryGroupBuffer(RunConfig(produce=ProduceSection(order=order, **produce)), spill_dir=spill_dir)


def ids(groups: Sequence[FinishedGroup]) -> list[int]:
    return [group.group_id for group in groups]


@pytest.mark.parametrize(
    ("order", "first", "second"),
    [("fifo", [2, 5], [0, 9]), ("newest", [0, 9], [2, 5]), ("oldest_version", [5, 9], [0, 2])],
)
def test_the_order_says_which_groups_come_first(order: str, first: list[int], second: list[int]) -> None:
    kept = ordered(order)
    for group_id, version in ((5, 1), (2, 3), (9, 2), (0, 3)):
        kept.add(group_id, [sampled(version + 1, version)])
    assert ids(kept.take(2)) == first, "sorted by their dispatch"
    assert ids(kept.take(5)) == second and len(kept) == 0


def test_the_oldest_token_of_any_episode_is_the_age_of_a_group() -> None:
    finished = buffer().add(0, [sampled(3, 4), sampled(4, 2), sampled(5)])
    assert finished.oldest_version == 2
    assert buffer().add(0, [Episode("t", (Trajectory((Step((1,), (2,)),), reward=1.0),))]).oldest_version is None


def test_groups_named_first_are_taken_whatever_the_order() -> None:
    kept = ordered("fifo")
    for group_id in (5, 2, 9, 0):
        kept.add(group_id, [episode(1.0)])
    assert ids(kept.take(2, first=[0])) == [0, 5]
    assert ids(kept.take(1, first=[9, 2])) == [2, 9], "all of them, even if they are more"
    kept.add(7, [episode(1.0)])
    assert ids(kept.take(1, first=[3])) == [7], "one that is not there is passed over"


# ---- waiting on disk -------------------------------------------------------------------------------------------------


def test_groups_beyond_the_memory_limit_wait_on_disk_and_come_back_the_same(tmp_path: Path) -> None:
    room_for_two = 2 * 200 * 4 / 1e6
    kept = ordered("fifo", tmp_path / "spill", spill_above_mb=room_for_two)
    added = [kept.add(group_id, [sampled(group_id, 1, 2)]) for group_id in range(5)]
    assert kept.spilled == 3 and len(kept) == 5 and 4 in kept
    assert len(list((tmp_path / "spill").iterdir())) == 3
    assert kept.take(3) == added[:3] and kept.spilled == 2
    again = kept.add(7, [sampled(1, 1, 1)])
    assert kept.spilled == 2, "there is room again"
    assert kept.take(3) == [*added[3:], again]
    assert kept.spilled == 0 and list((tmp_path / "spill").iterdir()) == []


def test_a_group_on_disk_keeps_its_place_in_the_order(tmp_path: Path) -> None:
    kept = ordered("oldest_version", tmp_path, spill_above_mb=1e-6)
    for group_id, version in enumerate((3, 1, 2)):
        kept.add(group_id, [sampled(version)])
    assert kept.spilled == 3
    assert [ids(kept.take(1)) for _ in range(3)] == [[1], [2], [0]]


def test_without_a_folder_nothing_is_written() -> None:
    kept = ordered("fifo", spill_above_mb=1e-6)
    kept.add(0, [sampled(1)])
    assert kept.spilled == 0 and len(kept) == 1


# ---- training a group again ------------------------------------------------------------------------------------------


def never(group: FinishedGroup) -> bool:
    return False


def test_a_group_may_be_trained_as_often_as_reuse_says() -> None:
    kept = ordered("fifo", reuse=3)
    added = [kept.add(group_id, [sampled(1)]) for group_id in range(2)]
    kept.retain(kept.take(2))
    assert sorted(kept.reusable) == [0, 1]
    for _ in range(2):
        again = kept.take_used(2, never)
        assert again == added
        kept.retain(again)
    assert kept.take_used(2, never) == [] and not kept.reusable


def test_without_reuse_a_trained_group_is_forgotten() -> None:
    kept = ordered("fifo")
    kept.add(0, [sampled(1)])
    kept.retain(kept.take(1))
    assert kept.take_used(1, never) == []


def test_the_least_used_and_newest_groups_are_trained_again_first() -> None:
    kept = ordered("fifo", reuse=4)
    for group_id in range(4):
        kept.add(group_id, [sampled(1)])
    kept.retain(kept.take(4))
    assert ids(kept.take_used(2, never)) == [2, 3]
    kept.retain(kept.take_used(2, never))
    assert ids(kept.take_used(3, never)) == [0, 1, 3]


def test_a_group_that_has_grown_too_old_is_not_trained_again() -> None:
    kept = ordered("fifo", reuse=2)
    for group_id in range(3):
        kept.add(group_id, [sampled(group_id)])
    kept.retain(kept.take(3))
    assert ids(kept.take_used(3, lambda group: group.group_id == 1)) == [0, 2]
    assert sorted(kept.reusable) == [0, 2]


def test_no_more_used_groups_are_kept_than_could_be_trained_again() -> None:
    kept = TrajectoryGroupBuffer(
        RunConfig(produce=ProduceSection(reuse=3), trainer=TrainerSection(batch_size=4, max_staleness=2))
    )
    for group_id in range(50):
        kept.add(group_id, [sampled(1)])
        kept.retain(kept.take(1))  # and none is ever trained again
    assert sorted(kept.reusable) == list(range(38, 50))
