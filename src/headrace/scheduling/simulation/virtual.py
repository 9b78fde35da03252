"""What a simulation has in place of an engine and a model: episodes of a few tokens, and a policy that drifts."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from headrace.config import DriftSection, RunConfig
from headrace.data.episode import Episode, Step, TerminationReason, Trajectory
from headrace.data.sample import Sample
from headrace.data.seeds import derive_seed
from headrace.scheduling.durations import Durations


@dataclass(slots=True)
class VirtualGroup:
    """One dispatched task: everything that chance decides about it is decided when it is drawn."""

    group_id: int
    seconds: float
    slow: bool
    place: float
    uniform: bool
    failed: tuple[bool, ...]
    factor: float
    """How much more the policy moves on this task than on a usual one."""
    begun_s: float = 0.0


class VirtualTasks:
    """An endless stream of tasks. The n-th is the same in every simulation of the same seed, whatever the policy."""

    def __init__(self, config: RunConfig, durations: Durations) -> None:
        self._durations = durations
        self._group_size = config.rollout.group_size
        self._spread = config.simulate.drift.spread
        self._rng = random.Random(derive_seed("simulate", "tasks", config.run.seed))
        self._next_id = 0

    def draw(self) -> VirtualGroup:
        """The next task, under the next group id."""
        rng, durations = self._rng, self._durations
        group_id, self._next_id = self._next_id, self._next_id + 1
        seconds, slow, place = durations.group(rng)
        uniform = rng.random() < durations.filtered_share
        failed = tuple(rng.random() < durations.failed_share for _ in range(self._group_size))
        return VirtualGroup(group_id, seconds, slow, place, uniform, failed, rng.lognormvariate(0.0, self._spread))


class VirtualRollouts:
    """Makes the episodes of a group, and knows which version was current when."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self._ids = tuple(range(1, tokens + 1))
        self._logprobs = (-1.0,) * tokens
        self._published_s: list[float] = []

    def published(self, now_s: float) -> None:
        """One more version is out."""
        self._published_s.append(now_s)

    def episodes(self, group: VirtualGroup) -> list[Episode]:
        """The group's episodes, each with rewards that differ from its neighbour's unless the group is uniform."""
        step = Step((0,), self._ids, self._logprobs, self._versions(group))
        by_reward = [Trajectory((step,), reward=reward) for reward in (0.0, 1.0)]
        made: list[Episode] = []
        for index, failed in enumerate(group.failed):
            trajectory = by_reward[0 if group.uniform else index % 2]
            ended = {"error": "simulated", "termination": TerminationReason.ERROR} if failed else {}
            made.append(Episode("", (trajectory,), group.group_id, index, **ended))
        return made

    def _versions(self, group: VirtualGroup) -> tuple[int, ...]:
        """The version of every token; they are sampled at even distances over a part of the group's duration."""
        first, last = max(0.0, 2 * group.place - 1), min(1.0, 2 * group.place)
        begun_s, seconds = group.begun_s + first * group.seconds, max((last - first) * group.seconds, 1e-9)
        version = len(self._published_s)
        while version and self._published_s[version - 1] > begun_s:
            version -= 1
        versions: list[int] = []
        for published_s in self._published_s[version:]:
            share = min(1.0, (published_s - begun_s) / seconds)
            versions += [version] * (round(share * self._tokens) - len(versions))
            version += 1
        versions += [version] * (self._tokens - len(versions))
        return tuple(versions)


class VirtualPolicy:
    """The learner's view of sampled tokens: it differs the more, the older they are."""

    def __init__(self, drift: DriftSection, seed: int) -> None:
        self._drift = drift
        self._rng = np.random.default_rng(derive_seed("simulate", "drift", seed))

    def logprobs(self, samples: Sequence[Sample], age_BT: np.ndarray, factors: Iterable[float]) -> np.ndarray:
        """The learner's log-probabilities of all targets; rows are samples, which have all the same length."""
        drift = self._drift
        factor_B = np.fromiter(factors, dtype=float)
        # 0 to the power of 0 is 1: without the condition a token of this very version would have moved
        moved_BT = np.where(age_BT > 0, drift.sigma * age_BT**drift.power, 0.0) * factor_B[:, None]
        scale_BT = np.hypot(moved_BT, drift.noise)
        sampled_BT = np.array([sample.logprobs for sample in samples])
        return sampled_BT + scale_BT * self._rng.standard_normal(scale_BT.shape)
