"""Two evaluations compared task by task: the difference of pass@1, how sure it is, and where it comes from."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headrace.data.codec import JsonData
from headrace.errors import ConfigError
from headrace.evaluation.evaluator import bootstrap_interval
from headrace.evaluation.results_file import EvaluationResult, SetResult, TaskScore

_RESAMPLES = 2000
Pair = tuple[TaskScore, TaskScore]


@dataclass(frozen=True, slots=True)
class Difference(JsonData):
    """How the second evaluation differs from the first, on one set or on one source of it.

    `better`, `worse` and `same` count tasks; `p_value` is the exact sign test of better against worse, which for one
    attempt per task is McNemar's.
    """

    set: str
    source: str | None
    tasks: int
    first: float
    second: float
    difference: float
    low: float
    high: float
    better: int
    worse: int
    same: int
    p_value: float


def compare(first: EvaluationResult, second: EvaluationResult, common: bool = False, seed: int = 0) -> list[Difference]:
    """Differences per set and, where a set has several, per source.

    Both must be of the same tasks; with `common`, what only one of them has is left out.
    """
    found: list[Difference] = []
    for name, (one, other) in _common_sets(first, second, common).items():
        pairs = _pairs(name, one, other, common)
        found.append(difference(name, None, pairs, seed))
        sources = sorted({before.source for before, _ in pairs})
        if len(sources) > 1:
            parts = {source: [pair for pair in pairs if pair[0].source == source] for source in sources}
            found += [difference(name, source, part, seed) for source, part in parts.items()]
    return found


def difference(name: str, source: str | None, pairs: Sequence[Pair], seed: int = 0) -> Difference:
    """The difference over pairs of scores of the same tasks."""
    changes = [after.share - before.share for before, after in pairs]
    better, worse = sum(change > 0 for change in changes), sum(change < 0 for change in changes)
    shares = [before.share for before, _ in pairs], [after.share for _, after in pairs]
    first, second, change, low, high = mean_change(*shares, seed)
    return Difference(
        set=name,
        source=source,
        tasks=len(pairs),
        first=first,
        second=second,
        difference=change,
        low=low,
        high=high,
        better=better,
        worse=worse,
        same=len(pairs) - better - worse,
        p_value=sign_test(better, worse),
    )


def mean_change(
    first: Sequence[float], second: Sequence[float], seed: int = 0
) -> tuple[float, float, float, float, float]:
    """Both means, their difference, and its 95% interval: a paired bootstrap over tasks."""
    changes = [after - before for before, after in zip(first, second, strict=True)]
    return _mean(first), _mean(second), _mean(changes), *bootstrap_interval(changes, seed, _RESAMPLES)


def sign_test(better: int, worse: int) -> float:
    """Chance of a split at least this uneven if both were as likely; two-sided, exact."""
    trials = better + worse
    tail = sum(math.comb(trials, k) for k in range(min(better, worse) + 1))
    return min(1.0, 2 * tail / 2**trials)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _common_sets(
    first: EvaluationResult, second: EvaluationResult, common: bool
) -> dict[str, tuple[SetResult, SetResult]]:
    one, other = ({found.name: found for found in result.sets} for result in (first, second))
    shared = {name: (one[name], other[name]) for name in one if name in other}
    if not shared:
        raise ConfigError(f"{first.of} has the sets {_listed(one)}, {second.of} has {_listed(other)}: none in common")
    if not common and one.keys() != other.keys():
        alone = sorted(one.keys() ^ other.keys())
        raise ConfigError(f"only one of both has the sets {_listed(alone)}; add --common to compare the others")
    return shared


def _pairs(name: str, one: SetResult, other: SetResult, common: bool) -> list[Pair]:
    before, after = ({score.id: score for score in result.tasks} for result in (one, other))
    shared = [task_id for task_id in before if task_id in after]
    if not shared:
        raise ConfigError(f'set "{name}": the evaluations have no task in common{_why_none(before, after)}')
    alone = len(before) + len(after) - 2 * len(shared)
    if alone and not common:
        only = next(task_id for task_id in (*before, *after) if (task_id in before) != (task_id in after))
        raise ConfigError(
            f'set "{name}": the task lists differ ({len(before)} and {len(after)} tasks, {len(shared)} in common; '
            f'only one has "{only}"); evaluate the same tasks, or add --common to compare those in common'
        )
    pairs = [(before[task_id], after[task_id]) for task_id in shared]
    other_text = [a.id for a, b in pairs if a.digest and b.digest and a.digest != b.digest]
    if other_text:
        raise ConfigError(
            f'set "{name}": {len(other_text)} tasks have the same id and ask something else, such as '
            f'"{other_text[0]}"; these are not the same tasks'
        )
    return pairs


def _why_none(before: Mapping[str, TaskScore], after: Mapping[str, TaskScore]) -> str:
    if before and after:
        return f' (one has "{next(iter(before))}", the other "{next(iter(after))}")'
    return "; of one of them no episodes are on record"


def _listed(names: Mapping[str, object] | Sequence[str]) -> str:
    return ", ".join(f'"{name}"' for name in names) or "none"
