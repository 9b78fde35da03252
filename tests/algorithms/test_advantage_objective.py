"""What one optimizer step trains on: whose advantages a row has, and what is taken off a reward."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import pytest

from fakes import char_chat, step
from headrace.algorithms.objectives import AdvantageObjective, Prepared
from headrace.config import AlgorithmSection, KlSection, RoleSection, RunConfig, SftSection
from headrace.data.episode import Step, Trajectory, TrajectoryGroup
from headrace.data.sample import Sample, TrainBatch
from headrace.data.sampler import TaskSampler
from headrace.data.task import Task

GAE = AlgorithmSection(estimator="gae", value_head=True)
HINT = ({"role": "user", "content": "the answer is 4"},)


class FakeBackend:
    """Values are all 0.25; the teacher gives every token -0.5, the reference every target -1.5."""

    async def compute_values(self, batch: TrainBatch) -> list[list[float]]:
        return [[0.25] * len(sample.loss_mask) for sample in batch.samples]

    async def teacher_logprobs(self, steps: Sequence[Step]) -> list[list[float]]:
        return [[-0.5] * len(step.response_ids) for step in steps]

    async def compute_logprobs(self, batch: TrainBatch, of: str = "policy") -> list[list[float]]:
        assert of == "reference"
        return [[-1.5] * len(sample.loss_mask) for sample in batch.samples]


def member(reward: float | None, role: str = "agent", **fields: Any) -> Trajectory:
    """Two response tokens, sampled with log-probabilities -1 and -2."""
    return Trajectory((step([1], [2, 3], **fields),), role, reward)


def group(*members: Trajectory, role: str = "agent") -> TrajectoryGroup:
    return TrajectoryGroup("t", role, members)


async def prepare(algorithm: AlgorithmSection, *groups: TrajectoryGroup) -> Prepared:
    backend: Any = FakeBackend()
    return await AdvantageObjective(RunConfig(algorithm=algorithm), backend, char_chat()).prepare(groups, 0)


def by_role(prepared: Prepared) -> dict[str, list[Sample]]:
    rows: dict[str, list[Sample]] = {}
    assert prepared.part is not None
    for sample in prepared.part.batch.samples:
        rows.setdefault(sample.role, []).append(sample)
    return rows


# ---- the value head and others ---------------------------------------------------------------------------------------


async def test_rows_under_gae_get_advantages_and_returns_from_the_value_head() -> None:
    (row,) = by_role(await prepare(GAE, group(member(1.0))))["agent"]
    assert row.advantages == pytest.approx((0.95 * 0.75, 0.75))
    assert row.returns == pytest.approx((0.25 + 0.95 * 0.75, 1.0))


@pytest.mark.parametrize("reward", [None, 1.0])
async def test_gae_leaves_the_advantages_of_a_workflow_alone(reward: float | None) -> None:
    own = group(member(reward, "tutor", advantage=(0.5, -0.5)), role="tutor")
    algorithm = GAE.model_copy(update={"use_precomputed_advantage": True})
    rows = by_role(await prepare(algorithm, own, group(member(1.0))))
    assert rows["tutor"][0].advantages == (0.5, -0.5) and rows["tutor"][0].returns is None
    assert rows["agent"][0].returns is not None


async def test_gae_overwrites_the_advantages_of_a_workflow_when_they_are_off() -> None:
    with pytest.warns(UserWarning, match="are overwritten by the estimator"):
        rows = by_role(await prepare(GAE, group(member(1.0, advantage=(0.5, -0.5)))))
    assert rows["agent"][0].advantages == pytest.approx((0.95 * 0.75, 0.75))


async def test_gae_leaves_the_advantages_of_a_teacher_alone() -> None:
    taught = group(member(1.0, "student", teacher_messages=HINT), role="student")
    rows = by_role(await prepare(GAE, taught, group(member(1.0))))
    assert rows["student"][0].advantages == (0.5, 1.5) and rows["student"][0].returns is None
    assert rows["agent"][0].returns is not None


# ---- divergence off the reward ---------------------------------------------------------------------------------------

PENALTY = AlgorithmSection(estimator="reinforce", kl=KlSection(coef=0.1, kind="abs", where="reward"))


async def test_the_divergence_in_the_reward_is_reported_per_trajectory() -> None:
    prepared = await prepare(PENALTY, group(member(1.0), member(0.0)))
    # |-1 + 1.5| + |-2 + 1.5| = 1
    assert [row.advantages for row in by_role(prepared)["agent"]] == [pytest.approx((r, r)) for r in (0.9, -0.1)]
    assert prepared.metrics.reduce() == {"reward/kl_to_reference": 1.0}


async def test_a_trajectory_in_two_groups_is_penalised_once_in_each() -> None:
    shared = member(1.0)
    prepared = await prepare(PENALTY, group(shared), group(shared))
    assert [row.advantages[0] for row in by_role(prepared)["agent"]] == pytest.approx([0.9, 0.9])


async def test_groups_that_no_reward_trains_need_none_for_the_divergence() -> None:
    algorithm = PENALTY.model_copy(
        update={"use_precomputed_advantage": True, "roles": {"student": RoleSection(estimator="distill")}}
    )
    own = group(member(None, "tutor", advantage=(0.5, -0.5)), role="tutor")
    prepared = await prepare(algorithm, group(member(None, "student"), role="student"), own, group(member(1.0)))
    rows = by_role(prepared)
    assert rows["student"][0].advantages == (0.5, 1.5) and rows["tutor"][0].advantages == (0.5, -0.5)
    assert rows["agent"][0].advantages == pytest.approx((0.9, 0.9))


async def test_a_batch_whose_rewards_nobody_reads_warns_that_the_divergence_does_nothing() -> None:
    with pytest.warns(UserWarning, match=r'use algorithm\.kl\.where = "loss"'):
        prepared = await prepare(PENALTY, group(member(None, teacher_messages=HINT)))
    assert prepared.metrics.reduce() == {}


async def test_advantages_to_be_overwritten_may_be_of_the_wrong_length() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rows = by_role(await prepare(PENALTY, group(member(1.0, advantage=(0.5,)))))
    assert rows["agent"][0].advantages == pytest.approx((0.9, 0.9))


# ---- a supervised term -----------------------------------------------------------------------------------------------


async def test_demonstrations_beside_rollouts_are_a_part_of_their_own_area() -> None:
    talk = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"})
    config = RunConfig(
        algorithm=AlgorithmSection(estimator="reinforce"), sft=SftSection(coef=0.5, tasks="x", batch_size=1)
    )
    backend: Any = FakeBackend()
    sampler = TaskSampler([Task("d", talk)], 1)
    objective = AdvantageObjective(config, backend, char_chat(), sampler)
    rollouts = (await objective.prepare([group(member(1.0))], 0)).part
    assert rollouts is not None
    completion = objective.complete([rollouts], 0)
    (demonstrations,) = completion.parts
    assert (rollouts.area, demonstrations.area, demonstrations.algorithm.loss) == ("policy", "sft", "cross_entropy")
    tokens = sum(sample.trained_tokens for sample in demonstrations.batch.samples)
    assert demonstrations.batch.weights[0] * completion.grad_scale == pytest.approx(0.5 / tokens)
