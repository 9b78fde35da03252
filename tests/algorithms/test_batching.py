"""Packing, weights and the normaliser of the loss."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes import examples, step
from headrace.algorithms.batching import grad_scale, pack, to_samples
from headrace.config import AlgorithmSection
from headrace.data.episode import Trajectory, TrajectoryGroup
from headrace.data.packing import cut_by_tokens
from headrace.data.sample import Sample, TrainBatch

AGGREGATIONS = ["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "token_sum", "constant"]


def algorithm(aggregation: Any) -> AlgorithmSection:
    return AlgorithmSection(aggregation=aggregation, aggregation_length=10)


def sample(mask: list[int]) -> Sample:
    size = len(mask)
    return Sample(tuple(range(size + 1)), tuple(mask), (0.0,) * size, (0,) * size, (0.0,) * size)


samples = st.lists(st.lists(st.integers(0, 1), max_size=12).map(sample), max_size=12)


def total_loss(batches: list[TrainBatch], how: AlgorithmSection, losses: dict[int, list[float]]) -> float:
    """What a backend adds up: `losses` are the token losses of a sample, by its identity."""
    added = math.fsum(
        batch.weights[index] * math.fsum(loss for loss, m in zip(losses[id(row)], row.loss_mask, strict=True) if m)
        for batch in batches
        for micro_batch in batch.micro_batches
        for index in micro_batch
        for row in [batch.samples[index]]
    )
    return grad_scale(batches, how) * added


@examples
@given(samples, st.integers(1, 30))
def test_every_sample_is_packed_once_and_within_the_budget(rows: list[Sample], budget: int) -> None:
    batch = pack(rows, algorithm("token_mean"), budget)
    assert batch.samples == tuple(rows)
    assert sorted(index for micro_batch in batch.micro_batches for index in micro_batch) == list(range(len(rows)))
    for micro_batch in batch.micro_batches:
        size = sum(len(rows[index].tokens) for index in micro_batch)
        assert size <= budget or len(micro_batch) == 1


@examples
@given(samples, st.integers(1, 30))
def test_no_two_neighbouring_micro_batches_would_fit_into_one(rows: list[Sample], budget: int) -> None:
    sizes = [
        sum(len(rows[index].tokens) for index in micro_batch)
        for micro_batch in pack(rows, algorithm("token_mean"), budget).micro_batches
    ]
    assert all(one + two > budget for one, two in pairwise(sizes))


def test_rows_of_similar_length_share_a_micro_batch() -> None:
    rows = [sample([1] * (length - 1)) for length in (2, 7, 3, 8, 2)]
    assert pack(rows, algorithm("token_mean"), 15).micro_batches == ((3, 1), (2, 0, 4))


def test_a_row_longer_than_the_budget_stands_alone() -> None:
    rows = [sample([1] * 3), sample([1] * 99), sample([1] * 3)]
    assert pack(rows, algorithm("token_mean"), 8).micro_batches == ((1,), (0, 2))


# ---- rows that begin alike ----------------------------------------------------------------------------------------

Rows = list[list[int]]


def counted(rows: Rows) -> float:
    """What rows count in this order: a beginning of 16 tokens or more that the last one has, too, a quarter."""
    alike = [0] + [
        next((i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))
        for one, two in pairwise(rows)
    ]
    return sum(len(row) - (0.75 * same if same >= 16 else 0) for row, same in zip(rows, alike, strict=True))


def conversation(prompt: int, *replies: int) -> Rows:
    """Rows with the same prompt, which no other conversation has."""
    return [[prompt] * 20 + [100 * prompt + index] * length for index, length in enumerate(replies)]


def test_families_come_together_and_in_their_order() -> None:
    one, two = conversation(1, 5, 30, 2), conversation(2, 9, 8)
    rows = [one[0], two[0], one[1], [7] * 40, two[1], one[2]]
    assert cut_by_tokens(rows, 10_000) == ((0, 2, 5, 3, 1, 4),)  # by the longest row of each
    assert cut_by_tokens(rows, 70) == ((0, 2, 5), (3,), (1, 4))


def test_a_family_is_torn_apart_only_where_that_makes_fewer_micro_batches() -> None:
    rows = [row for first in (1, 2, 3) for row in conversation(first, 10, 10, 10, 10)]  # 75 tokens each
    assert cut_by_tokens(rows, 112) == ((0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11))
    assert cut_by_tokens(rows, 120) == ((0, 1, 2, 3, 4, 5), (6, 7, 8, 9, 10, 11))
    assert cut_by_tokens(rows, 160) == ((0, 1, 2, 3, 4, 5, 6, 7), (8, 9, 10, 11))


def test_a_beginning_counts_a_quarter_where_it_is_repeated() -> None:
    rows = conversation(1, 10, 10, 10, 10)  # 30 tokens, then 15 for each more
    assert cut_by_tokens(rows, 75) == ((0, 1, 2, 3),)
    assert cut_by_tokens(rows, 74) == ((0, 1, 2), (3,))
    assert cut_by_tokens(rows, 44) == ((0,), (1,), (2,), (3,))


def test_a_beginning_that_is_too_short_to_share_counts_in_full() -> None:
    rows = [[5] * 15] * 4
    assert cut_by_tokens(rows, 30) == ((0, 1), (2, 3))
    assert cut_by_tokens([[5] * 16] * 4, 30) == ((0, 1, 2, 3),)  # 16 and three times 4


@pytest.mark.parametrize(("budget", "count"), [(1, 3), (95, 3), (96, 2), (10_000, 1)])
def test_pairs_are_not_torn(budget: int, count: int) -> None:
    chosen, rejected = conversation(1, 3, 9, 4), conversation(2, 30, 1, 2)
    rows = [row for pair in zip(chosen, rejected, strict=True) for row in pair]
    cuts = cut_by_tokens(rows, budget, together=2)
    assert len(cuts) == count
    assert [i for cut in cuts for i in cut] == list(range(6))
    assert all(cut[0] % 2 == 0 for cut in cuts)


@st.composite
def families(draw: Any) -> Rows:
    """Rows of a few conversations, in any order."""
    lengths = st.lists(st.integers(0, 40), min_size=2, max_size=5)
    rows = [row for prompt in range(1, draw(st.integers(2, 5))) for row in conversation(prompt, *draw(lengths))]
    return draw(st.permutations(rows))


@examples
@given(families(), st.integers(1, 200), st.sampled_from([1, 2]))
def test_what_counts_stays_within_the_budget_and_nothing_is_lost(rows: Rows, budget: int, together: int) -> None:
    rows = rows[len(rows) % together :]
    cuts = cut_by_tokens(rows, budget, together)
    assert sorted(i for cut in cuts for i in cut) == list(range(len(rows)))
    for cut in cuts:
        assert all(unit[0] % together == 0 for unit in zip(*[iter(cut)] * together, strict=True))
        assert len(cut) == together or counted([rows[i] for i in cut]) <= budget
    prompts = [rows[i][0] for cut in cuts for i in cut[::together]]
    assert sum(one != two for one, two in pairwise(prompts)) == len(set(prompts)) - 1  # each family in one stretch


def test_nothing_to_pack_is_an_empty_batch() -> None:
    batch = pack([], algorithm("token_mean"), 8)
    assert batch.micro_batches == ()
    assert grad_scale([batch], algorithm("token_mean")) == 1.0


# one row with the trained token loss 4, one with three of 1; the untrained target's loss of 100 must not count
WORKED = {
    "token_mean": 7 / 4,
    "sequence_mean_token_mean": (4 + 1) / 2,
    "sequence_mean_token_sum": (4 + 3) / 2,
    "token_sum": 7.0,
    "constant": 7 / (2 * 10),
}


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_worked_losses(aggregation: str) -> None:
    short, long = sample([0, 1]), sample([0, 1, 1, 1])
    losses = {id(short): [100.0, 4.0], id(long): [100.0, 1.0, 1.0, 1.0]}
    how = algorithm(aggregation)
    assert total_loss([pack([short, long], how, 64)], how, losses) == pytest.approx(WORKED[aggregation])


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_what_is_rejected_does_not_count_in_the_normaliser(aggregation: str) -> None:
    how, rows = algorithm(aggregation), [sample([0, 1]), sample([0, 1, 1, 1]), sample([0, 1, 1])]
    whole = replace(pack(rows, how, 64), rejected=frozenset({0, 2}))
    assert grad_scale([whole], how) == grad_scale([pack(rows[1:2], how, 64)], how)
    pieces = [replace(pack([row], how, 64), rejected=frozenset({0} if row is not rows[1] else ())) for row in rows]
    assert grad_scale(pieces, how) == grad_scale([whole], how)


@pytest.mark.parametrize(
    ("aggregation", "weights", "scale"),
    [
        ("token_mean", (1.0, 1.0), 1 / 4),
        ("sequence_mean_token_mean", (1.0, 1 / 3), 1 / 2),
        ("sequence_mean_token_sum", (1.0, 1.0), 1 / 2),
        ("token_sum", (1.0, 1.0), 1.0),
        ("constant", (1.0, 1.0), 1 / 20),
    ],
)
def test_weights_and_scale_of_each_aggregation(aggregation: str, weights: tuple[float, ...], scale: float) -> None:
    batch = pack([sample([0, 1]), sample([0, 1, 1, 1])], algorithm(aggregation), 64)
    assert batch.weights == pytest.approx(weights)
    assert grad_scale([batch], algorithm(aggregation)) == pytest.approx(scale)


@examples
@given(samples, st.sampled_from(AGGREGATIONS), st.integers(1, 30), st.integers(0, 12), st.randoms())
def test_the_loss_of_a_step_does_not_depend_on_how_it_is_cut(
    rows: list[Sample], aggregation: str, budget: int, at: int, rng: Any
) -> None:
    how = algorithm(aggregation)
    losses = {id(row): [rng.uniform(-1, 1) for _ in row.loss_mask] for row in rows}
    whole = total_loss([pack(rows, how, 1000)], how, losses)
    cut = total_loss([pack(rows[:at], how, budget), pack(rows[at:], how, budget)], how, losses)
    assert cut == pytest.approx(whole, abs=1e-10)


def test_rows_of_all_trajectories_come_in_order_with_their_identity() -> None:
    split = Trajectory((step([1], [2]), step([3], [4])), "solver", 1.0)
    groups = [
        TrajectoryGroup("a", "solver", (split, Trajectory((step([5], [6]),), "solver", 0.0)), group_id=3),
        TrajectoryGroup("b", "solver", (Trajectory((step([7], [8]),), "solver", 0.5),), group_id=4),
    ]
    rows = to_samples(groups)
    assert [row.tokens for row in rows] == [(1, 2), (3, 4), (5, 6), (7, 8)]
    assert [(row.task_id, row.group_id, row.reward) for row in rows] == [
        ("a", 3, 1.0), ("a", 3, 1.0), ("a", 3, 0.0), ("b", 4, 0.5),
    ]  # fmt: skip


def test_rows_with_nothing_to_train_are_left_out() -> None:
    silent = Trajectory((step([1, 2], []),), reward=1.0)
    assert to_samples([TrajectoryGroup("a", "agent", (silent, Trajectory((), reward=0.0)))]) == []
