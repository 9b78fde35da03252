# pyright: reportMissingImports=false
"""VerlWorker: verl's Tinker worker as one of Headrace's ranks. It runs in a Ray actor that verl's group makes."""

from __future__ import annotations

import os
from typing import Any

import torch
from verl.workers.engine_workers_tinker import TinkerTrainingWorker

from headrace.backends.ranks.actors import RankActor
from headrace.backends.ranks.wire import Answer
from headrace.backends.ranks.worker import answer
from headrace.backends.verl.learner import VerlLearner
from headrace.backends.verl.platform import on_gpus
from headrace.backends.verl.settings import worker_config
from headrace.config import RunConfig
from headrace.registry import load_object

_CPU = "headrace.backends.verl.cpu"


class VerlWorker(TinkerTrainingWorker):
    """Whoever watches over it asks for `progress`, `stacks` and `where` while `call` computes."""

    def __init__(self, config: RunConfig, threads: int) -> None:
        torch.set_num_threads(threads)
        size = int(os.environ["WORLD_SIZE"])
        if not on_gpus(config):
            load_object(f"{_CPU}:register_engine")()
            # longer than the controller's patience, which sees more: it has the ranks' stacks
            load_object(f"{_CPU}:join_group")(2 * config.backend.rank_timeout_s + 60)
        super().__init__(worker_config(config, size))
        self._watched = RankActor()
        self._learner = VerlLearner(self, config, self.rank, size)

    def call(self, method: str, arguments: tuple[Any, ...]) -> Answer:
        """A method of the learner."""
        return answer(lambda: getattr(self._learner, method)(*arguments))

    def progress(self) -> int:
        return self._watched.progress()

    def stacks(self) -> str:
        return self._watched.stacks()

    def where(self) -> tuple[str, str]:
        return self._watched.where()
