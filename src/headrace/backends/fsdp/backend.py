"""FsdpBackend: the async face of N ranks. A thread talks to them; the event loop only waits for it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch

from headrace.backends.base import Scorer, Trained
from headrace.backends.fsdp.group import LearnerGroup
from headrace.backends.fsdp.launching import Launcher, new_launcher, rank_count
from headrace.backends.fsdp.sending import RankBuffers, RankSender, RankWeights
from headrace.backends.fsdp.tensor_parallel import check_split
from headrace.backends.local.check import check_model
from headrace.backends.local.numerics import numerics
from headrace.backends.local.token_losses import require_known_losses
from headrace.config import AlgorithmSection, BackendSection, RunConfig
from headrace.data.episode import Step
from headrace.data.sample import NO_VERSION, Sample, TrainBatch
from headrace.engines.base import ModelHost
from headrace.engines.placement import check_threads
from headrace.errors import ConfigError
from headrace.models.load import load_tokenizer
from headrace.models.tensor_threads import TensorThread
from headrace.tracking.metrics import MetricsAggregator
from headrace.weights.canary import Rows
from headrace.weights.sender import TO_SERVERS

T = TypeVar("T")
_LOOK_S = 0.1


class FsdpBackend:
    """Full fine-tuning or LoRA by N ranks that hold a shard each. What they compute is what one rank would."""

    transports: ClassVar[tuple[str, ...]] = ("shared_memory", *TO_SERVERS)

    def __init__(self, config: RunConfig) -> None:
        self.tokenizer = load_tokenizer(config.model.name)
        self._thread = TensorThread("headrace-ranks", stays=True)
        section = config.backend
        cut = (section.micro_batch_tokens, config.run.deterministic, section.tensor_parallel)
        self.group = self._thread.submit(lambda: LearnerGroup(self.new_launcher(config), *cut)).result()
        self._facts: dict[str, Any] = self._thread.submit(lambda: self.group.together("facts")[0]).result()
        self._weights = RankWeights(self.group, self._on_thread)

    @staticmethod
    def new_launcher(config: RunConfig) -> Launcher:
        """What starts the ranks."""
        return new_launcher(config)

    @staticmethod
    def check(config: RunConfig) -> None:
        check_threads(config)
        require_known_losses(config)
        check_ranks(config)
        check_model(config, fast_path=False)
        check_split(config)

    @staticmethod
    def numerics(config: RunConfig) -> dict[str, str]:
        return {**numerics(config), "ranks": str(rank_count(config))}

    def host(self, transport: str) -> ModelHost:
        facts, weights = self._facts, self._weights
        sender = (
            RankBuffers(weights, facts["infos"]) if transport == "shared_memory" else RankSender(transport, weights)
        )
        return ModelHost(
            self.tokenizer, facts["eos_ids"], facts["max_length"], weights, sender, self._score, facts["vocabulary"],
            facts["dtype"],
        )  # fmt: skip

    async def _score(self, rows: Rows) -> list[list[float]]:
        samples = [given_text(row) for row in rows]
        batch = TrainBatch(tuple(samples), (1.0,) * len(samples), (), len(samples))
        return await self.compute_logprobs(batch)

    async def forward_backward(self, batch: TrainBatch, algorithm: AlgorithmSection) -> Trained:
        return await self._on_thread(lambda: self.group.forward_backward(batch, algorithm))

    async def optim_step(self, lr: float, grad_scale: float) -> MetricsAggregator:
        return await self._on_thread(lambda: self.group.optim_step(lr, grad_scale))

    async def compute_logprobs(self, batch: TrainBatch, of: Scorer = "policy") -> list[list[float]]:
        return await self._on_thread(lambda: self.group.logprobs(batch, of))

    async def compute_values(self, batch: TrainBatch) -> list[list[float]]:
        return await self._on_thread(lambda: self.group.values(batch))

    async def teacher_logprobs(self, steps: Sequence[Step]) -> list[list[float]]:
        return await self._on_thread(lambda: self.group.teacher_logprobs(steps))

    async def refresh_teacher(self) -> None:
        await self._on_thread(self.group.refresh_teacher)

    async def save(self, folder: Path) -> None:
        await self._on_thread(lambda: self.group.save(folder))

    async def snapshot(self) -> Callable[[Path], None]:
        await self._on_thread(self.group.snapshot)
        return self._write_snapshot

    def _write_snapshot(self, folder: Path) -> None:
        """On the thread that writes checkpoints: the ranks write between the calls that train them."""
        self._thread.submit(lambda: self.group.write_snapshot(folder)).result()
        while not self._thread.submit(self.group.snapshot_written).result():
            time.sleep(_LOOK_S)

    def saved(self, folder: Path) -> None:
        self._thread.submit(lambda: self.group.saved(folder)).result()

    async def load(self, folder: Path) -> None:
        await self._on_thread(lambda: self.group.load(folder))

    async def export(self, folder: Path) -> None:
        await self._on_thread(lambda: self.group.together("export", folder))

    async def close(self) -> None:
        await self._on_thread(self.group.close)
        await asyncio.to_thread(self._thread.join)

    async def _on_thread(self, function: Callable[[], T]) -> T:
        return await asyncio.wrap_future(self._thread.submit(function))


def given_text(tokens: Sequence[int]) -> Sample:
    """A row that no policy sampled."""
    targets = len(tokens) - 1
    zeros = (0.0,) * targets
    return Sample(tuple(tokens), (1,) * targets, zeros, (NO_VERSION,) * targets, zeros)


def check_ranks(config: RunConfig) -> None:
    """Raise ConfigError for ranks that do not fit the cluster, the shards or the engine."""
    section, size = config.backend, rank_count(config)
    if config.cluster.address and section.ranks == "auto" and config.run.deterministic:
        raise ConfigError(
            'backend.ranks = "auto" takes as many ranks as the cluster has room for, and run.deterministic = true '
            "needs the same number always; set backend.ranks to a number"
        )
    if config.cluster.address and section.ranks == "auto":
        size = section.shard or section.tensor_parallel  # a multiple is chosen
    if ":" in config.model.device and size > 1:
        raise ConfigError(
            f'model.device = "{config.model.device}" is one device, and each of {size} ranks has its own; leave the '
            f"number out"
        )
    if section.shard and (section.shard > size or size % section.shard):
        raise ConfigError(
            f"backend.shard = {section.shard} ranks hold the model between them, and backend.ranks = {size} is no "
            f"multiple of it; set it to a divisor, or to 0 for all ranks"
        )
    _check_parallel(section, size)
    _check_devices(config, size)
    if config.trainer.placement != "separate" and config.engine.name == "torch":
        raise ConfigError(
            f'backend "{section.name}" holds the model in shards, which engine "torch" cannot decode with in place; '
            f'set trainer.placement = "separate"'
        )


def _check_devices(config: RunConfig, size: int) -> None:
    """Whether each rank has a GPU, and what may be kept in host memory."""
    section, gpus = config.backend, torch.cuda.device_count() if torch.cuda.is_available() else 0
    if config.optimizer.offload:
        raise ConfigError(
            f'optimizer.offload = true moves whole tensors, and the optimizer of backend "{section.name}" has shards; '
            f"set it to false, and backend.cpu_offload = true to keep shards in host memory"
        )
    if config.cluster.address:  # then the ranks' machines decide
        return
    if size > gpus > 0 and config.model.device in ("auto", "cuda"):
        raise ConfigError(
            f"backend.ranks = {size} is more than the {gpus} GPUs of this machine, and NCCL refuses two ranks on one; "
            f'set it to {gpus} at most, or to "auto", or set model.device = "cpu"'
        )
    if section.cpu_offload and not gpus:
        raise ConfigError(
            "backend.cpu_offload = true keeps shards in host memory, and without a GPU they are there; set it to false"
        )


def _check_parallel(section: BackendSection, size: int) -> None:
    split, holding = section.tensor_parallel, section.shard or size
    if holding % split:
        raise ConfigError(
            f"backend.tensor_parallel = {split} ranks split each layer, and {holding} ranks, which hold the model "
            f"between them, are no multiple of it; set it to a divisor, or change "
            f"backend.{'shard' if section.shard else 'ranks'}"
        )
    if section.context_parallel > 1:
        raise ConfigError(
            f"backend.context_parallel = {section.context_parallel} splits rows between ranks, and torch's ring "
            f"attention does not know packs of rows; set it to 1, and save memory by "
            f"backend.gradient_checkpointing = true, or a lower backend.logits_chunk"
        )
