"""Admission and the account of episodes, under any order of events."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes import examples
from headrace.pipeline.coordinator import Account, SyncCoordinator

ENDS = ("trained", "filtered", "failed", "stale")
events = st.lists(
    st.one_of(
        st.just("open"),
        st.just("publish"),
        st.just("skip"),
        st.tuples(st.just("dispatch"), st.integers(0, 9)),
        st.tuples(st.just("settle"), st.fixed_dictionaries({end: st.integers(0, 3) for end in ENDS})),
    ),
    max_size=60,
)


@examples
@given(events, st.integers(0, 4), st.integers(0, 5))
def test_nothing_is_lost_and_no_batch_runs_ahead_of_the_bound(
    schedule: list[str | tuple[str, int | dict[str, int]]], max_staleness: int, start: int
) -> None:
    coordinator = SyncCoordinator(max_staleness, start)
    dispatched, ends, opened = 0, dict.fromkeys(ENDS, 0), start
    for event in schedule:
        match event:
            case "open" if coordinator.may_open_batch():
                coordinator.open_batch()
                # batch k is trained at version k, so none of its tokens will be older than the bound
                assert opened - coordinator.version <= max_staleness
                opened += 1
            case "publish" if opened > coordinator.version:
                coordinator.published(coordinator.version + 1)
            case "skip" if opened > coordinator.version:
                coordinator.skipped()
                opened -= 1
            case ("dispatch", int(count)):
                coordinator.dispatched(count)
                dispatched += count
            case ("settle", dict(counts)) if sum(counts.values()) <= coordinator.account().pending:
                coordinator.settled(**counts)
                ends = {end: ends[end] + counts[end] for end in ENDS}
        assert coordinator.account() == Account(dispatched, **ends, pending=dispatched - sum(ends.values()))
        assert opened <= coordinator.version + max_staleness + 1
        assert coordinator.may_open_batch() == (opened <= coordinator.version + max_staleness)


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
def test_generation_may_run_ahead_by_the_staleness_bound_and_no_further(max_staleness: int) -> None:
    coordinator = SyncCoordinator(max_staleness)
    for _ in range(max_staleness + 1):
        coordinator.open_batch()
    assert not coordinator.may_open_batch()
    with pytest.raises(AssertionError, match="beyond the staleness bound"):
        coordinator.open_batch()
    coordinator.published(1)
    assert coordinator.may_open_batch()


def test_a_resumed_run_may_open_the_batch_of_its_version() -> None:
    coordinator = SyncCoordinator(0, version=7)
    coordinator.open_batch()
    assert not coordinator.may_open_batch()


def test_settling_an_episode_twice_asserts() -> None:
    coordinator = SyncCoordinator()
    coordinator.dispatched(2)
    coordinator.settled(trained=1, failed=1)
    with pytest.raises(AssertionError, match="settled twice"):
        coordinator.settled(stale=1)


@pytest.mark.parametrize("version", [3, 5])
def test_a_version_comes_after_the_one_before_it(version: int) -> None:
    coordinator = SyncCoordinator(version=3)
    with pytest.raises(AssertionError, match=f"version {version} was published after 3"):
        coordinator.published(version)
