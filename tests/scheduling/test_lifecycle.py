"""The life of a group: one method per transition, and every book agrees after each."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes import episode, examples
from headrace.config import FilterSection, LedgerSection, ProduceSection, RolloutSection, RunConfig, TrainerSection
from headrace.data.sampler import TaskSampler
from headrace.data.task import Task
from headrace.ledger import Ledger
from headrace.run.journal import RunJournal
from headrace.run.ledger_journal import LedgerJournal
from headrace.scheduling.buffer import FinishedGroup, TrajectoryGroupBuffer
from headrace.scheduling.coordinator import SyncCoordinator
from headrace.scheduling.lifecycle import GroupLifecycle, LiveGroup
from headrace.scheduling.staleness import Count, Drop, StalenessPolicy
from headrace.weights.base import SyncedWeights

SIZE = 2
TASKS = [Task(id=f"task {number}", instruction="?") for number in range(50)]


class Recorded(TaskSampler):
    """A sampler that notes the outcomes it is given."""

    def __init__(self, batch_size: int) -> None:
        super().__init__(TASKS, batch_size, shuffle=False)
        self.seen: list[int] = []
        self.versions: list[int] = []

    def observe(self, version: int, group_id: int, draw: Any, episodes: Any) -> None:
        self.seen.append(group_id)

    def end_version(self, version: int) -> None:
        self.versions.append(version)


class Life:
    """A lifecycle with all that it keeps up to date."""

    def __init__(self, policy: StalenessPolicy | None = None, ledger: Ledger | None = None, batch: int = 2) -> None:
        config = RunConfig(
            rollout=RolloutSection(group_size=SIZE),
            trainer=TrainerSection(batch_size=batch),
            filters=FilterSection(drop_uniform=True),
            produce=ProduceSection(),
        )
        self.sampler = Recorded(batch)
        self.coordinator = SyncCoordinator(policy or Count(1), batch)
        self.buffer = TrajectoryGroupBuffer(config)
        self.journal = LedgerJournal(ledger) if ledger else RunJournal()
        self.lifecycle = GroupLifecycle(
            config.rollout.group_size, config.algorithm, self.sampler, self.coordinator, self.buffer, self.journal
        )

    def drawn(self) -> LiveGroup:
        return self.lifecycle.drawn(self.sampler.next())

    def started(self) -> LiveGroup:
        group = self.drawn()
        self.lifecycle.started(group)
        return group

    def finish(self, group: LiveGroup, *rewards: float, error: str | None = None) -> FinishedGroup:
        finished = None
        for index, reward in enumerate(rewards):
            done = episode(reward, group_id=group.group_id, rollout_idx=index, error=error)
            finished = self.lifecycle.episode_finished(group, done)
        assert finished is not None
        return finished

    def complete(self) -> FinishedGroup:
        return self.finish(self.started(), 1.0, 0.0)

    def train(self, groups: list[FinishedGroup], step: int = 0) -> None:
        synced = SyncedWeights(self.coordinator.version + 1, "digest")
        self.lifecycle.trained(groups, [], step, 1, synced)

    @property
    def account(self) -> dict[str, int]:
        found = self.coordinator.account()
        return {name: count for name in ("trained", "filtered", "failed", "stale", "pending")
                if (count := getattr(found, name))}  # fmt: skip


def test_a_group_is_drawn_started_complete_taken_and_trained() -> None:
    life = Life()
    group = life.drawn()
    assert life.account == {} and life.lifecycle.unfinished() == [(0, (0, 0))]
    life.lifecycle.started(group)
    assert life.account == {"pending": SIZE} and life.coordinator.in_flight == 1
    life.finish(group, 1.0, 0.0)
    assert life.coordinator.waiting == len(life.buffer) == 1 and life.coordinator.in_flight == 0
    (taken,) = life.lifecycle.taken(1)
    assert life.coordinator.waiting == len(life.buffer) == 0
    life.train([taken])
    assert life.account == {"trained": SIZE} and life.coordinator.version == 1
    assert life.lifecycle.unfinished() == [] and life.sampler.seen == [0] and life.sampler.versions == [0]


@pytest.mark.parametrize(
    ("rewards", "error", "ends"),
    [((1.0, 1.0), None, {"filtered": SIZE}), ((0.0, 0.0), "broke", {"failed": SIZE})],
    ids=["uniform", "failed"],
)
def test_a_group_that_holds_nothing_to_train_is_dropped(rewards: Any, error: str | None, ends: dict[str, int]) -> None:
    life = Life()
    assert life.finish(life.started(), *rewards, error=error).dropped_because is not None
    assert life.account == ends and life.lifecycle.unfinished() == [] and life.sampler.seen == [0]


def test_a_complete_group_that_has_become_stale_has_its_end() -> None:
    life = Life(Drop(0))
    life.complete()
    life.coordinator.version = 1  # it holds tokens of version 0
    assert life.lifecycle.drop_stale(step=1) == 1
    assert life.account == {"stale": SIZE} and len(life.buffer) == 0 and life.lifecycle.unfinished() == []
    assert life.sampler.seen == [], "a stale group says nothing of how hard its task is"


def test_a_batch_that_comes_to_no_update_drops_its_groups_and_another_is_opened() -> None:
    life = Life()
    life.coordinator.open_batch()
    life.complete()
    taken = life.lifecycle.taken(1)
    life.lifecycle.nothing_to_train(taken, step=0)
    assert life.account == {"filtered": SIZE} and life.coordinator.version == 0
    assert life.lifecycle.unfinished() == [] and life.sampler.seen == [0] and life.sampler.versions == []


def _train_untaken(life: Life) -> None:
    life.train([life.complete()])


def _start_twice(life: Life) -> None:
    group = life.started()
    life.lifecycle.started(group)


def _train_twice(life: Life) -> None:
    life.complete()
    taken = life.lifecycle.taken(1)
    life.train(taken)
    life.train(taken)


def _drop_trained(life: Life) -> None:
    life.complete()
    taken = life.lifecycle.taken(1)
    life.train(taken)
    life.lifecycle.nothing_to_train(taken, 1)


@pytest.mark.parametrize("impossible", [_train_untaken, _start_twice, _train_twice, _drop_trained])
def test_states_that_cannot_follow_each_other_are_an_assertion(impossible: Any) -> None:
    with pytest.raises((AssertionError, KeyError)):
        impossible(Life())


@examples
@given(st.randoms(use_true_random=False))
def test_after_any_life_every_book_says_the_same(rng: random.Random) -> None:
    life = Life(Drop(1), batch=3)
    running: list[LiveGroup] = []
    for _ in range(60):
        event = rng.choice(("start", "start", "finish", "finish", "step"))
        if event == "start" and life.coordinator.may_start():
            running.append(life.started())
        elif event == "finish" and running:
            group = running.pop(rng.randrange(len(running)))
            life.finish(group, *rng.choice([(1.0, 0.0), (1.0, 1.0), (0.0, 0.0)]))
        elif event == "step" and len(life.buffer) >= 1:
            life.lifecycle.drop_stale(life.coordinator.version)
            if taken := life.lifecycle.taken(rng.randint(1, 3)):
                life.train(taken, life.coordinator.version)
        live = {group_id for group_id, _ in life.lifecycle.unfinished()}
        assert len(live) == life.coordinator.in_flight + life.coordinator.waiting
        assert life.coordinator.waiting == len(life.buffer)
        assert life.coordinator.account().pending == SIZE * len(live)


async def test_the_ledger_has_every_transition(tmp_path: Path) -> None:
    ledger = Ledger.open(tmp_path, LedgerSection())
    life = Life(ledger=ledger)
    for _ in range(2):
        life.complete()
    life.finish(life.started(), 1.0, 1.0)
    taken = life.lifecycle.taken(2)
    await life.lifecycle.recorded(0, [taken], [], [])
    life.train(taken)
    states = [str(record.state) for record in map(ledger.group_record, range(3)) if record]
    assert states == ["trained", "trained", "filtered"]
    assert ledger.account() == life.coordinator.account()
    (batch,) = ledger.batches_from(0)
    assert batch.group_ids == (0, 1) and batch.steps == 1
    ledger.close()
