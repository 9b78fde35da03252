"""LocalBackend: full fine-tuning or LoRA with torch; the colocated engine samples from the very same weights."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from headrace.backends.base import Publication, offending_samples
from headrace.backends.local.storage import export_folder, load_state, save_state
from headrace.backends.losses import Loss, LossContext
from headrace.config import AlgorithmSection, RunConfig
from headrace.data.sample import Sample, TrainBatch
from headrace.engine.base import SamplingParams
from headrace.engine.torch_engine import TorchEngine
from headrace.errors import BackendError, DivergedError
from headrace.metrics import MetricsAggregator, Reducer
from headrace.models.causal import PackedRows, build_causal_model
from headrace.models.load import load_model, load_tokenizer
from headrace.models.logprobs import target_logprobs
from headrace.registry import resolve

T = TypeVar("T")
_ROW_BLOCK = 32
_INTEGER_OF_SIZE = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class LocalBackend:
    """Owns model and optimizer; all tensor work runs on one thread of its own."""

    def __init__(self, config: RunConfig) -> None:
        if config.backend.threads:
            torch.set_num_threads(config.backend.threads)
        self._config = config
        torch.manual_seed(config.run.seed)
        self.tokenizer = load_tokenizer(config.model.name)
        self.hf_model = load_model(config.model)
        self.hf_model.train()
        self.model = build_causal_model(self.hf_model, config.model.fast_path)
        self.model.row_block = _ROW_BLOCK if config.run.deterministic else 0
        if config.backend.gradient_checkpointing:
            self._checkpoint_gradients()
        self._trainable = [p for p in self.hf_model.parameters() if p.requires_grad]
        self.optimizer = self._new_optimizer()
        self._engine: TorchEngine | None = None
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="headrace-learner")

    def check(self, algorithm: AlgorithmSection) -> None:
        resolve("loss", algorithm.loss)

    def create_engine(self) -> TorchEngine:
        config = self._config
        self._engine = TorchEngine(
            self.model,
            eos_ids=eos_token_ids(self.hf_model, self.tokenizer),
            detokenize=lambda ids: self.tokenizer.decode(list(ids), skip_special_tokens=True),
            max_batch=config.engine.max_batch,
            max_model_length=config.engine.max_model_length,
            prefill_tokens=config.engine.prefill_tokens,
            defaults=SamplingParams(max_tokens=config.rollout.max_tokens),
        )
        return self._engine

    async def forward_backward(self, batch: TrainBatch, algorithm: AlgorithmSection) -> MetricsAggregator:
        return await self._on_worker(lambda: self._forward_backward(batch, algorithm))

    async def optim_step(self, lr: float, grad_scale: float) -> MetricsAggregator:
        return await self._on_worker(lambda: self._optim_step(lr, grad_scale))

    async def compute_logprobs(self, batch: TrainBatch) -> list[list[float]]:
        return await self._on_worker(lambda: self._compute_logprobs(batch))

    async def publish(self, version: int) -> Publication:
        if self._engine is None:
            raise BackendError("publish was called before create_engine; there is no one to hand weights to")
        fingerprint = await self._on_worker(self.fingerprint)
        await self._engine.load_weights(version)  # shared weights: nothing is copied
        return Publication(version, fingerprint)

    async def save(self, folder: Path) -> None:
        await self._on_worker(lambda: save_state(folder, self.hf_model, self.optimizer))

    async def load(self, folder: Path) -> None:
        await self._on_worker(lambda: load_state(folder, self.hf_model, self.optimizer))

    async def export(self, folder: Path) -> None:
        await self._on_worker(lambda: export_folder(folder, self.hf_model, self.tokenizer))

    async def close(self) -> None:
        self._worker.shutdown(wait=True)

    def fingerprint(self) -> str:
        """A digest of the trainable weights that a change of any of them changes."""
        digest = hashlib.blake2b(digest_size=8)
        for parameter in self._trainable:
            data = parameter.detach()
            bits = data.view(_INTEGER_OF_SIZE[data.element_size()])
            # wrapping integer sums along each axis: at memory speed, and sensitive to positions
            for axis in range(bits.ndim):
                digest.update(bits.sum(axis, dtype=torch.int64).numpy().tobytes())
        return digest.hexdigest()

    # ---- on the worker thread -------------------------------------------------------------------------------------

    def _forward_backward(self, batch: TrainBatch, algorithm: AlgorithmSection) -> MetricsAggregator:
        metrics = MetricsAggregator()
        loss_function: Loss = resolve("loss", algorithm.loss)
        old = self._compute_logprobs(batch) if algorithm.proximal == "recompute" else None
        for indices in batch.micro_batches:
            samples = [batch.samples[i] for i in indices]
            tokens = _TokenTensors(samples, [batch.weights[i] for i in indices])
            logprobs_M, entropy_M = self._trained_logprobs(samples, tokens)
            old_M = tokens.sampler_M if old is None else tokens.select([old[i] for i in indices])
            context = LossContext(
                logprobs_M, old_M, tokens.sampler_M, tokens.advantages_M, tokens.row_M, len(samples), algorithm
            )
            loss_M, figures = loss_function(context)
            loss = (loss_M * tokens.weights_M).sum()
            self._require_finite(loss_M, tokens, batch, indices)
            loss.backward()
            _record(metrics, loss_M.detach(), entropy_M, logprobs_M.detach(), tokens, figures)
        return metrics

    def _optim_step(self, lr: float, grad_scale: float) -> MetricsAggregator:
        optimizer_config = self._config.optimizer
        gradients = [p.grad for p in self._trainable if p.grad is not None]
        if not gradients:
            raise BackendError("optim_step was called with no accumulated gradient")
        norm = float(torch.nn.utils.get_total_norm(gradients)) * grad_scale
        if not torch.isfinite(torch.tensor(norm)):
            self.optimizer.zero_grad(set_to_none=True)
            raise DivergedError(f"the gradient norm is {norm}; lower optimizer.lr (now {lr:g}) or clip harder")
        factor = grad_scale
        if optimizer_config.grad_clip and norm > optimizer_config.grad_clip:
            factor *= optimizer_config.grad_clip / norm
        torch._foreach_mul_(gradients, factor)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        metrics = MetricsAggregator()
        metrics.record("policy/grad_norm", norm, Reducer.LAST)
        metrics.record("optim/lr", lr, Reducer.LAST)
        return metrics

    @torch.no_grad()
    def _compute_logprobs(self, batch: TrainBatch) -> list[list[float]]:
        found: list[list[float]] = [[] for _ in batch.samples]
        for indices in batch.micro_batches:
            samples = [batch.samples[i] for i in indices]
            hidden_N = self.model.hidden(PackedRows.from_rows([s.tokens[:-1] for s in samples]))
            targets_N = torch.tensor([token for s in samples for token in s.tokens[1:]])
            counts = [len(s.tokens) - 1 for s in samples]
            temperatures_N = torch.tensor([s.temperature for s in samples]).repeat_interleave(torch.tensor(counts))
            logprobs_N, _ = self._head(hidden_N, targets_N, temperatures_N)
            for index, part in zip(indices, logprobs_N.split(counts), strict=True):
                found[index] = part.tolist()
        return found

    def _trained_logprobs(self, samples: list[Sample], tokens: _TokenTensors) -> tuple[Tensor, Tensor]:
        hidden_N = self.model.hidden(PackedRows.from_rows([s.tokens[:-1] for s in samples]))
        return self._head(hidden_N.index_select(0, tokens.where_M), tokens.targets_M, tokens.temperatures_M)

    def _head(self, hidden: Tensor, targets: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor]:
        return target_logprobs(self.model, hidden, targets, temperatures, self._config.backend.logits_chunk)

    def _require_finite(self, loss_M: Tensor, tokens: _TokenTensors, batch: TrainBatch, indices: Any) -> None:
        bad_rows = tokens.row_M[~torch.isfinite(loss_M)].unique().tolist()
        if bad_rows:
            self.optimizer.zero_grad(set_to_none=True)
            report = offending_samples(batch, [indices[row] for row in bad_rows])
            raise DivergedError(
                f"the loss is not finite in {len(bad_rows)} of {len(indices)} samples; lower optimizer.lr "
                f"(now {self._config.optimizer.lr:g}) or look at these:\n{report}"
            )

    # ---- set-up ---------------------------------------------------------------------------------------------------

    def _new_optimizer(self) -> torch.optim.AdamW:
        section = self._config.optimizer
        matrices = [p for p in self._trainable if p.ndim >= 2]
        others = [p for p in self._trainable if p.ndim < 2]
        return torch.optim.AdamW(
            [{"params": matrices, "weight_decay": section.weight_decay}, {"params": others, "weight_decay": 0.0}],
            lr=section.lr,
            betas=section.betas,
            eps=section.eps,
            fused=True,
        )

    def _checkpoint_gradients(self) -> None:
        if hasattr(self.model, "gradient_checkpointing"):
            self.model.gradient_checkpointing = True  # type: ignore[attr-defined]
        else:
            self.hf_model.gradient_checkpointing_enable()

    async def _on_worker(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._worker, function)


class _TokenTensors:
    """The trained tokens of a micro-batch as flat tensors, row after row."""

    def __init__(self, samples: list[Sample], weights: list[float]) -> None:
        self._masks = [torch.tensor(s.loss_mask, dtype=torch.bool) for s in samples]
        counts = torch.tensor([int(mask.sum()) for mask in self._masks])
        self.where_M = torch.cat(self._masks).nonzero().squeeze(1)
        self.targets_M = self.select([s.tokens[1:] for s in samples], torch.long)
        self.sampler_M = self.select([s.logprobs for s in samples])
        self.advantages_M = self.select([s.advantages for s in samples])
        self.versions_M = self.select([s.versions for s in samples], torch.long)
        self.row_M = torch.arange(len(samples)).repeat_interleave(counts)
        self.temperatures_M = torch.tensor([s.temperature for s in samples]).repeat_interleave(counts)
        self.weights_M = torch.tensor(weights).repeat_interleave(counts)

    def select(self, rows: list[Any], dtype: torch.dtype = torch.float32) -> Tensor:
        """One tensor of the entries that the loss masks keep."""
        return torch.cat([torch.tensor(row, dtype=dtype)[m] for row, m in zip(rows, self._masks, strict=True)])


def _record(
    metrics: MetricsAggregator,
    loss_M: Tensor,
    entropy_M: Tensor,
    logprobs_M: Tensor,
    tokens: _TokenTensors,
    figures: dict[str, Tensor],
) -> None:
    means: dict[str, Tensor] = {"policy/loss": loss_M, "policy/entropy": entropy_M, **figures}
    sampled_M = tokens.versions_M >= 0  # demonstrations have no sampler
    if bool(sampled_M.any()):
        drift_M = (tokens.sampler_M - logprobs_M)[sampled_M]
        means["policy/kl_to_sampler"] = drift_M
        metrics.record("policy/logprob_gap_max", float(drift_M.abs().max()), Reducer.MAX)
    for key, values in means.items():
        metrics.record(key, float(values.mean()), Reducer.WEIGHTED_MEAN, weight=values.numel())
    metrics.record("tokens/trained", loss_M.numel(), Reducer.SUM)


def eos_token_ids(hf_model: Any, tokenizer: Any) -> list[int]:
    """Every id that ends a reply: those of the generation config and the tokenizer's own."""
    configured = getattr(getattr(hf_model, "generation_config", None), "eos_token_id", None)
    ids = configured if isinstance(configured, list) else [configured]
    return sorted({i for i in (*ids, tokenizer.eos_token_id) if i is not None})
