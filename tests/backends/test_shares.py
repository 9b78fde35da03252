"""A batch spread over ranks: everything once, about equally much each, equally many passes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from contracts.backend_contract import random_samples
from headrace.algorithms.batching import pack
from headrace.backends.fsdp.shares import gather_rows, shares_of
from headrace.config import AlgorithmSection
from headrace.data.sample import TrainBatch


def batch(count: int = 40, together: int = 1, groups: int = 1) -> TrainBatch:
    samples = [replace(s, group_id=i * groups // count) for i, s in enumerate(random_samples(count, 90, longest=60))]
    return pack(samples, AlgorithmSection(), 100, together)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("together", [1, 2])
def test_every_row_is_in_one_share_and_rows_that_belong_together_in_one_micro_batch(ranks: int, together: int) -> None:
    whole = batch(together=together)
    shares = shares_of(whole, ranks, 100)
    assert sorted(row for share in shares for row in share.rows) == list(range(40))
    assert len({len(share.batch.micro_batches) for share in shares}) == 1
    for share in shares:
        assert sorted(i for cut in share.batch.micro_batches for i in cut) == list(range(len(share.rows)))
        for cut in share.batch.micro_batches:
            rows = [share.rows[i] for i in cut]
            assert sum(len(whole.samples[row].tokens) for row in rows) <= 100 or len(rows) == together
            assert all(row % 2 == 0 and row + 1 in rows for row in rows[::2]) or together == 1
    texts = [[sample.task_id for sample in share.batch.samples] for share in shares]
    assert gather_rows(shares, texts, 40) == [sample.task_id for sample in whole.samples]


def test_ranks_have_about_equally_much_to_do() -> None:
    loads = [sum(len(sample.tokens) for sample in share.batch.samples) for share in shares_of(batch(200), 4, 500)]
    assert max(loads) < 1.05 * min(loads)


def test_fewer_rows_than_ranks_leave_empty_micro_batches() -> None:
    shares = shares_of(batch(1), 3, 100)
    assert [share.batch.micro_batches for share in shares] == [((0,),), ((),), ((),)]


def test_all_ranks_run_the_value_head_where_one_has_returns() -> None:
    samples = [replace(s, returns=(1.0,) * len(s.loss_mask)) if i == 3 else s for i, s in enumerate(batch(12).samples)]
    shares = shares_of(pack(samples, AlgorithmSection(), 100), 2, 60)
    assert {share.valued for share in shares} == {shares[0].valued} and sum(shares[0].valued) == 1


def test_groups_apart_are_spread_as_if_each_came_alone() -> None:
    whole = batch(40, groups=5)
    alone: list[list[tuple[str, ...]]] = [[], []]
    for group in range(5):
        part = pack([s for s in whole.samples if s.group_id == group], AlgorithmSection(), 100)
        for rank, share in enumerate(shares_of(part, 2, 100, groups_apart=True)):
            alone[rank] += [tuple(share.batch.samples[i].task_id for i in cut) for cut in share.batch.micro_batches]
    for rank, share in enumerate(shares_of(whole, 2, 100, groups_apart=True)):
        cuts = [tuple(share.batch.samples[i].task_id for i in cut) for cut in share.batch.micro_batches]
        assert cuts == alone[rank]
