# pyright: reportMissingImports=false
"""The part of `verl_pool` that imports verl."""

from __future__ import annotations

from typing import Any, ClassVar

import ray
from verl.workers.engine_workers_tinker import TinkerTrainingWorker

from headrace.backends.ranks.wire import Answer
from headrace.backends.ranks.worker import answer
from headrace.backends.verl import launching
from headrace.backends.verl.launching import VerlRanks
from headrace.backends.verl.learner import VerlLearner
from headrace.backends.verl.settings import worker_config
from headrace.backends.verl.worker import VerlWorker
from headrace.config import RunConfig


class PooledWorker(VerlWorker):
    """It can be built again in its process, as its constructor did it the first time."""

    def rebuild(self, config: RunConfig) -> Answer:
        def build() -> None:
            size = self.world_size
            TinkerTrainingWorker.__init__(self, worker_config(config, size))
            self._learner = VerlLearner(self, config, self.rank, size)

        return answer(build)


class PooledRanks(VerlRanks):
    """Ranks that are kept when they are killed."""

    idle: ClassVar[dict[int, list[PooledRanks]]] = {}

    @classmethod
    def taken(cls, config: RunConfig, size: int) -> PooledRanks | None:
        """Ranks that are free, for a new configuration."""
        free = cls.idle.get(size, [])
        if not free:
            return None
        ranks = free.pop()
        ranks._config = config
        return ranks

    @classmethod
    def close_all(cls) -> None:
        for free in cls.idle.values():
            for ranks in free:
                VerlRanks.kill(ranks)
        cls.idle.clear()

    def start(self) -> None:
        if self._actors:
            asked = [actor.rebuild.remote(self._config) for actor in self._actors]
            assert all(not one.foreign and one.error is None for one in ray.get(asked)), ray.get(asked)
            return
        plain: Any = launching.VerlWorker
        launching.VerlWorker = PooledWorker  # type: ignore[misc]
        try:
            super().start()
        finally:
            launching.VerlWorker = plain

    def kill(self) -> None:
        if self._actors and self not in self.idle.setdefault(self.size, []):
            self.idle[self.size].append(self)
