# pyright: reportMissingImports=false
"""VerlLearner: what a verl worker computes for Headrace. Every method is called on all ranks at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from verl.workers.engine_workers import TrainingWorker

from headrace.backends.base import Scorer, Trained
from headrace.backends.fsdp.learner import EMPTY
from headrace.backends.fsdp.sharding import full
from headrace.backends.fsdp.shares import Share
from headrace.backends.fsdp.storage import export_gathered, load_shards, save_shards
from headrace.backends.fsdp.weights import GatheredWeights, SendsWeights
from headrace.backends.local.host import eos_token_ids
from headrace.backends.local.learner import Found
from headrace.backends.local.storage import collect_state
from headrace.backends.local.token_losses import MicroBatch, loss_context, rejects_rows, settle, token_losses
from headrace.backends.local.tokens import TokenTensors
from headrace.backends.ranks import progress
from headrace.backends.verl.rows import as_verl, by_row, flat
from headrace.backends.verl.settings import worker_config
from headrace.config import AlgorithmSection, RunConfig
from headrace.data.sample import Sample, TrainBatch
from headrace.errors import BackendError, DivergedError
from headrace.models.device import forward_dtype
from headrace.models.load import load_tokenizer
from headrace.models.parts import Parts
from headrace.tracking.metrics import MetricsAggregator
from headrace.weights.source import ModelWeights


class VerlLearner(SendsWeights):
    """Headrace's losses, weights and normaliser on a worker's forward_backward and optimizer_step.

    No method may fail on one rank alone before the others' collectives are done: they would wait for it.
    """

    def __init__(self, worker: Any, config: RunConfig, rank: int, size: int) -> None:
        super().__init__(rank)
        self.config, self.size = config, size
        self._worker, self._reference = worker, None
        self._dtype = forward_dtype(config.model)
        self._diverged: DivergedError | None = None
        self.tokenizer = load_tokenizer(config.model.name)

    def listen(self, host: str) -> None:
        """verl's workers know where to meet."""

    def join(self, address: object) -> None:
        """Load the model."""
        torch.manual_seed(self.config.run.seed)
        self._worker.reset()
        _decay_matrices_only(self._worker.engine.optimizer)

    def facts(self) -> dict[str, Any]:
        """What the controller must know of the model."""
        parts = Parts(self._module)
        return {
            "max_length": parts.max_length,
            "vocabulary": parts.config.vocab_size,
            "eos_ids": tuple(eos_token_ids(self._module, self.tokenizer)),
            "dtype": str(self._dtype).removeprefix("torch."),
            "infos": self.gathered().infos(),
        }

    # ---- learning --------------------------------------------------------------------------------------------------

    def learn_share(self, share: Share, algorithm: AlgorithmSection) -> Trained:
        """Add the gradient of a share; all ranks run equally many passes."""
        found = Found(len(share.batch.samples))
        self._diverged = None
        for indices in share.batch.micro_batches:
            self._learn(share.batch, indices, algorithm, found)
            progress.made()
        if self._diverged is not None:
            raise self._diverged
        return found.trained()

    def _learn(self, batch: TrainBatch, indices: Sequence[int], algorithm: AlgorithmSection, found: Found) -> None:
        """One pass: verl runs the model and calls back for the loss."""
        samples = [batch.samples[i] for i in indices] or [EMPTY]
        weights = [batch.weights[i] for i in indices] or [0.0]
        tokens = TokenTensors(samples, weights, torch.float32, False, self._device)
        losses: list[MicroBatch] = []

        def loss(model_output: dict[str, Tensor], data: Any, dp_group: Any = None) -> tuple[Tensor, dict[str, Any]]:
            where_M = tokens.where_M + tokens.row_M  # verl's rows have one position more each: their last
            logprobs_M, entropy_M = (
                flat(model_output[key]).index_select(0, where_M) for key in ("log_probs", "entropy")
            )
            if not indices:
                return 0.0 * logprobs_M.sum(), {}
            losses.append(self._losses(tokens, samples, algorithm, logprobs_M, entropy_M))
            # verl divides the gradient by the number of data-parallel ranks; the step is normalised later
            return (losses[0].loss_M * tokens.weights_M).sum() * dist.get_world_size(dp_group), {}

        self._worker.set_loss_fn(loss)
        self._worker.forward_backward(self._rows(samples, entropy=True))
        for one in losses:
            self._settle(one, tokens, batch, indices, found)

    def _losses(
        self, tokens: TokenTensors, samples: Sequence[Sample], algorithm: AlgorithmSection, logprobs_M: Tensor,
        entropy_M: Tensor,
    ) -> MicroBatch:  # fmt: skip
        entropy_M = entropy_M if algorithm.entropy_coef else entropy_M.detach()
        context = loss_context(tokens, logprobs_M, algorithm, self.config.dpo.beta)
        loss_M, metrics, rejected_R, clip_M = token_losses(context, samples, entropy_M, tokens.sampled_M)
        return MicroBatch(
            logprobs_M.detach(), loss_M, entropy_M.detach(), metrics, rejected_R, clip_M, rejects_rows(algorithm)
        )

    def _settle(
        self, losses: MicroBatch, tokens: TokenTensors, batch: TrainBatch, indices: Sequence[int], found: Found
    ) -> None:
        try:
            rejected = settle(losses, tokens, batch, indices, found.metrics, found.values)
            found.rejected |= {indices[row] for row in rejected}
        except DivergedError as error:
            self._diverged = self._diverged or error  # raised when the others need this rank no more

    def optim_step(self, lr: float, grad_scale: float) -> MetricsAggregator:
        """Scale the accumulated gradient and clip it; verl applies it and forgets it."""
        gradients = [p.grad for p in self._module.parameters() if p.grad is not None]
        if not gradients:
            raise BackendError("optim_step was called with no accumulated gradient; call forward_backward before it")
        clip = self.config.optimizer.grad_clip
        norm = float(full(torch.nn.utils.get_total_norm(gradients))) * grad_scale
        if not math.isfinite(norm):
            self.clear_gradients()
            raise DivergedError(
                f"the gradient norm is {norm}, and no step was made; lower the learning rate (now {lr:g}), or clip "
                f"harder"
            )
        torch._foreach_mul_(gradients, grad_scale * (clip / norm if 0 < clip < norm else 1.0))
        self._worker.optimizer_step({"lr": lr})
        metrics = MetricsAggregator()
        metrics.record_all({"policy/grad_norm": norm, "optim/lr": lr})
        return metrics

    def clear_gradients(self) -> None:
        """Forget what has accumulated."""
        self._worker.optimizer_zero_grad()

    # ---- scoring ---------------------------------------------------------------------------------------------------

    def score_share(self, share: Share, of: Scorer) -> list[list[float]]:
        """Per sample of the share, the log-probability of every target."""
        found: list[list[float]] = [[] for _ in share.batch.samples]
        adapters_off = of == "reference" and self.config.model.lora.rank > 0
        worker = self._worker if of == "policy" or adapters_off else self._the_reference()
        for indices in share.batch.micro_batches:
            samples = [share.batch.samples[i] for i in indices] or [EMPTY]
            rows = self._rows(samples, entropy=False, compute_loss=False, no_lora_adapter=adapters_off)
            scored = by_row(worker.infer_batch(rows)["log_probs"], samples)
            for index, values in zip(indices, scored, strict=False):
                found[index] = values
            progress.made()
        return found

    def _the_reference(self) -> Any:
        """The policy as the run began: a worker of its own in this process, whose engine verl shards as well."""
        if self._reference is None:
            frozen = self._device.type != "cpu"  # verl then keeps it in pinned memory of the host
            self._reference = TrainingWorker(worker_config(self.config, self.size, forward_only=frozen))
            self._reference.reset()
        return self._reference

    def _rows(self, samples: Sequence[Sample], entropy: bool, **more: Any) -> Any:
        return as_verl(samples, entropy, self._worker.model_config.use_remove_padding, **more)

    # ---- weights and state -----------------------------------------------------------------------------------------

    def gathered(self) -> GatheredWeights:
        held = not self.config.model.lora.rank  # adapters are sent as they are held
        return GatheredWeights(self._trained(), self._dtype if held else None)

    def adapter_config(self) -> dict[str, Any]:
        return ModelWeights(self._module).adapter_config()

    def weights(self) -> dict[str, Tensor]:
        """Full tensors under their Hugging Face names."""
        return {name: full(tensor) for name, tensor in self._trained().items()}

    def gradient(self) -> dict[str, Tensor]:
        """What has accumulated, complete; on rank 0 alone."""
        found = {name: full(p.grad) for name, p in self._module.named_parameters() if p.grad is not None}
        return found if self.rank == 0 else {}

    def save(self, folder: Path) -> None:
        """In the format of backend "fsdp": any number of ranks reads it, and the local backend."""
        save_shards(folder, collect_state(self._module, self._worker.engine.optimizer), self.size)

    def load(self, folder: Path) -> None:
        """Read what ranks or the local backend saved."""
        load_shards(folder, self._module, self._worker.engine.optimizer, self.size)

    def export(self, folder: Path) -> None:
        """Write an ordinary model folder in Hugging Face format."""
        export_gathered(folder, self.weights(), self.config.model, self.tokenizer, self.rank)

    def _trained(self) -> dict[str, Tensor]:
        return {name: p.detach() for name, p in self._module.named_parameters() if p.requires_grad}

    @property
    def _module(self) -> Any:
        """The sharded model: after a pass without gradients, parameters may still be complete, in copies that neither
        the optimizer nor a checkpoint changes."""
        module = self._worker.engine.module
        for part in module.modules():
            if isinstance(part, FSDPModule):
                part.reshard()
        return module

    @property
    def _device(self) -> torch.device:
        return torch.device(self._worker.device_name)


def _decay_matrices_only(optimizer: torch.optim.Optimizer) -> None:
    """verl decays all parameters; Headrace leaves biases and norms as they are."""
    (group,) = optimizer.param_groups
    others = [p for p in group["params"] if p.ndim < 2]
    group["params"] = [p for p in group["params"] if p.ndim >= 2]
    if others:
        optimizer.add_param_group({**group, "params": others, "weight_decay": 0.0})
