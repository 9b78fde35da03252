"""Staleness policies: what becomes of work older than the bound, worked out by hand and for any divergence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes import examples
from headrace.data.sample import NO_VERSION, Sample
from headrace.registry import names, resolve
from headrace.scheduling.staleness import Count, Drop, Mask, StalenessPolicy, Trust, Wait, oldest_version
from headrace.tracking.metrics import MetricsAggregator

NOW = 9


def row(versions: Sequence[int], mask: Sequence[int] | None = None) -> Sample:
    """A row whose targets were sampled under these versions, each with log-probability -1."""
    count = len(versions)
    mask = mask if mask is not None else [int(version != NO_VERSION) for version in versions]
    return Sample(tuple(range(count + 1)), tuple(mask), (-1.0,) * count, tuple(versions), (1.0,) * count)


def limit(
    policy: StalenessPolicy, rows: Sequence[Sample], measured: Mapping[int, Sequence[float]] | None = None
) -> tuple[list[tuple[int, ...]], dict[str, float]]:
    """Masks of the rows as they are trained, and the figures."""
    metrics = MetricsAggregator()
    limited = policy.limit(rows, NOW, measured or {}, metrics)
    for before, after in zip(rows, limited, strict=True):
        assert (after.tokens, after.logprobs, after.versions) == (before.tokens, before.logprobs, before.versions)
        assert all(new <= old for new, old in zip(after.loss_mask, before.loss_mask, strict=True)), "only masked"
    return [sample.loss_mask for sample in limited], metrics.reduce()


def moved(*gaps: float) -> list[float]:
    """The learner's log-probabilities of a row that differ from the sampler's by these gaps."""
    return [-1.0 + gap for gap in gaps]


def taught(max_staleness: int, *divergences: float) -> Trust:
    """A policy that has seen young rows with these divergences (mean of d²/2)."""
    policy = Trust(max_staleness)
    rows = [row([NOW]) for _ in divergences]
    policy.observe(rows, [moved((2 * divergence) ** 0.5) for divergence in divergences], NOW)
    return policy


def test_every_policy_has_its_name() -> None:
    assert {name: resolve("staleness", name) for name in names("staleness")} == {
        "count": Count, "drop": Drop, "mask": Mask, "trust": Trust, "wait": Wait,
    }  # fmt: skip


def test_where_each_policy_acts() -> None:
    acts = {
        policy: (policy(2).is_stale(2), policy(2).is_stale(3), policy.waits_for_due, policy.excuses_overdue)
        for policy in (Count, Drop, Wait, Mask, Trust)
    }
    assert acts == {
        Count: (False, False, False, False),
        Drop: (False, True, False, False),
        Wait: (False, False, True, False),
        Mask: (False, False, False, False),
        Trust: (False, False, False, True),
    }


@pytest.mark.parametrize("policy", [Count, Drop, Wait])
def test_policies_of_complete_groups_leave_rows_as_they_are(policy: type[StalenessPolicy]) -> None:
    rows = [row([0, 5, 9]), row([NO_VERSION, 9])]
    assert policy(2).to_measure(rows, NOW) == []
    assert limit(policy(2), rows) == ([(1, 1, 1), (0, 1)], {})


def test_the_age_of_a_row_is_that_of_its_oldest_trained_token() -> None:
    assert oldest_version(row([7, 3, 5])) == 3
    assert oldest_version(row([7, 3, 5], mask=[1, 0, 1])) == 5
    assert oldest_version(row([NO_VERSION, 7, NO_VERSION])) == 7
    assert oldest_version(row([NO_VERSION, NO_VERSION], mask=[1, 1])) is None, "a demonstration has no age"


# ---- mask ------------------------------------------------------------------------------------------------------------


def test_mask_leaves_out_tokens_older_than_the_bound_and_no_others() -> None:
    masks, figures = limit(Mask(2), [row([6, 7, 9]), row([7, 8, 9]), row([NO_VERSION, 3, 8])])
    assert masks == [(0, 1, 1), (1, 1, 1), (0, 0, 1)]
    assert figures == {"staleness/masked_tokens": 2.0, "staleness/overage_rows": 2.0}


def test_mask_trains_demonstrations_among_sampled_tokens() -> None:
    assert limit(Mask(1), [row([NO_VERSION, 3, 9], mask=[1, 1, 1])])[0] == [(1, 0, 1)]


# ---- trust -----------------------------------------------------------------------------------------------------------


def test_trust_knows_no_bound_before_it_has_seen_enough_rows_and_masks_by_age_until_then() -> None:
    policy = taught(2, *[0.5] * 31)
    rows = [row([3, 8, 9])]
    assert policy.bound is None
    assert policy.to_measure(rows, NOW) == [0]
    assert limit(policy, rows, {0: moved(0.0, 0.0, 0.0)}) == limit(Mask(2), rows)
    policy.observe([row([NOW])], [moved(1.0)], NOW)
    assert policy.bound == pytest.approx(0.5)


def test_the_bound_is_what_nearly_all_young_rows_stay_below() -> None:
    policy = taught(2, *np.linspace(0.0, 1.0, 101))
    assert policy.bound == pytest.approx(0.99)


def test_only_rows_within_the_age_bound_teach_what_is_usual() -> None:
    policy = taught(2, *[0.5] * 32)
    old, given = row([1, 9]), row([NO_VERSION], mask=[1])
    policy.observe([old, given] * 100, [moved(5.0, 5.0), moved(5.0)] * 100, NOW)
    assert policy.bound == pytest.approx(0.5)


def test_what_was_usual_long_ago_is_forgotten() -> None:
    policy = taught(2, *[8.0] * 100, *[0.5] * 1024)
    assert policy.bound == pytest.approx(0.5)


def test_divergence_is_measured_on_trained_tokens_only() -> None:
    policy = Trust(2)
    prompt_and_reply = row([NO_VERSION, 8, 9])
    policy.observe([prompt_and_reply] * 32, [moved(1.0, -1.0)] * 32, NOW)  # one number per trained token
    assert policy.bound == pytest.approx(0.5)


def test_trust_measures_old_rows_and_no_others() -> None:
    rows = [row([7, 9]), row([6, 9]), row([NO_VERSION, 6]), row([NO_VERSION], mask=[1])]
    assert taught(2, *[0.5] * 32).to_measure(rows, NOW) == [1, 2]


def test_an_old_row_on_which_the_policy_has_not_moved_is_trained_completely() -> None:
    policy = taught(2, *[0.5] * 32)
    masks, figures = limit(policy, [row([0, 0, 0])], {0: moved(1.0, -1.0, 0.9)})
    assert masks == [(1, 1, 1)]
    assert figures["staleness/masked_tokens"] == 0.0
    assert figures["staleness/divergence_bound"] == pytest.approx(0.5)


def test_of_an_old_row_the_tokens_that_moved_most_are_left_out_until_the_rest_is_near() -> None:
    policy = taught(2, *[0.5] * 32)
    # d²/2: 2, 0, 0.5, 8; without the 8 the mean of the others is 2.5 / 3, without the 2 it is 0.25
    masks, figures = limit(policy, [row([0, 0, 9, 9])], {0: moved(2.0, 0.0, -1.0, 4.0)})
    assert masks == [(0, 1, 1, 0)]
    assert figures["staleness/masked_tokens"] == 2.0
    assert figures["staleness/divergence_old"] == pytest.approx(10.5 / 4)


def test_an_old_row_that_moved_everywhere_is_left_out() -> None:
    assert limit(taught(2, *[0.5] * 32), [row([0, 0])], {0: moved(3.0, -3.0)})[0] == [(0, 0)]


def test_a_young_row_is_trained_whatever_its_divergence() -> None:
    policy = taught(2, *[0.5] * 32)
    assert policy.to_measure([row([7, 7])], NOW) == []
    assert limit(policy, [row([7, 7])])[0] == [(1, 1)]


rows_of_any_kind = st.lists(
    st.tuples(st.integers(0, NOW), st.sampled_from([0, 1]), st.floats(-6.0, 6.0)), min_size=1, max_size=12
)


@examples
@given(st.lists(rows_of_any_kind, min_size=1, max_size=6), st.lists(st.floats(0.0, 4.0), min_size=32, max_size=60))
def test_no_old_row_is_trained_beyond_the_bound_and_none_within_it_is_touched(
    drawn: list[list[tuple[int, int, float]]], seen: list[float]
) -> None:
    policy = taught(3, *seen)
    assert policy.bound is not None
    rows = [row([v for v, _, _ in tokens], [m for _, m, _ in tokens]) for tokens in drawn]
    asked = policy.to_measure(rows, NOW)
    measured = {i: moved(*(gap for _, _, gap in drawn[i])) for i in asked}
    masks, _ = limit(policy, rows, measured)
    for i, (sample, mask) in enumerate(zip(rows, masks, strict=True)):
        if i not in asked:
            assert mask == sample.loss_mask
            continue
        divergences = np.array([gap**2 / 2 for _, _, gap in drawn[i]])
        before, after = np.array(sample.loss_mask, dtype=bool), np.array(mask, dtype=bool)
        tolerance = 1e-9 * (1 + policy.bound)
        if divergences[before].mean() <= policy.bound - tolerance:
            assert mask == sample.loss_mask
        if after.any():
            assert divergences[after].mean() <= policy.bound + tolerance
        left_out = before & ~after
        if left_out.any() and after.any():
            assert divergences[left_out].min() >= divergences[after].max() - tolerance, "the worst go first"
        if left_out.any():  # and no more than must
            nearest = divergences[left_out].min()
            assert np.append(divergences[after], nearest).mean() > policy.bound - tolerance
