"""A pool of two engine processes passes the engine contract."""

from __future__ import annotations

from typing import Any

from test_process_contract import TestProcessEngine as _OneProcess
from test_process_contract import folder

from headrace.engines.pool import EnginePool
from headrace.engines.process.engine import ProcessEngine
from headrace.engines.process.wire import EngineOptions
from headrace.weights.shared_memory import SharedWeights
from headrace.weights.source import ModelWeights

__all__ = ["folder"]


class TestPool(_OneProcess):
    def make_engine(self, **options: Any) -> Any:
        given = EngineOptions(self.section, health_every_s=0.001, **options)
        weights = SharedWeights(ModelWeights(self.hf_model))
        self.weights.append(weights)
        engines = [ProcessEngine(weights, given, self.forks.launch, waits=False) for _ in range(2)]
        pool: Any = EnginePool(engines)
        self.made.append(pool)
        return pool


del _OneProcess
