"""The order of tasks: a pure function of seed and position."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes import examples
from headrace.data.sampler import TaskSampler
from headrace.data.task import Task
from headrace.errors import ConfigError

TASKS = [Task(str(i), instruction="Do it.") for i in range(10)]


def sampler(batch_size: int = 4, seed: int = 0, shuffle: bool = True, drop_last: bool = True) -> TaskSampler:
    return TaskSampler(TASKS, batch_size, seed, shuffle, drop_last)


def draw(source: TaskSampler, kinds: list[str]) -> list[list[str]]:
    """Ids of what each call handed out; a kind is "batch" or "task"."""
    return [[d.task.id for d in (source.next_batch() if kind == "batch" else [source.next()])] for kind in kinds]


def epoch(source: TaskSampler, number: int) -> list[str]:
    source.position = (number, 0)
    return [task_id for (task_id,) in draw(source, ["task"] * len(TASKS))]


@pytest.mark.parametrize(("drop_last", "sizes"), [(True, [4, 4, 4, 4]), (False, [4, 4, 2, 4])])
def test_the_short_batch_is_dropped_or_drawn_short(drop_last: bool, sizes: list[int]) -> None:
    source = sampler(drop_last=drop_last)
    assert len(source) == (2 if drop_last else 3)
    assert [len(source.next_batch()) for _ in sizes] == sizes


def test_a_batch_never_mixes_epochs() -> None:
    source = sampler(drop_last=False)
    for number in range(3):
        drawn = [task_id for batch in draw(source, ["batch"] * 3) for task_id in batch]
        assert drawn == epoch(sampler(), number)


@examples
@given(st.integers(), st.integers(0, 1000))
def test_an_epoch_is_a_permutation_that_depends_on_seed_and_epoch_only(seed: int, number: int) -> None:
    order = epoch(sampler(seed=seed), number)
    assert Counter(order) == Counter(task.id for task in TASKS)
    walked = sampler(batch_size=3, seed=seed, drop_last=False)
    draw(walked, ["batch", "task", "batch"])
    assert epoch(walked, number) == order


def test_seeds_and_epochs_give_different_orders() -> None:
    orders = [tuple(epoch(sampler(seed=seed), number)) for seed in range(5) for number in range(5)]
    assert len(set(orders)) == len(orders)


def test_without_shuffling_the_order_is_that_of_the_source() -> None:
    assert draw(sampler(shuffle=False), ["batch"] * 3) == [list("0123"), list("4567"), list("0123")]


@examples
@given(
    st.lists(st.sampled_from(["batch", "task"]), max_size=20),
    st.integers(0, 20),
    st.integers(1, 10),
    st.booleans(),
)
def test_resuming_at_any_position_gives_the_same_suffix(
    kinds: list[str], cut: int, batch_size: int, drop_last: bool
) -> None:
    whole = draw(sampler(batch_size, drop_last=drop_last), kinds)
    first = sampler(batch_size, drop_last=drop_last)
    draw(first, kinds[:cut])
    resumed = sampler(batch_size, drop_last=drop_last)
    resumed.position = first.position
    assert draw(resumed, kinds[cut:]) == whole[cut:]


def test_one_more_task_is_the_next_of_the_order_and_is_not_drawn_again() -> None:
    order = epoch(sampler(), 0)
    assert draw(sampler(), ["batch", "task", "batch"]) == [order[:4], order[4:5], order[5:9]]


def test_one_more_task_after_the_last_begins_the_next_epoch() -> None:
    source = sampler(batch_size=5)
    draw(source, ["batch", "batch"])
    assert [source.next().task.id] == epoch(sampler(), 1)[:1]
    assert source.position == (1, 1)


def test_a_batch_larger_than_the_data_is_an_error_with_a_remedy() -> None:
    with pytest.raises(ConfigError, match=r"batch_size is 11, but there are only 10 tasks; lower it or set data\.drop"):
        sampler(batch_size=11)


def test_a_batch_larger_than_the_data_is_all_data_when_short_batches_are_kept() -> None:
    source = sampler(batch_size=11, drop_last=False)
    assert len(source) == 1
    assert [len(source.next_batch()) for _ in range(2)] == [10, 10]
