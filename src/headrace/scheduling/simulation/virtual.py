"""Stand-ins for the engine and the model in a simulation: short episodes, and a policy that drifts."""

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
    """One dispatched task. All its random properties are drawn with it."""

    group_id: int
    seconds: float
    slow: bool
    token_place: float
    uniform: bool
    failed: tuple[bool, ...]
    factor: float
    """How much more the policy moves on this task than on the median one."""
    begun_s: float = 0.0
    engine: int = -1
    """The engine that runs it; -1 while it waits."""
    starts: int = 0
    """How often it began: the loss of its engine makes it begin again."""


class VirtualTasks:
    """An endless stream of tasks. The n-th task depends on the seed only, not on the policy."""

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
        seconds, slow, token_place = durations.group(rng)
        uniform = rng.random() < durations.filtered_share
        failed = tuple(rng.random() < durations.failed_share for _ in range(self._group_size))
        factor = rng.lognormvariate(0.0, self._spread)
        return VirtualGroup(group_id, seconds, slow, token_place, uniform, failed, factor)


class VirtualRollouts:
    """Makes the episodes of a group, with the version that was current for each token."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self._ids = tuple(range(1, tokens + 1))
        self._logprobs = (-1.0,) * tokens
        self._synced_s: list[float] = []

    def synced(self, now_s: float) -> None:
        """The next version was synced."""
        self._synced_s.append(now_s)

    def episodes(self, group: VirtualGroup) -> list[Episode]:
        """The group's episodes, with alternating rewards unless the group is uniform."""
        step = Step((0,), self._ids, self._logprobs, self._versions(group))
        by_reward = [Trajectory((step,), reward=reward) for reward in (0.0, 1.0)]
        made: list[Episode] = []
        for index, failed in enumerate(group.failed):
            trajectory = by_reward[0 if group.uniform else index % 2]
            ended = {"error": "simulated", "termination": TerminationReason.ERROR} if failed else {}
            made.append(Episode("", (trajectory,), group.group_id, index, **ended))
        return made

    def _versions(self, group: VirtualGroup) -> tuple[int, ...]:
        """The version of every token. Tokens are spread evenly over a part of the group's duration."""
        first, last = max(0.0, 2 * group.token_place - 1), min(1.0, 2 * group.token_place)
        begun_s, seconds = group.begun_s + first * group.seconds, max((last - first) * group.seconds, 1e-9)
        version = len(self._synced_s)
        while version and self._synced_s[version - 1] > begun_s:
            version -= 1
        versions: list[int] = []
        for synced_s in self._synced_s[version:]:
            share = min(1.0, (synced_s - begun_s) / seconds)
            versions += [version] * (round(share * self._tokens) - len(versions))
            version += 1
        versions += [version] * (self._tokens - len(versions))
        return tuple(versions)


class VirtualPolicy:
    """The learner's log-probabilities of sampled tokens: they diverge with age."""

    def __init__(self, drift: DriftSection, seed: int) -> None:
        self._drift = drift
        self._rng = np.random.default_rng(derive_seed("simulate", "drift", seed))

    def logprobs(self, samples: Sequence[Sample], age_BT: np.ndarray, factors: Iterable[float]) -> np.ndarray:
        """The learner's log-probabilities of all targets; rows are samples of equal length."""
        drift = self._drift
        factor_B = np.fromiter(factors, dtype=float)
        # 0 to the power of 0 is 1: without the condition a token of the current version would have moved
        moved_BT = np.where(age_BT > 0, drift.sigma * age_BT**drift.power, 0.0) * factor_B[:, None]
        scale_BT = np.hypot(moved_BT, drift.noise)
        sampled_BT = np.array([sample.logprobs for sample in samples])
        return sampled_BT + scale_BT * self._rng.standard_normal(scale_BT.shape)
