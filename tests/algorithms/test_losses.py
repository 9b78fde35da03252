"""Policy losses, the penalty and the corrections, against loops in float64 written from the formulas."""

from __future__ import annotations

import itertools
import math
import random
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd.gradcheck import gradcheck

from fakes import examples
from headrace.algorithms import losses
from headrace.algorithms.losses import Loss, LossContext, correction_weights, kl_penalty, mean_by_row, sum_by_row
from headrace.config import AlgorithmSection, CorrectionSection, KlSection
from headrace.errors import ConfigError
from headrace.registry import resolve

HOW = AlgorithmSection(clip_low=0.2, clip_high=0.28, dual_clip=3.0, dppo_delta=0.2)
BETA = 0.7


@dataclass(frozen=True)
class Tokens:
    """A micro-batch as plain lists; `of_row[i]` are the places of row i's tokens."""

    now: list[float]
    old: list[float]
    sampler: list[float]
    reference: list[float]
    advantages: list[float]
    lengths: list[int]

    @property
    def of_row(self) -> list[range]:
        ends = list(itertools.accumulate(self.lengths))
        return [range(end - length, end) for end, length in zip(ends, self.lengths, strict=True)]

    @property
    def rows(self) -> list[int]:
        return [row for row, length in enumerate(self.lengths) for _ in range(length)]


def tokens(*lengths: int, spread: float = 0.6, seed: int = 0) -> Tokens:
    """Random tokens whose log-ratios are up to `spread` either way."""
    rng = random.Random(seed)
    old = [rng.uniform(-2.0, -0.7) for _ in range(sum(lengths))]

    def near() -> list[float]:
        return [min(logprob + rng.uniform(-spread, spread), -0.05) for logprob in old]

    return Tokens(near(), old, near(), near(), [rng.uniform(-2, 2) for _ in old], list(lengths))


def far(size: float) -> Tokens:
    """Four rows whose log-ratios are `size` up or down, with advantages of both signs, beside a token at ratio 1."""
    high, low = -0.01, -0.01 - size
    then = [low, high, high, low, high, low]
    return Tokens([high, low, high, high, low, high], then, then, then, [1.0, 1.0, 0.5, -1.0, -1.0, 2.0], [1, 1, 2, 2])


def unmoved(case: Tokens) -> Tokens:
    return replace(case, now=case.old, sampler=case.old, reference=case.old)


CASES = {
    "mixed": tokens(3, 1, 4, 2),
    "wide": tokens(2, 3, 1, 5, spread=2.0, seed=1),
    "ratio 1": unmoved(tokens(3, 1, 4, 2)),
    "one token": tokens(1, 0),
    "log-ratio 30": far(30.0),
}


def context(case: Tokens, how: AlgorithmSection = HOW, dtype: torch.dtype = torch.float64) -> LossContext:
    def flat(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=dtype)

    return LossContext(
        logprobs_M=flat(case.now).requires_grad_(),
        old_logprobs_M=flat(case.old),
        sampler_logprobs_M=flat(case.sampler),
        advantages_M=flat(case.advantages),
        row_M=torch.tensor(case.rows, dtype=torch.long),
        rows=len(case.lengths),
        algorithm=how,
        reference_logprobs_M=flat(case.reference),
        dpo_beta=BETA,
    )


def one(log_ratio: float, advantage: float) -> Tokens:
    then = [-1.0 - max(log_ratio, 0.0)]
    return Tokens([then[0] + log_ratio], then, then, then, [advantage], [1])


def value_and_gradient(loss: Loss, case: Tokens, how: AlgorithmSection = HOW) -> tuple[list[float], list[float]]:
    given_context = context(case, how)
    loss_M, _ = loss(given_context)
    (gradient_M,) = torch.autograd.grad(loss_M.sum(), given_context.logprobs_M)
    return loss_M.tolist(), gradient_M.tolist()


# ---- the formulas, as loops ------------------------------------------------------------------------------------------
# `now` is what a gradient flows through, `stopped` the same numbers behind a stop-gradient.

Numbers = list[float]
Formula = Callable[[Tokens, Numbers, Numbers], Numbers]


def clip(ratio: float) -> float:
    return min(max(ratio, 1 - HOW.clip_low), 1 + HOW.clip_high)


def clipped_loss(ratio: float, advantage: float) -> float:
    gain = min(ratio * advantage, clip(ratio) * advantage)
    if HOW.dual_clip is not None and advantage < 0:
        gain = max(gain, HOW.dual_clip * advantage)
    return -gain


def ppo_clip(case: Tokens, now: Numbers, stopped: Numbers) -> Numbers:
    ratios = [math.exp(p - o) for p, o in zip(now, case.old, strict=True)]
    return [clipped_loss(r, a) for r, a in zip(ratios, case.advantages, strict=True)]


def gspo(case: Tokens, now: Numbers, stopped: Numbers) -> Numbers:
    found = [0.0] * len(now)
    for places in case.of_row:
        for i in places:
            ratio = math.exp(math.fsum(now[j] - case.old[j] for j in places) / len(places))
            found[i] = clipped_loss(ratio, case.advantages[i])
    return found


def cispo(case: Tokens, now: Numbers, stopped: Numbers) -> Numbers:
    return [-clip(math.exp(s - o)) * a * p for p, s, o, a in zip(now, stopped, case.old, case.advantages, strict=True)]


def importance_sampling(case: Tokens, now: Numbers, stopped: Numbers) -> Numbers:
    return [-math.exp(p - m) * a for p, m, a in zip(now, case.sampler, case.advantages, strict=True)]


def reinforce(case: Tokens, now: Numbers, stopped: Numbers) -> Numbers:
    return [-a * p for p, a in zip(now, case.advantages, strict=True)]


def dppo_tv(case: Tokens, now: Numbers, stopped: Numbers) -> Numbers:
    found = importance_sampling(case, now, stopped)
    for i, (p, m, a) in enumerate(zip(stopped, case.sampler, case.advantages, strict=True)):
        moved = math.exp(p) - math.exp(m)
        if (a > 0 and moved > HOW.dppo_delta) or (a < 0 and moved < -HOW.dppo_delta):
            found[i] = 0.0
    return found


def dppo_kl(case: Tokens, now: Numbers, stopped: Numbers) -> Numbers:
    found = importance_sampling(case, now, stopped)
    for i, (log_p, log_m, a) in enumerate(zip(stopped, case.sampler, case.advantages, strict=True)):
        p, m = math.exp(log_p), math.exp(log_m)
        divergence = m * math.log(m / p) + (1 - m) * math.log((1 - m) / (1 - p))
        if divergence > HOW.dppo_delta and ((a > 0 and p > m) or (a < 0 and p < m)):
            found[i] = 0.0
    return found


def cross_entropy(case: Tokens, now: Numbers, stopped: Numbers) -> Numbers:
    return [-p for p in now]


def dpo(case: Tokens, now: Numbers, stopped: Numbers) -> Numbers:
    found = [0.0] * len(now)
    for chosen, rejected in zip(case.of_row[::2], case.of_row[1::2], strict=True):
        above_c = math.fsum(now[i] for i in chosen) - math.fsum(case.reference[i] for i in chosen)
        above_r = math.fsum(now[i] for i in rejected) - math.fsum(case.reference[i] for i in rejected)
        margin = BETA * (above_c - above_r)
        for i in [*chosen, *rejected]:
            # -log σ(x) = log(1 + e^-x), written so that neither sign of x overflows
            loss = max(-margin, 0.0) + math.log1p(math.exp(-abs(margin)))
            found[i] = loss / (len(chosen) + len(rejected))
    return found


FORMULAS: dict[str, Formula] = {
    f.__name__: f for f in (ppo_clip, gspo, cispo, importance_sampling, reinforce, dppo_tv, dppo_kl, cross_entropy, dpo)
}
every_loss = pytest.mark.parametrize("name", FORMULAS)


def loss_named(name: str) -> Loss:
    return getattr(losses, name)


def slope(formula: Formula, case: Tokens, weights: Numbers) -> Numbers:
    """Central differences of the weighted sum; token by token, or a huge one would swallow the others."""
    step = 1e-6
    found = []
    for j in range(len(case.now)):
        up = [p + step * (i == j) for i, p in enumerate(case.now)]
        down = [p - step * (i == j) for i, p in enumerate(case.now)]
        ends = zip(weights, formula(case, up, case.now), formula(case, down, case.now), strict=True)
        found.append(math.fsum(w * (high - low) for w, high, low in ends) / (up[j] - down[j]))
    return found


# ---- every loss ------------------------------------------------------------------------------------------------------


@every_loss
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_loss_and_gradient_are_those_of_the_formula(name: str, case: Tokens) -> None:
    given_context = context(case)
    loss_M, _ = loss_named(name)(given_context)
    assert loss_M.tolist() == pytest.approx(FORMULAS[name](case, case.now, case.now), rel=1e-12, abs=1e-12)
    weights = [random.Random(7 + i).uniform(0.5, 1.5) for i in range(len(case.now))]
    (loss_M * torch.tensor(weights, dtype=torch.float64)).sum().backward()
    gradient_M = given_context.logprobs_M.grad
    assert gradient_M is not None
    assert gradient_M.tolist() == pytest.approx(slope(FORMULAS[name], case, weights), rel=1e-6, abs=1e-8)


# cispo stops a gradient, so its value has another slope
@pytest.mark.parametrize("name", [name for name in FORMULAS if name != "cispo"])
@pytest.mark.parametrize("case", ["mixed", "wide", "one token"])
def test_gradient_is_the_slope_of_the_value(name: str, case: str) -> None:
    fixed = context(CASES[case])
    assert gradcheck(lambda now_M: loss_named(name)(replace(fixed, logprobs_M=now_M))[0], (fixed.logprobs_M,))


@every_loss
@pytest.mark.parametrize("rows", [0, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_tokens_sum_to_zero(name: str, rows: int, dtype: torch.dtype) -> None:
    empty = context(tokens(*[0] * rows), dtype=dtype)
    loss_M, figures = loss_named(name)(empty)
    assert loss_M.shape == (0,) and loss_M.dtype == dtype
    assert loss_M.sum().item() == 0.0
    loss_M.sum().backward()
    assert empty.logprobs_M.grad is not None and empty.logprobs_M.grad.shape == (0,)
    assert all(values.numel() == 0 for values in figures.values())


@every_loss
@pytest.mark.parametrize("size", [30.0, 39.0, 50.0, 80.0, 1000.0])
def test_float32_stays_finite_however_far_the_policy_went(name: str, size: float) -> None:
    given_context = context(far(size), AlgorithmSection(), torch.float32)
    loss_M, figures = loss_named(name)(given_context)
    (gradient_M,) = torch.autograd.grad(loss_M.sum(), given_context.logprobs_M)
    assert loss_M.dtype == gradient_M.dtype == torch.float32
    assert loss_M.isfinite().all() and gradient_M.isfinite().all()
    assert gradient_M.square().sum().isfinite()
    assert all(values.isfinite().all() for values in figures.values())


@every_loss
def test_float32_agrees_with_float64(name: str) -> None:
    loss_M, _ = loss_named(name)(context(CASES["mixed"], dtype=torch.float32))
    exact_M, _ = loss_named(name)(context(CASES["mixed"]))
    assert loss_M.tolist() == pytest.approx(exact_M.tolist(), rel=1e-5, abs=1e-6)


@every_loss
def test_metrics_carry_no_gradient(name: str) -> None:
    _, figures = loss_named(name)(context(CASES["mixed"]))
    assert not any(values.requires_grad for values in figures.values())


@examples
@given(st.data())
def test_a_permutation_of_rows_permutes_losses(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(FORMULAS)))
    unit = 2 if name == "dpo" else 1  # pairs stay together
    units = data.draw(st.integers(1, 4))
    lengths = data.draw(st.lists(st.integers(0, 5), min_size=unit * units, max_size=unit * units))
    case = tokens(*lengths, spread=3.0, seed=data.draw(st.integers(0, 1000)))
    order = [unit * u + i for u in data.draw(st.permutations(range(units))) for i in range(unit)]
    moved = [place for row in order for place in case.of_row[row]]

    def permuted(values: Numbers) -> Numbers:
        return [values[place] for place in moved]

    now, old, sampler, reference, advantages = map(
        permuted, (case.now, case.old, case.sampler, case.reference, case.advantages)
    )
    turned = Tokens(now, old, sampler, reference, advantages, [lengths[row] for row in order])
    found, gradient = value_and_gradient(loss_named(name), turned)
    whole, whole_gradient = value_and_gradient(loss_named(name), case)
    assert found == pytest.approx(permuted(whole), rel=1e-12)
    assert gradient == pytest.approx(permuted(whole_gradient), rel=1e-12)


@every_loss
def test_every_loss_is_found_by_its_name(name: str) -> None:
    assert resolve("loss", name) is loss_named(name)


# ---- facts about single losses ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.5, 1.0, -1.28, 0.0),
        (0.5, 1.0, -0.5, -0.5),
        (1.5, -1.0, 1.5, 1.5),
        (0.5, -1.0, 0.8, 0.0),
        (1.25, 1.0, -1.25, -1.25),  # between 1 + low and 1 + high: the sides are not the same
        (1.0, 0.0, 0.0, 0.0),
    ],
)
def test_ppo_clips_gains_on_either_side_and_never_losses(
    ratio: float, advantage: float, loss: float, gradient: float
) -> None:
    case = one(math.log(ratio), advantage)
    assert value_and_gradient(losses.ppo_clip, case) == (pytest.approx([loss]), pytest.approx([gradient]))
    _, figures = losses.ppo_clip(context(case))
    assert figures["policy/clip_fraction"].tolist() == [float(gradient == 0.0 and advantage != 0.0)]
    assert figures["policy/ratio_mean"].tolist() == pytest.approx([ratio])


@pytest.mark.parametrize("loss", [losses.ppo_clip, losses.gspo])
def test_dual_clip_bounds_the_loss_of_negative_advantages_only(loss: Loss) -> None:
    without = HOW.model_copy(update={"dual_clip": None})
    grown, positive = one(math.log(5.0), -2.0), one(math.log(5.0), 2.0)
    assert value_and_gradient(loss, grown, without) == (pytest.approx([10.0]), pytest.approx([10.0]))
    assert value_and_gradient(loss, grown) == (pytest.approx([6.0]), [0.0])
    assert loss(context(grown))[1]["policy/clip_fraction"].tolist() == [1.0]
    assert value_and_gradient(loss, positive) == value_and_gradient(loss, positive, without)
    below = one(math.log(2.0), -2.0)
    assert value_and_gradient(loss, below) == (pytest.approx([4.0]), pytest.approx([4.0]))


def test_gspo_uses_the_mean_of_the_row() -> None:
    case = Tokens([-0.7, -1.1, -2.0], [-1.0, -1.0, -2.0], [0.0] * 3, [0.0] * 3, [1.0, 1.0, -1.0], [2, 1])
    _, figures = losses.gspo(context(case))
    assert figures["policy/ratio_mean"].tolist() == pytest.approx([math.exp(0.1), math.exp(0.1), 1.0])


def test_gspo_of_one_token_rows_is_ppo_clip() -> None:
    case = tokens(*[1] * 9)
    assert value_and_gradient(losses.gspo, case) == value_and_gradient(losses.ppo_clip, case)


def test_gradient_of_cispo_does_not_flow_through_the_ratio() -> None:
    for ratio, weight in ((0.5, 0.8), (1.1, 1.1), (4.0, 1.28)):
        _, gradient = value_and_gradient(losses.cispo, one(math.log(ratio), 2.0))
        assert gradient == pytest.approx([-weight * 2.0])


def test_importance_sampling_is_against_the_sampler_and_ppo_against_the_old_policy() -> None:
    case = Tokens([-1.0], [-1.1], [-1.2], [0.0], [1.0], [1])
    assert value_and_gradient(losses.importance_sampling, case)[0] == pytest.approx([-math.exp(0.2)])
    assert value_and_gradient(losses.ppo_clip, case)[0] == pytest.approx([-math.exp(0.1)])


@pytest.mark.parametrize("name", ["dppo_tv", "dppo_kl"])
@pytest.mark.parametrize("advantage", [1.0, 0.0, -1.0])
@pytest.mark.parametrize(("mu", "pi"), [(0.2, 0.9), (0.9, 0.2), (0.5, 0.6), (0.6, 0.5), (0.5, 0.5), (1e-9, 1e-6)])
def test_dppo_drops_exactly_what_went_far_and_is_pushed_on(name: str, advantage: float, mu: float, pi: float) -> None:
    case = Tokens([math.log(pi)], [0.0], [math.log(mu)], [0.0], [advantage], [1])
    _, figures = loss_named(name)(context(case))
    dropped = abs(pi - mu) > 0.2 and advantage * (pi - mu) > 0
    assert figures["policy/dropped_fraction"].tolist() == [float(dropped)]
    loss, gradient = value_and_gradient(loss_named(name), case)
    assert loss == gradient == pytest.approx([0.0 if dropped else -pi / mu * advantage])


def test_binary_kl_is_from_the_sampler_to_the_policy() -> None:
    case = Tokens([math.log(0.15)], [0.0], [math.log(0.01)], [0.0], [1.0], [1])
    # 0.12 this way round, 0.28 the other, and the bound is 0.2
    assert losses.dppo_kl(context(case))[1]["policy/dropped_fraction"].tolist() == [0.0]


@pytest.mark.parametrize(
    ("now", "then"), [(0.0, 0.0), (0.0, -1e-6), (-1e-6, 0.0), (1e-7, 1e-7), (1e-7, -1e-6), (-90.0, -90.0)]
)
def test_binary_kl_of_near_certain_tokens_is_no_nan(now: float, then: float) -> None:
    case = Tokens([now], [then], [then], [then], [1.0], [1])
    loss_M, figures = losses.dppo_kl(context(case, dtype=torch.float32))
    assert loss_M.tolist() == pytest.approx([-1.0], rel=1e-5) or figures["policy/dropped_fraction"].item() == 1.0
    divergence = losses._binary_kl(torch.tensor([then]), torch.tensor([now]))
    assert not divergence.isnan().any()


def test_margin_of_dpo_worked() -> None:
    case = Tokens([-1.0, -0.2, -3.0], [0.0] * 3, [0.0] * 3, [-1.5, -1.0, -2.5], [0.0] * 3, [2, 1])
    loss_M, figures = losses.dpo(replace(context(case), dpo_beta=1.0))
    assert loss_M.sum().item() == pytest.approx(-math.log(1 / (1 + math.exp(-1.8))))
    assert loss_M.tolist() == pytest.approx([loss_M.sum().item() / 3] * 3)
    assert {key: values.tolist() for key, values in figures.items()} == {
        "dpo/loss": pytest.approx([-math.log(1 / (1 + math.exp(-1.8)))]),
        "dpo/accuracy": [1.0],
        "dpo/margin": pytest.approx([1.8]),
        "dpo/chosen_reward": pytest.approx([1.3]),
        "dpo/rejected_reward": pytest.approx([-0.5]),
    }


def test_token_losses_of_dpo_add_up_to_those_of_the_pairs() -> None:
    loss_M, figures = losses.dpo(context(tokens(3, 5, 1, 1, 0, 0, 4, 0)))
    margins = figures["dpo/margin"].tolist()
    assert len(margins) == 3  # the pair without tokens is not there
    assert loss_M.sum().item() == pytest.approx(math.fsum(math.log1p(math.exp(-margin)) for margin in margins))


def test_dpo_without_a_reference_says_what_to_set() -> None:
    with pytest.raises(ConfigError, match=r'algorithm\.objective = "dpo"'):
        losses.dpo(replace(context(tokens(1, 1)), reference_logprobs_M=None))


def test_row_sums_and_means_are_zero_for_a_row_without_tokens() -> None:
    values_M, row_M = torch.tensor([1.0, 3.0, 5.0]), torch.tensor([0, 0, 2])
    assert sum_by_row(values_M, row_M, 4).tolist() == [4.0, 0.0, 5.0, 0.0]
    assert mean_by_row(values_M, row_M, 4).tolist() == [2.0, 0.0, 5.0, 0.0]


# ---- the penalty -----------------------------------------------------------------------------------------------------

KINDS: dict[Literal["k1", "k2", "k3", "abs"], Callable[[float], float]] = {
    "k1": lambda d: d,
    "k2": lambda d: d * d / 2,
    "k3": lambda d: math.exp(-d) - 1 + d,
    "abs": abs,
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def test_every_kind_of_the_config_is_tested() -> None:
    assert KlSection.model_json_schema()["properties"]["kind"]["enum"] == list(KINDS)


@every_kind
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_penalty_is_that_of_the_formula(kind: Literal["k1", "k2", "k3", "abs"], case: Tokens) -> None:
    now_M, reference_M = context(case).logprobs_M, torch.tensor(case.reference, dtype=torch.float64)
    expected = [KINDS[kind](p - q) for p, q in zip(case.now, case.reference, strict=True)]
    assert kl_penalty(kind, now_M, reference_M).tolist() == pytest.approx(expected, rel=1e-12, abs=1e-12)
    if case in (CASES["mixed"], CASES["wide"], CASES["one token"]):
        assert gradcheck(lambda logprobs_M: kl_penalty(kind, logprobs_M, reference_M), (now_M,))


@every_kind
@pytest.mark.parametrize("distance", [-1000.0, -80.0, -30.0, 0.0, 30.0, 80.0, 1000.0])
def test_penalty_stays_finite_and_never_pushes_away(kind: Literal["k1", "k2", "k3", "abs"], distance: float) -> None:
    now_M = torch.tensor([-5.0 + distance], requires_grad=True)
    penalty_M = kl_penalty(kind, now_M, torch.tensor([-5.0]))
    penalty_M.sum().backward()
    assert now_M.grad is not None
    assert penalty_M.isfinite().all() and now_M.grad.square().isfinite().all()
    if kind != "k1":  # its gradient is 1 on either side
        assert now_M.grad.item() * distance >= 0


@examples
@given(st.floats(-100, 100, width=32), st.sampled_from([torch.float32, torch.float64]))
def test_k3_is_never_negative(distance: float, dtype: torch.dtype) -> None:
    penalty = kl_penalty("k3", torch.tensor([distance], dtype=dtype), torch.zeros(1, dtype=dtype)).item()
    assert penalty >= 0 and (penalty > 0 or abs(distance) < 1e-3)


@every_kind
def test_no_tokens_have_no_penalty(kind: Literal["k1", "k2", "k3", "abs"]) -> None:
    assert kl_penalty(kind, torch.zeros(0), torch.zeros(0)).sum().item() == 0.0


# ---- corrections -----------------------------------------------------------------------------------------------------

CORRECTIONS = {
    "none": CorrectionSection(),
    "tis": CorrectionSection(name="tis", low=0.6, high=1.5),
    "tis sequence": CorrectionSection(name="tis", level="sequence", low=0.6, high=1.5),
    "icepop": CorrectionSection(name="icepop", low=0.5, high=1.5),
    "sequence_mask": CorrectionSection(name="sequence_mask", low=0.9, high=1.2),
    "veto": CorrectionSection(name="veto", floor=0.7),
}
every_correction = pytest.mark.parametrize("correction", CORRECTIONS.values(), ids=CORRECTIONS)


def weights_by_loop(correction: CorrectionSection, case: Tokens) -> Numbers:
    found = [0.0] * len(case.old)
    for places in case.of_row:
        row = {i: math.exp(case.old[i] - case.sampler[i]) for i in places}
        for i in places:
            low, high, product = correction.low, correction.high, math.prod(row.values())
            found[i] = {
                "none": 1.0,
                "tis": min(max(product if correction.level == "sequence" else row[i], low), high),
                "icepop": row[i] if low <= row[i] <= high else 0.0,
                "sequence_mask": float(low <= product ** (1 / len(row)) <= high),
                "veto": float(min(row.values()) >= correction.floor),
            }[correction.name]
    return found


def weigh(
    correction: CorrectionSection, case: Tokens, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, dict[str, Tensor]]:
    old_M = torch.tensor(case.old, dtype=dtype, requires_grad=True)
    sampler_M, row_M = torch.tensor(case.sampler, dtype=dtype), torch.tensor(case.rows, dtype=torch.long)
    return correction_weights(correction, old_M, sampler_M, row_M, len(case.lengths))


@every_correction
@pytest.mark.parametrize("seed", range(4))
def test_correction_is_that_of_the_loop(correction: CorrectionSection, seed: int) -> None:
    case = tokens(3, 1, 4, 0, 2, 3, 1, seed=seed)
    weights_M, figures = weigh(correction, case)
    expected = weights_by_loop(correction, case)
    assert weights_M.tolist() == pytest.approx(expected, rel=1e-12)
    assert not weights_M.requires_grad
    masked = figures.get("policy/masked_fraction")
    assert (masked is None) == (correction.name in ("none", "tis"))
    assert masked is None or masked.tolist() == [float(weight == 0) for weight in expected]
    if correction.name != "none":
        assert figures["policy/correction_mean"].tolist() == weights_M.tolist()


@pytest.mark.parametrize("name", [name for name in CORRECTIONS if name != "none"])
def test_each_correction_of_the_loops_corrects_some_and_leaves_some(name: str) -> None:
    weights = [
        w for seed in range(4) for w in weights_by_loop(CORRECTIONS[name], tokens(3, 1, 4, 0, 2, 3, 1, seed=seed))
    ]
    bounds = {0.6, 1.5} if name.startswith("tis") else {0.0}
    assert bounds <= set(weights) and not set(weights) <= bounds


@every_correction
def test_correction_at_ratio_1_is_1(correction: CorrectionSection) -> None:
    weights_M, _ = weigh(correction, unmoved(tokens(3, 1, 4, 2)))
    assert weights_M.tolist() == [1.0] * 10


@every_correction
@pytest.mark.parametrize("gap", [-1000.0, -80.0, -30.0, 30.0, 80.0, 1000.0])
def test_correction_stays_within_its_bounds_however_wide_the_gap(correction: CorrectionSection, gap: float) -> None:
    case = replace(tokens(2, 1, spread=0.0), old=[-5.0 + gap] * 3, sampler=[-5.0] * 3)
    weights_M, _ = weigh(correction, case, torch.float32)
    assert weights_M.dtype == torch.float32
    assert weights_M.tolist() == pytest.approx(
        {
            "none": [1.0] * 3,
            "tis": [0.6 if gap < 0 else 1.5] * 3,
            "icepop": [0.0] * 3,
            "sequence_mask": [0.0] * 3,
            "veto": [float(gap > 0)] * 3,
        }[correction.name]
    )


@every_correction
def test_no_tokens_have_no_weights(correction: CorrectionSection) -> None:
    weights_M, figures = weigh(correction, tokens(0, 0))
    assert weights_M.shape == (0,)
    assert all(values.numel() == 0 for values in figures.values())


# ---- a user's own ----------------------------------------------------------------------------------------------------


def documented_example() -> str:
    """The indented code in the docstring of LossContext."""
    lines = (LossContext.__doc__ or "").splitlines()
    code = [line if line.startswith(" " * 8) else "" for line in lines]
    return textwrap.dedent("\n".join(code)).strip() + "\n"


def test_the_documented_own_loss_is_found_by_name_and_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_losses.py").write_text(documented_example())
    monkeypatch.syspath_prepend(tmp_path)
    case = Tokens([-1.0, -6.0], [0.0] * 2, [0.0] * 2, [0.0] * 2, [2.0, 2.0], [2])
    for name in ("my_losses:bounded_reinforce", f"{tmp_path}/my_losses.py:bounded_reinforce"):
        own: Loss = resolve("loss", name)
        assert value_and_gradient(own, case) == ([2.0, 0.0], [-2.0, 0.0])
        assert own(context(case))[1]["loss/unlikely_fraction"].tolist() == [0.0, 1.0]
