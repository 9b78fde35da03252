"""Admission, what a step waits for, and the account of episodes, under any order of events."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes import examples
from headrace.scheduling.coordinator import Account, SyncCoordinator
from headrace.scheduling.staleness import Count, Drop, Mask, StalenessPolicy, Trust, Wait

POLICIES: tuple[type[StalenessPolicy], ...] = (Count, Drop, Wait, Mask, Trust)
EPISODES = 3
EVENTS = ("produce", "produce", "finish", "finish", "fail", "step", "step", "step", "skip", "pause", "resume", "resume")


class Loops:
    """A producer and a learner that keep the coordinator's rules, and books of their own to check it against."""

    def __init__(self, policy: StalenessPolicy, batch_size: int, version: int = 0, **limits: float | None) -> None:
        self.policy, self.batch_size = policy, batch_size
        self.coordinator = SyncCoordinator(policy, batch_size, version=version, **limits)  # type: ignore[arg-type]
        self.ahead = batch_size * (1 + policy.max_staleness)
        over_sample, capacity = limits.get("over_sample"), limits.get("capacity")
        self.window = self.ahead if over_sample is None else round(batch_size * (1 + over_sample))
        self.capacity = capacity or 2 * self.ahead
        self.version = self.opened = version
        self.drawn = self.next_id = 0
        self.running: dict[int, int] = {}
        self.whole: dict[int, int] = {}
        self.in_step = self.surplus = 0
        self.paused = False
        self.ends: dict[str, int] = dict.fromkeys(("trained", "filtered", "failed", "stale"), 0)

    @property
    def overdue(self) -> int:
        oldest = self.version - self.policy.max_staleness
        return sum(born < oldest for born in self.running.values()) if self.policy.excuses_overdue else 0

    def do(self, event: str, pick: int) -> None:
        """One event, if it can happen now; `pick` chooses among the groups it may happen to."""
        match event:
            case "produce":
                self.produce(pick)
            case "finish":
                newest_first = pick % 3 > 0  # most of the time: the others are slow
                for group_id in sorted(self.running, reverse=newest_first)[: pick % 5]:
                    born = self.running.pop(group_id)
                    self.whole[group_id] = born + pick % (self.version - born + 1)
                    self.coordinator.completed(group_id, self.whole[group_id])
            case "fail" if self.running:
                group_id = sorted(self.running)[pick % len(self.running)]
                del self.running[group_id]
                self.coordinator.discarded(group_id)
                self.settle("failed", 1)
                self.start()
            case "step" | "skip":
                self.step(event == "step", pick)
            case "pause" | "resume":
                self.paused = event == "pause"
                (self.coordinator.pause if self.paused else self.coordinator.resume)()

    def produce(self, most: int) -> None:
        """Open batches and start up to so many groups."""
        for _ in range(most):
            if not self.drawn and self.coordinator.may_open_batch():
                self.coordinator.open_batch()
                self.opened += 1
                self.drawn = self.batch_size
            if self.drawn and self.coordinator.may_start():
                self.drawn -= 1
                self.start()

    def start(self) -> None:
        self.coordinator.started(self.next_id, EPISODES)
        self.running[self.next_id] = self.version
        self.next_id += 1

    def settle(self, end: str, groups: int) -> None:
        self.coordinator.settled(**{end: groups * EPISODES})
        self.ends[end] += groups * EPISODES

    def step(self, publish: bool, pick: int) -> None:
        for group_id in self.coordinator.stale():
            del self.whole[group_id]
            self.coordinator.discarded(group_id)
            self.settle("stale", 1)
            self.start()
        due = self.coordinator.due()
        if len(self.whole) < self.batch_size or not set(due) <= self.whole.keys():
            return
        others = [group_id for group_id in sorted(self.whole, key=lambda g: hash((g, pick))) if group_id not in due]
        chosen = [*due, *others][: max(self.batch_size, len(due))]
        ages = [self.version - self.whole.pop(group_id) for group_id in chosen]
        for group_id in chosen:
            self.coordinator.taken(group_id)
        self.in_step += len(chosen)
        self.check()
        if publish:
            self.check_ages(ages)
            self.settle("trained", len(chosen))
            self.version += 1
            self.coordinator.synced(self.version)
        else:
            self.settle("filtered", len(chosen))
            self.opened -= 1
            self.coordinator.skipped()
        self.surplus += len(chosen) - self.batch_size
        self.in_step = 0

    def check_ages(self, ages: list[int]) -> None:
        if isinstance(self.policy, Wait | Drop):
            assert max(ages) <= self.policy.max_staleness

    def check(self) -> None:
        """What must hold at every moment."""
        coordinator, held = self.coordinator, len(self.running) + len(self.whole)
        settled, dispatched = sum(self.ends.values()), self.next_id * EPISODES
        assert coordinator.account() == Account(dispatched, **self.ends, pending=dispatched - settled)
        assert (coordinator.version, coordinator.in_flight, coordinator.waiting) == (
            self.version, len(self.running), len(self.whole),
        )  # fmt: skip
        assert held <= self.capacity
        on_time = held - self.overdue
        room = on_time < self.window and on_time + self.in_step < self.ahead
        assert coordinator.may_start() == (not self.paused and held < self.capacity and room)
        more = -(-(self.overdue + self.surplus) // self.batch_size)
        assert coordinator.may_open_batch() == (self.opened <= self.version + self.policy.max_staleness + more)
        if not self.policy.excuses_overdue:
            assert on_time + self.in_step <= self.ahead, "generation runs further ahead than the bound"

    def go_on(self) -> None:
        """Everything in turn until the next version is out."""
        before = self.version
        for _ in range(20 * self.ahead):
            for event in ("resume", "produce", "finish", "step"):
                self.do(event, 4)
                self.check()
            if self.version > before:
                return
        raise AssertionError("the loops are stuck")


@pytest.mark.parametrize("policy", POLICIES)
@examples
@given(
    st.integers(0, 2**32),
    st.integers(0, 4),
    st.integers(1, 4),
    st.integers(0, 5),
    st.none() | st.floats(0.0, 2.0),
    st.none() | st.integers(4, 12),
)
def test_nothing_is_lost_no_bound_is_broken_and_it_always_progresses(
    policy: type[StalenessPolicy],
    seed: int,
    max_staleness: int,
    batch_size: int,
    version: int,
    over_sample: float | None,
    capacity: int | None,
) -> None:
    loops = Loops(policy(max_staleness), batch_size, version, over_sample=over_sample, capacity=capacity)
    rng = random.Random(seed)  # a drawn list of events would be short and dull: groups grow old only in a long one
    for _ in range(150):
        loops.do(rng.choice(EVENTS), rng.randrange(60))
        loops.check()
    for _ in range(max_staleness + 2):
        loops.go_on()


@examples
@given(st.lists(st.integers(0, 50), max_size=80), st.sampled_from(POLICIES), st.integers(0, 4), st.integers(1, 4))
def test_groups_that_are_trained_in_the_order_of_their_start_are_never_older_than_the_bound(
    picks: list[int], policy: type[StalenessPolicy], max_staleness: int, batch_size: int
) -> None:
    coordinator = SyncCoordinator(policy(max_staleness), batch_size)
    born: dict[int, int] = {}
    next_id = 0
    for pick in picks:
        while coordinator.may_open_batch():
            coordinator.open_batch()
            for _ in range(batch_size):
                coordinator.started(next_id, 1)
                born[next_id] = coordinator.version
                next_id += 1
        if pick % 3:  # else more time passes
            chosen = sorted(born)[:batch_size]
            for group_id in chosen:
                assert coordinator.version - born.pop(group_id) <= max_staleness
                coordinator.completed(group_id)
                coordinator.taken(group_id)
            coordinator.settled(trained=batch_size)
            coordinator.synced(coordinator.version + 1)


def started(coordinator: SyncCoordinator, *group_ids: int) -> None:
    for group_id in group_ids:
        assert coordinator.may_start()
        coordinator.started(group_id, EPISODES)


def train(coordinator: SyncCoordinator, *group_ids: int) -> None:
    for group_id in group_ids:
        coordinator.taken(group_id)
    coordinator.settled(trained=len(group_ids) * EPISODES)
    coordinator.synced(coordinator.version + 1)


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
def test_generation_may_run_ahead_by_the_staleness_bound_and_no_further(max_staleness: int) -> None:
    coordinator = SyncCoordinator(Count(max_staleness))
    for _ in range(max_staleness + 1):
        coordinator.open_batch()
    assert not coordinator.may_open_batch()
    with pytest.raises(AssertionError, match="beyond the staleness bound"):
        coordinator.open_batch()
    coordinator.synced(1)
    assert coordinator.may_open_batch()


def test_no_more_batches_are_opened_than_the_run_needs() -> None:
    coordinator = SyncCoordinator(Count(4), version=3, batches=2)
    coordinator.open_batch()
    coordinator.open_batch()
    assert not coordinator.may_open_batch()


def test_a_resumed_run_may_open_the_batch_of_its_version() -> None:
    coordinator = SyncCoordinator(Count(0), version=7)
    coordinator.open_batch()
    assert not coordinator.may_open_batch()


def test_a_batch_that_came_to_nothing_is_replaced_and_its_groups_give_their_places_back() -> None:
    coordinator = SyncCoordinator(Count(0), 2)
    coordinator.open_batch()
    started(coordinator, 0, 1)
    for group_id in (0, 1):
        coordinator.completed(group_id)
        coordinator.taken(group_id)
    assert not coordinator.may_open_batch() and not coordinator.may_start()
    coordinator.skipped()
    coordinator.open_batch()
    assert coordinator.may_start()


def test_a_group_in_training_keeps_its_place_until_its_weights_are_out() -> None:
    coordinator = SyncCoordinator(Trust(0), 1)
    coordinator.open_batch()
    started(coordinator, 0)
    coordinator.completed(0)
    coordinator.taken(0)
    assert not coordinator.may_start(), "it would start under a version that is one too old by then"
    coordinator.synced(1)
    assert coordinator.may_start()


def test_over_sampling_bounds_what_runs_ahead() -> None:
    coordinator = SyncCoordinator(Count(3), 2, over_sample=0.5)
    coordinator.open_batch()
    coordinator.open_batch()
    started(coordinator, 0, 1, 2)
    assert not coordinator.may_start()
    coordinator.completed(1)
    assert not coordinator.may_start()
    coordinator.taken(1)
    assert coordinator.may_start()


def test_capacity_counts_what_runs_and_what_waits() -> None:
    coordinator = SyncCoordinator(Count(4), 2, capacity=3)
    started(coordinator, 0, 1, 2)
    coordinator.completed(0)
    assert not coordinator.may_start()
    coordinator.discarded(1)
    assert coordinator.may_start()


def test_trust_lets_others_start_in_place_of_groups_that_are_overdue() -> None:
    outcomes = {}
    for policy in (Mask(1), Trust(1)):
        coordinator = SyncCoordinator(policy, 2)
        coordinator.open_batch()
        coordinator.open_batch()
        started(coordinator, 0, 1, 2, 3)  # 0 and 1 are slow
        for version, fast in enumerate([(2, 3), (4, 5)]):
            for group_id in fast:
                coordinator.completed(group_id)
            train(coordinator, *fast)
            coordinator.open_batch()
            started(coordinator, *(group_id + 2 for group_id in fast))
            assert coordinator.version == version + 1
        outcomes[type(policy)] = (coordinator.may_open_batch(), coordinator.may_start(), coordinator.in_flight)
    # of the version before last, 0 and 1 are now older than the bound
    assert outcomes == {Mask: (False, False, 4), Trust: (True, True, 4)}


def test_overdue_groups_do_not_count_beyond_the_capacity() -> None:
    coordinator = SyncCoordinator(Trust(0), 1, capacity=3)
    for group_id in range(3):
        started(coordinator, group_id)
        coordinator.synced(group_id + 1)  # trained from elsewhere; the group is overdue now
    assert not coordinator.may_start()


def test_wait_names_the_groups_that_the_next_step_would_find_too_old() -> None:
    coordinator = SyncCoordinator(Wait(1), 1)
    for group_id in range(2):
        coordinator.open_batch()
        started(coordinator, group_id)
    assert coordinator.due() == []
    coordinator.completed(1)
    train(coordinator, 1)
    assert coordinator.due() == [0]
    with pytest.raises(AssertionError, match="before every due group was trained"):
        coordinator.synced(2)
    coordinator.completed(0)
    assert coordinator.due() == [0]
    train(coordinator, 0)
    assert coordinator.due() == []


def test_only_drop_throws_completely_groups_away_and_by_their_oldest_token() -> None:
    for policy in (Count(1), Wait(1), Mask(1), Trust(1), Drop(1)):
        coordinator = SyncCoordinator(policy, 2, version=5)
        coordinator.started(0, EPISODES)
        coordinator.started(1, EPISODES)
        coordinator.synced(6)
        coordinator.completed(0, oldest=5)
        coordinator.completed(1, oldest=6)
        if not isinstance(policy, Wait):  # which would not let it come to this
            coordinator.synced(7)
        assert coordinator.stale() == ([0] if isinstance(policy, Drop) else [])


def test_complete_groups_in_order_end_before_the_first_that_still_runs() -> None:
    coordinator = SyncCoordinator(Count(3), 4)
    started(coordinator, 0, 1, 2, 3)
    for group_id in (3, 1, 0):
        coordinator.completed(group_id)
    assert coordinator.complete_in_order() == [0, 1]
    coordinator.completed(2)
    assert coordinator.complete_in_order() == [0, 1, 2, 3]


def test_a_pause_lets_running_groups_finish_and_none_start() -> None:
    coordinator = SyncCoordinator(Count(2), 2)
    started(coordinator, 0)
    coordinator.pause()
    assert coordinator.paused and not coordinator.may_start() and coordinator.in_flight == 1
    coordinator.completed(0)
    assert coordinator.in_flight == 0 and coordinator.waiting == 1
    coordinator.resume()
    assert coordinator.may_start() and not coordinator.paused


def test_settling_an_episode_twice_asserts() -> None:
    coordinator = SyncCoordinator(Count(0))
    coordinator.started(0, 2)
    coordinator.settled(trained=1, failed=1)
    with pytest.raises(AssertionError, match="settled twice"):
        coordinator.settled(stale=1)


@pytest.mark.parametrize("version", [3, 5])
def test_a_version_comes_after_the_one_before_it(version: int) -> None:
    coordinator = SyncCoordinator(Count(0), version=3)
    with pytest.raises(AssertionError, match=f"version {version} was synced after 3"):
        coordinator.synced(version)
