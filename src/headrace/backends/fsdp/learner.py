"""RankLearner: the local learner as one of N ranks. Every method is called on all ranks at once, with a share each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from headrace.backends.base import Scorer, Trained
from headrace.backends.fsdp.forward import RankForward
from headrace.backends.fsdp.sharding import Root, as_fsdp, decoder_layers, full, new_mesh, shard_modules, sharding_axes
from headrace.backends.fsdp.shares import Share
from headrace.backends.fsdp.storage import Snapshots, export_gathered, load_shards, save_shards
from headrace.backends.fsdp.tensor_parallel import split_layers
from headrace.backends.fsdp.weights import GatheredWeights, SendsWeights
from headrace.backends.local.frozen import FrozenModel, score_rows
from headrace.backends.local.learner import Found, Learner
from headrace.backends.local.token_losses import MicroBatch
from headrace.backends.local.tokens import TokenTensors
from headrace.backends.ranks import progress
from headrace.config import AlgorithmSection, RunConfig
from headrace.data.sample import NO_VERSION, Sample, TrainBatch
from headrace.errors import DivergedError
from headrace.models.bfloat16 import make_bfloat16_safe
from headrace.models.device import forward_dtype
from headrace.models.load import load_model
from headrace.weights.source import ModelWeights

T = TypeVar("T")
EMPTY = Sample(tokens=(0, 0), loss_mask=(1,), logprobs=(0.0,), versions=(NO_VERSION,), advantages=(0.0,))
"""What a rank runs in a pass for which it has no rows: its loss has weight 0."""


class RankLearner(SendsWeights, Learner):
    """Parameters, gradients and optimizer state in shards. Alone, it is the local learner with transformers' forward.

    No method may fail on one rank alone before the others' collectives are done: they would wait for it.
    """

    def __init__(self, config: RunConfig, rank: int, size: int) -> None:
        SendsWeights.__init__(self, rank)
        self.size = size
        self.forward_dtype = forward_dtype(config.model)
        self._root: Root | None = None
        self._snapshots: Snapshots | None = None
        self._valued = False
        self._diverged: DivergedError | None = None
        Learner.__init__(self, config)

    # ---- calls with a share ----------------------------------------------------------------------------------------

    def learn_share(self, share: Share, algorithm: AlgorithmSection) -> Trained:
        """Add the gradient of a share; all ranks run equally many passes."""
        found = Found(len(share.batch.samples))
        self._diverged = None
        self._memory.begin_training()
        try:
            for indices, self._valued in zip(share.batch.micro_batches, share.valued, strict=True):
                if indices:
                    self._learn(share.batch, indices, algorithm, found)
                else:
                    self._learn_nothing(algorithm)
                progress.made()
        except BaseException:
            self._reset()
            raise
        if self._diverged is not None:
            raise self._diverged
        return found.trained()

    def score_share(self, share: Share, of: Scorer) -> list[list[float]]:
        """Per sample of the share, the log-probability of every target."""
        if of == "policy":
            return self._scored(share, self.model, of)
        if self.config.model.lora.rank:  # the policy without its adapters is the reference
            with self.hf_model.disable_adapter():
                return self._scored(share, self.model, of)
        if self.reference is None:
            self.reference = FrozenModel(self.config.model.model_copy(update={"fast_path": False}))
        return self._scored(share, self.reference.model, of)

    def value_share(self, share: Share) -> list[list[float]]:
        """Per sample of the share, the value head's estimate before every target."""
        batch, passes = self._padded(share)
        return self._inside(lambda: self.values(TrainBatch(batch.samples, batch.weights, passes, 0)))[: len(share.rows)]

    # ---- weights and state -----------------------------------------------------------------------------------------

    def gathered(self) -> GatheredWeights:
        held = not self.config.model.lora.rank  # adapters are sent as they are held
        return GatheredWeights(super().weights(), self.forward_dtype if held else None)

    def adapter_config(self) -> dict[str, Any]:
        return ModelWeights(self.hf_model).adapter_config()

    def weights(self) -> dict[str, Tensor]:
        return {name: full(tensor) for name, tensor in super().weights().items()}

    def save(self, folder: Path) -> None:
        save_shards(folder, self.state(), self.size)

    def snapshot(self) -> None:
        """Copy this rank's shards; `write_snapshot` writes them."""
        if self._snapshots is None:
            self._snapshots = Snapshots(self.size)
        self._snapshots.take(self.state())

    def write_snapshot(self, folder: Path) -> None:
        """Begin to write the copy, beside training."""
        if self._snapshots is not None:
            self._snapshots.write(folder)

    def snapshot_written(self) -> bool | None:
        """Whether it is complete; None if these ranks know of none."""
        return self._snapshots.written() if self._snapshots is not None else None

    def load(self, folder: Path) -> None:
        teacher = load_shards(folder, self.modules(), self.optimizer, self.size)
        self.teacher = None
        if teacher and self.config.distill.refresh_every:
            self._the_teacher().copy_from(teacher)

    def export(self, folder: Path) -> None:
        export_gathered(folder, self.weights(), self.config.model, self.tokenizer, self.rank)

    def gradient(self) -> dict[str, Tensor]:
        """What has accumulated, complete; on rank 0 alone."""
        found = {name: full(p.grad) for name, p in self.modules().named_parameters() if p.grad is not None}
        return found if self.rank == 0 else {}

    # ---- how the local learner's parts are replaced ----------------------------------------------------------------

    def _load_model(self) -> Any:
        if self.forward_dtype == torch.bfloat16:
            make_bfloat16_safe()
        # in the type that the optimizer updates; sharding makes the forward compute in its own
        master = str(self._master_dtype()).removeprefix("torch.")
        return load_model(self.config.model.model_copy(update={"dtype": master}))

    def _master_dtype(self) -> torch.dtype:
        if self.config.optimizer.master_dtype == "auto":
            return torch.promote_types(self.forward_dtype, torch.float32)
        return super()._master_dtype()

    def _new_model(self) -> Any:
        model = RankForward(self.hf_model, self.config.model.attention)
        model.shares_prefixes &= self.config.backend.share_prefixes
        return model

    def _shard(self) -> None:
        section = self.config.backend
        if self.size == 1 and self.forward_dtype == self.hf_model.dtype and not section.cpu_offload:
            return
        self._root = Root(self.modules())
        mesh = new_mesh(self.hf_model.device, self.size, section.shard, section.tensor_parallel)
        if section.tensor_parallel > 1:
            split_layers(self.hf_model, mesh["split"])
        axes, layers = sharding_axes(mesh), decoder_layers(self.hf_model)
        shard_modules(self._root, layers, axes, self.forward_dtype, section.cpu_offload)

    def _forward(self, tokens: TokenTensors, algorithm: AlgorithmSection) -> tuple[Tensor, Tensor, Tensor | None]:
        return self._inside(lambda: super(RankLearner, self)._forward(tokens, algorithm))

    def _wants_values(self, tokens: TokenTensors) -> bool:
        return self._valued  # on all ranks or on none: they sum the same gradients

    def _settle(
        self, losses: MicroBatch, tokens: TokenTensors, batch: TrainBatch, indices: Sequence[int], found: Found
    ) -> None:
        try:
            super()._settle(losses, tokens, batch, indices, found)
        except DivergedError as error:
            self._diverged = self._diverged or error  # raised when the others need this rank no more

    # ---- within ----------------------------------------------------------------------------------------------------

    def _inside(self, function: Callable[[], T]) -> T:
        """Where parameters are complete."""
        if self._root is None:
            return function()
        found = self._root(function)
        if not torch.is_grad_enabled():  # with gradients, the backward pass does it
            as_fsdp(self._root).reshard()
        return found

    def _learn_nothing(self, algorithm: AlgorithmSection) -> None:
        tokens = TokenTensors([EMPTY], [0.0], self._loss_dtype, device=self.device)
        logprobs_M, _, values_M = self._forward(tokens, algorithm)
        nothing = logprobs_M.sum() if values_M is None else logprobs_M.sum() + values_M.sum()
        (0.0 * nothing).backward()

    def _reset(self) -> None:
        """After an exception in the middle of a pass, FSDP has lost its place; what has accumulated is lost, too."""
        if self._root is not None:
            as_fsdp(self._root).reset_iter_state()
        self.clear_gradients()

    @torch.no_grad()
    def _scored(self, share: Share, model: Any, of: Scorer) -> list[list[float]]:
        batch, passes = self._padded(share)
        rows = [sample.tokens for sample in batch.samples]
        heat = [sample.temperature for sample in batch.samples]
        chunk = self.config.backend.logits_chunk
        routed = self._routed(batch) if of == "policy" else None
        scored = self._inside(lambda: score_rows(model, rows, heat, _reporting(passes), chunk, routed))
        return scored[: len(share.rows)]

    def _padded(self, share: Share) -> tuple[TrainBatch, tuple[tuple[int, ...], ...]]:
        """The share with one more row, which stands in micro-batches that are empty."""
        batch, count = share.batch, len(share.rows)
        padded = TrainBatch((*batch.samples, EMPTY), (*batch.weights, 0.0), (), 0)
        return padded, tuple(indices or (count,) for indices in batch.micro_batches)


def _reporting(micro_batches: Sequence[Sequence[int]]) -> Iterator[Sequence[int]]:
    for indices in micro_batches:
        yield indices
        progress.made()
