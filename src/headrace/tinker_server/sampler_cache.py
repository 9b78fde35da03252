"""Sets of weights to sample from, in memory as long as they are used: the base model, checkpoints, snapshots."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any

from headrace.models.causal import CausalModel
from headrace.tinker_server.base import Base
from headrace.tinker_server.checkpoint_store import CheckpointPath, Store
from headrace.tinker_server.options import Refusal
from headrace.tinker_server.sampler_pool import SamplerLane, SamplerPool

OnLearner = Callable[[Callable[[], Any]], Awaitable[Any]]
BASE = ""


class Samplers:
    """Lanes by key: `BASE`, the path of a checkpoint, or the id of a snapshot. Least recently used go first."""

    def __init__(self, base: Base, pool: SamplerPool, store: Store, on_learner: OnLearner, limit: int) -> None:
        self._base, self._pool, self._store = base, pool, store
        self._on_learner = on_learner
        self._limit = limit
        self._base_lane = pool.new_lane(base.model)
        self._loaded: OrderedDict[str, asyncio.Task[SamplerLane]] = OrderedDict()
        self._snapshots: dict[str, OrderedDict[str, SamplerLane]] = {}

    def add_snapshot(self, model_id: str, key: str, model: CausalModel) -> None:
        """Weights that are kept in memory only, the newest of each training model."""
        held = self._snapshots.setdefault(model_id, OrderedDict())
        held[key] = self._pool.new_lane(model)
        while len(held) > self._limit:
            held.popitem(last=False)

    async def lane(self, key: str) -> SamplerLane:
        """Where to sample with these weights."""
        if key == BASE:
            return self._base_lane
        for held in self._snapshots.values():
            if key in held:
                held.move_to_end(key)
                return held[key]
        if not key.startswith("tinker://"):
            raise Refusal(
                "these sampler weights are no longer kept in memory; save them by name with "
                "save_weights_for_sampler, or raise --max-samplers"
            )
        return await self._checkpoint(key)

    async def _checkpoint(self, key: str) -> SamplerLane:
        task = self._loaded.get(key)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = self._loaded[key] = asyncio.create_task(self._load(CheckpointPath.parse(key)))
        self._loaded.move_to_end(key)
        while len(self._loaded) > self._limit:
            self._loaded.popitem(last=False)
        return await asyncio.shield(task)

    async def _load(self, path: CheckpointPath) -> SamplerLane:
        def load() -> CausalModel:
            adapted = self._base.adapted(self._store.note(path).shape, seed=0)
            adapted.load(self._store.read(path)["weights"])
            return adapted.model

        return self._pool.new_lane(await self._on_learner(load))

    def forget(self, key: str) -> None:
        """Let a checkpoint's weights go."""
        self._loaded.pop(key, None)

    def forget_model(self, model_id: str) -> None:
        """Let the snapshots of a training model go."""
        self._snapshots.pop(model_id, None)
