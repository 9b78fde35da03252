"""A pool of two engine processes passes the engine contract."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

from test_process_contract import TestProcessEngine as _OneProcess
from test_process_contract import folder

from contracts.engine_harness import Start, soon, submitted, under_way
from fork_server import SMOKE
from headrace.engines.base import SamplingParams
from headrace.engines.pool import EnginePool
from headrace.engines.process.engine import ProcessEngine
from headrace.engines.process.wire import EngineOptions
from headrace.weights.shared_memory import SharedWeights
from headrace.weights.source import ModelWeights

__all__ = ["folder"]


class TestPool(_OneProcess):
    made: Any

    def break_model(self) -> str:
        for pool in self.made:
            for replica in pool.replicas:
                os.kill(replica.engine.pid, signal.SIGUSR1)
        return SMOKE

    async def loaded(self, engine: Any) -> Start:
        """Once both replicas serve: loading one takes longer than the other's long request."""
        params = SamplingParams(max_tokens=2)
        await asyncio.gather(*(soon(engine.generate(self.prompt(5, seed), params, seed)) for seed in range(16)))
        return lambda **_: engine

    async def test_short_requests_do_not_wait_for_long_ones(self, start: Start) -> None:
        started = await self.loaded(start(max_batch=2))
        await super().test_short_requests_do_not_wait_for_long_ones(started)

    async def test_recomputing_serves_all_that_are_in_flight(self, start: Start) -> None:
        started = await self.loaded(start(cache_on_publish="recompute", prefill_tokens=50))
        await super().test_recomputing_serves_all_that_are_in_flight(started)

    async def test_health_counts(self, start: Start) -> None:
        """Each replica has as many slots as an engine that is alone."""
        engine = start(max_batch=2)
        tasks = [self.asked(engine, self.long, seed) for seed in range(5)]
        await submitted(engine, 5)
        await under_way(engine, 2)
        busy = engine.health()
        assert busy.running + busy.waiting == 5 and 2 <= busy.running <= 4
        assert sum(one.running for one in busy.replicas) == busy.running
        await engine.resume()
        await soon(asyncio.gather(*tasks))
        done = engine.health()
        assert (done.running, done.waiting, done.generated_tokens) == (0, 0, 5 * self.long)

    async def test_pinned_requests_go_before_all_that_wait(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, start: Start
    ) -> None:
        """On every replica, that is."""
        engine: Any = start(max_batch=1)
        ended: list[str] = []
        first = [self.asked(engine, self.long, seed) for seed in range(2)]  # one for each
        await submitted(engine, 2)
        await under_way(engine, 2)
        tasks = {
            **{f"waiting {i}": self.asked(engine, 3, seed=i) for i in range(4)},
            **{f"pinned {i}": self.asked(engine, 3, seed=i, pinned=True) for i in range(4)},
        }
        for name, task in tasks.items():
            task.add_done_callback(lambda _, name=name: ended.append(name.split()[0]))
        await submitted(engine, 10)
        assert [replica.in_flight for replica in engine.replicas] == [5, 5]
        await engine.resume()
        await soon(asyncio.gather(*first, *tasks.values()))
        # two of each per replica, and the replicas do not wait for each other
        assert ended.index("waiting") >= 2 and ended[-2:] == ["waiting"] * 2 and "pinned" not in ended[-2:]
        assert sum(name == "pinned" for name in ended[:6]) == 4

    def make_engine(self, **options: Any) -> Any:
        given = EngineOptions(self.section, health_every_s=0.001, **options)
        weights = SharedWeights(ModelWeights(self.hf_model))
        self.weights.append(weights)
        engines = [ProcessEngine(weights, given, self.forks.launch, waits=False) for _ in range(2)]
        pool: Any = EnginePool(engines)
        self.made.append(pool)
        return pool


del _OneProcess
