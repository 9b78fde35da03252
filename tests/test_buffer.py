"""The buffer: whole groups, filtered, in the order of their dispatch."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from fakes import episode, step, trajectory
from headrace.config import AlgorithmSection, FilterSection, RoleSection, RunConfig, WorkflowSection
from headrace.data.episode import Episode, TerminationReason, Trajectory, TrajectoryGroup
from headrace.errors import DataError, WorkflowError
from headrace.pipeline.buffer import TrajectoryGroupBuffer, form_groups, group_by_step

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


async def test_a_group_whose_episodes_all_failed_is_dropped() -> None:
    kept = buffer()
    assert kept.add(0, [FAILED, FAILED]).dropped_because == "every episode failed"
    kept.add(1, [episode(1.0)])
    assert [item.group_id for item in await kept.take(1)] == [1]


@pytest.mark.parametrize("rewards", [(1.0, 1.0, 1.0), (0.0, 0.0), (0.5,)])
async def test_a_uniform_group_is_dropped_when_asked_for(rewards: tuple[float, ...]) -> None:
    episodes = [episode(reward) for reward in rewards]
    assert buffer(drop_uniform=True).add(0, episodes).dropped_because == "uniform rewards"
    assert buffer().add(0, episodes).dropped_because is None


def test_a_failed_episode_does_not_save_a_uniform_group() -> None:
    assert buffer(drop_uniform=True).add(0, [episode(0.0), FAILED]).dropped_because == "uniform rewards"


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
    assert finished.dropped_because == "fewer than 2 trajectories"
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


async def test_take_waits_until_there_are_enough_groups() -> None:
    kept = buffer(drop_uniform=True)
    taken = asyncio.create_task(kept.take(2))
    for group_id, rewards in enumerate([(1.0, 0.0), (1.0, 1.0), (0.5, 0.0)]):  # the second is dropped
        await asyncio.sleep(0)
        assert not taken.done()
        kept.add(group_id, [episode(reward) for reward in rewards])
    assert [item.group_id for item in await asyncio.wait_for(taken, 1)] == [0, 2]


async def test_groups_come_in_the_order_of_their_dispatch_and_once() -> None:
    kept = buffer()
    for group_id in (5, 2, 9, 0):
        kept.add(group_id, [episode(1.0)])
    assert [item.group_id for item in await kept.take(3)] == [0, 2, 5]
    kept.add(7, [episode(1.0)])
    assert [item.group_id for item in await kept.take(2)] == [7, 9]
