"""LocalBackend: the async face of one learner in this process, which runs on a thread of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar, TypeVar

from headrace.backends.base import Scorer, Trained
from headrace.backends.local.check import check_model
from headrace.backends.local.host import new_host
from headrace.backends.local.learner import Learner
from headrace.backends.local.numerics import numerics
from headrace.backends.local.storage import State, copy_state, write_state
from headrace.backends.local.token_losses import require_known_losses
from headrace.config import AlgorithmSection, RunConfig
from headrace.data.episode import Step
from headrace.data.sample import TrainBatch
from headrace.engines.base import ModelHost
from headrace.engines.placement import check_threads, takes_turns
from headrace.models.tensor_threads import TensorThread
from headrace.tracking.metrics import MetricsAggregator
from headrace.weights.base import WeightSender
from headrace.weights.in_place import InPlace
from headrace.weights.sender import TO_SERVERS, ServerSender
from headrace.weights.source import ModelWeights

T = TypeVar("T")


class LocalBackend:
    """Full fine-tuning or LoRA with torch, on one machine. All tensor work runs on one thread at a time."""

    transports: ClassVar[tuple[str, ...]] = ("in_place", "shared_memory", *TO_SERVERS)

    def __init__(self, config: RunConfig) -> None:
        self._worker = TensorThread("headrace-learner", stays=takes_turns(config))
        self.learner = self._worker.submit(lambda: Learner(config)).result()
        self.tokenizer = self.learner.tokenizer
        self._weights = ModelWeights(self.learner.hf_model, self._on_worker)
        self._in_place = InPlace(self.learner.model, self._worker, self.learner.scoring)
        self._sender: WeightSender | None = None
        self._copied: State | None = None  # of the last snapshot, whose memory the next one uses

    @staticmethod
    def check(config: RunConfig) -> None:
        check_threads(config)
        require_known_losses(config)
        check_model(config, fast_path=True)

    @staticmethod
    def numerics(config: RunConfig) -> dict[str, str]:
        return numerics(config)

    @property
    def where(self) -> str:
        return self.learner.where

    def host(self, transport: str) -> ModelHost:
        host = new_host(transport, self.tokenizer, self.learner.hf_model, self._in_place, self._weights)
        self._sender = host.sender
        return host

    async def forward_backward(self, batch: TrainBatch, algorithm: AlgorithmSection) -> Trained:
        return await self._on_worker(lambda: self.learner.forward_backward(batch, algorithm))

    async def optim_step(self, lr: float, grad_scale: float) -> MetricsAggregator:
        return await self._on_worker(lambda: self.learner.optim_step(lr, grad_scale))

    async def compute_logprobs(self, batch: TrainBatch, of: Scorer = "policy") -> list[list[float]]:
        return await self._on_worker(lambda: self.learner.logprobs(batch, of))

    async def compute_values(self, batch: TrainBatch) -> list[list[float]]:
        return await self._on_worker(lambda: self.learner.values(batch))

    async def teacher_logprobs(self, steps: Sequence[Step]) -> list[list[float]]:
        return await self._on_worker(lambda: self.learner.teacher_logprobs(steps))

    async def refresh_teacher(self) -> None:
        await self._on_worker(self.learner.refresh_teacher)

    async def save(self, folder: Path) -> None:
        await self._on_worker(lambda: self.learner.save(folder))

    async def snapshot(self) -> Callable[[Path], None]:
        copied = self._copied = await self._on_worker(lambda: copy_state(self.learner.state(), self._copied))
        return lambda folder: write_state(folder, copied)

    async def load(self, folder: Path) -> None:
        await self._on_worker(lambda: self.learner.load(folder))

    async def export(self, folder: Path) -> None:
        await self._on_worker(lambda: self.learner.export(folder))

    async def close(self) -> None:
        await asyncio.to_thread(self._worker.join)
        if isinstance(self._sender, ServerSender):
            self._sender.close()

    async def _on_worker(self, function: Callable[[], T]) -> T:
        return await asyncio.wrap_future(self._worker.submit(function))
