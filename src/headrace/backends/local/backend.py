"""LocalBackend: full fine-tuning or LoRA with torch, on one machine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from headrace.backends.base import Scorer, Trained
from headrace.backends.local.frozen import FrozenModel, score_rows
from headrace.backends.local.host import eos_token_ids, new_host
from headrace.backends.local.numerics import numerics
from headrace.backends.local.optim import apply_gradient, new_adamw
from headrace.backends.local.storage import (
    State,
    collect_state,
    collect_teacher,
    copy_state,
    export_folder,
    load_state,
    load_teacher,
    write_state,
)
from headrace.backends.local.teacher import Teacher
from headrace.backends.local.token_losses import (
    loss_context,
    record_losses,
    require_finite,
    require_known_losses,
    require_trainable,
    token_losses,
    without_rejected,
)
from headrace.backends.local.tokens import TokenTensors
from headrace.config import AlgorithmSection, RunConfig
from headrace.data.episode import Step
from headrace.data.sample import TrainBatch
from headrace.engines.base import ModelHost
from headrace.engines.placement import DETERMINISTIC_ROWS, check_threads, learner_threads, takes_turns
from headrace.errors import BackendError
from headrace.models.catalog import resolve_model
from headrace.models.causal import build_causal_model
from headrace.models.load import load_model, load_tokenizer
from headrace.models.logprobs import target_logprobs, wide_dtype
from headrace.models.modules import lay_end_to_end
from headrace.models.packed import PackedRows
from headrace.models.tensor_threads import TensorThread
from headrace.tracking.metrics import MetricsAggregator
from headrace.utils.memory import keep_freed_memory
from headrace.weights.in_place import InPlace
from headrace.weights.sender import TO_SERVERS
from headrace.weights.source import ModelWeights

T = TypeVar("T")


class LocalBackend:
    """Owns model and optimizer; all tensor work runs on one thread of its own at a time."""

    transports: ClassVar[tuple[str, ...]] = ("in_place", "shared_memory", *TO_SERVERS)

    def __init__(self, config: RunConfig) -> None:
        self._worker = TensorThread("headrace-learner", stays=takes_turns(config))
        self._worker.submit(lambda: self._build(config)).result()

    def _build(self, config: RunConfig) -> None:
        if threads := learner_threads(config):
            torch.set_num_threads(threads)
        keep_freed_memory()
        self._config = config
        self._loss_dtype = wide_dtype(getattr(torch, config.model.dtype))
        torch.manual_seed(config.run.seed)
        self.tokenizer = load_tokenizer(config.model.name)
        self.hf_model = load_model(config.model)
        self.hf_model.train()
        if config.trainer.placement == "separate":
            lay_end_to_end(self.hf_model)  # a weight sync copies all of it
        self.model = build_causal_model(self.hf_model, config.model.fast_path)
        self.model.row_block = DETERMINISTIC_ROWS if config.run.deterministic else 0
        self.model.shares_prefixes &= config.backend.share_prefixes
        if config.backend.gradient_checkpointing:
            self._checkpoint_gradients()
        self.value_head = self._new_value_head() if config.algorithm.value_head else None
        self._weights = ModelWeights(self.hf_model, self._on_worker)
        self._in_place = InPlace(self.model, self._worker)
        self._trainable = [p for p in self._modules().parameters() if p.requires_grad]
        self.optimizer = new_adamw(self._trainable, config.optimizer)
        self._reference: FrozenModel | None = None
        self._teacher: Teacher | None = None
        self._copied: State | None = None  # of the last snapshot, whose memory the next one uses

    @staticmethod
    def check(config: RunConfig) -> None:
        check_threads(config)
        require_known_losses(config)
        if config.distill.teacher != "initial":
            resolve_model(config.distill.teacher)

    @staticmethod
    def numerics(config: RunConfig) -> dict[str, str]:
        return numerics(config)

    def host(self, transport: str) -> ModelHost:
        return new_host(transport, self.tokenizer, self.hf_model, self._in_place, self._weights)

    async def forward_backward(self, batch: TrainBatch, algorithm: AlgorithmSection) -> Trained:
        return await self._on_worker(lambda: self._forward_backward(batch, algorithm))

    async def optim_step(self, lr: float, grad_scale: float) -> MetricsAggregator:
        clip = self._config.optimizer.grad_clip
        return await self._on_worker(lambda: apply_gradient(self.optimizer, lr, grad_scale, clip))

    async def compute_logprobs(self, batch: TrainBatch, of: Scorer = "policy") -> list[list[float]]:
        return await self._on_worker(lambda: self._logprobs(batch, of))

    async def compute_values(self, batch: TrainBatch) -> list[list[float]]:
        return await self._on_worker(lambda: self._all_values(batch))

    async def teacher_logprobs(self, steps: Sequence[Step]) -> list[list[float]]:
        return await self._on_worker(lambda: self._the_teacher().logprobs(steps))

    async def refresh_teacher(self) -> None:
        await self._on_worker(lambda: self._the_teacher().copy_from(self._weights.tensors()))

    async def save(self, folder: Path) -> None:
        await self._on_worker(lambda: write_state(folder, self._state()))

    async def snapshot(self) -> Callable[[Path], None]:
        copied = self._copied = await self._on_worker(lambda: copy_state(self._state(), self._copied))
        return lambda folder: write_state(folder, copied)

    async def load(self, folder: Path) -> None:
        await self._on_worker(lambda: self._load(folder))

    async def export(self, folder: Path) -> None:
        await self._on_worker(lambda: export_folder(folder, self.hf_model, self.tokenizer))

    async def close(self) -> None:
        await asyncio.to_thread(self._worker.join)

    # ---- on the worker thread -------------------------------------------------------------------------------------

    def _forward_backward(self, batch: TrainBatch, algorithm: AlgorithmSection) -> Trained:
        metrics = MetricsAggregator()
        found: list[tuple[float, ...]] = [()] * len(batch.samples)
        rejected: set[int] = set()
        require_trainable(algorithm, batch)
        share = self.model.shares_prefixes
        for indices in batch.micro_batches:
            samples = [batch.samples[i] for i in indices]
            tokens = TokenTensors(samples, [batch.weights[i] for i in indices], self._loss_dtype, share)
            hidden_MD = self.model.hidden(tokens.rows).index_select(0, tokens.where_M)
            logprobs_M, entropy_M = self._head(hidden_MD, tokens, bool(algorithm.entropy_coef))
            context = loss_context(tokens, logprobs_M, algorithm, self._config.dpo.beta)
            loss_M, loss_metrics, rejected_R = token_losses(context, samples, entropy_M, tokens.sampled_M)
            if bool(tokens.valued_M.any()):  # other roles of the micro-batch may have no returns
                error_M = 0.5 * (self._values(hidden_MD) - tokens.returns_M) ** 2 * tokens.valued_M
                loss_M = without_rejected(loss_M + algorithm.value_coef * error_M, rejected_R, tokens.row_M)
                loss_metrics["value/loss"] = error_M.detach()[tokens.valued_M]
            require_finite(loss_M, tokens.row_M, batch, indices)
            (loss_M * tokens.weights_M).sum().backward()
            record_losses(metrics, loss_M[~rejected_R[tokens.row_M]], entropy_M, loss_metrics)
            rejected |= {indices[row] for row in rejected_R.nonzero().flatten().tolist()}
            for index, part in zip(indices, logprobs_M.detach().split(tokens.counts), strict=True):
                found[index] = tuple(part.tolist())
        return Trained(metrics, tuple(found), frozenset(rejected))

    def _logprobs(self, batch: TrainBatch, of: Scorer) -> list[list[float]]:
        rows = [sample.tokens for sample in batch.samples]
        heat = [sample.temperature for sample in batch.samples]
        limits = (batch.micro_batches, self._config.backend.logits_chunk)
        if of == "policy":
            return score_rows(self.model, rows, heat, *limits)
        if self._config.model.lora.rank:  # the policy without its adapters is the reference
            # an engine on this model decodes with adapters on whatever is switched here, but scores as the learner does
            with self._in_place.scoring, self.hf_model.disable_adapter():
                return score_rows(self.model, rows, heat, *limits)
        if self._reference is None:
            self._reference = FrozenModel(self._config.model)
        return score_rows(self._reference.model, rows, heat, *limits)

    @torch.no_grad()
    def _all_values(self, batch: TrainBatch) -> list[list[float]]:
        found: list[list[float]] = [[] for _ in batch.samples]
        for indices in batch.micro_batches:
            rows = [batch.samples[i].tokens[:-1] for i in indices]
            packed = PackedRows.from_rows(rows, self.model.shares_prefixes)
            values_T = self._values(self.model.hidden(packed))[packed.where_T]
            for index, part in zip(indices, values_T.split(packed.lengths), strict=True):
                found[index] = part.tolist()
        return found

    def _values(self, hidden_MD: Tensor) -> Tensor:
        if self.value_head is None:
            raise BackendError("values were asked for, but the run has no value head; set algorithm.value_head = true")
        return self.value_head(hidden_MD).squeeze(-1)

    def _head(self, hidden_MD: Tensor, tokens: TokenTensors, entropy_gradient: bool) -> tuple[Tensor, Tensor]:
        chunk = self._config.backend.logits_chunk
        return target_logprobs(self.model, hidden_MD, tokens.targets_M, tokens.temperatures_M, chunk, entropy_gradient)

    def _the_teacher(self) -> Teacher:
        """One for the whole run, loaded when it is first needed."""
        if self._teacher is None:
            self._teacher = Teacher(self._config, self.tokenizer, eos_token_ids(self.hf_model, self.tokenizer))
        return self._teacher

    def _state(self) -> State:
        state = collect_state(self._modules(), self.optimizer)
        if self._teacher is not None and self._teacher.refreshed:  # else it is loaded again from the model
            state |= collect_teacher(self._teacher.hf_model, self._weights.tensors())
        return state

    def _load(self, folder: Path) -> None:
        load_state(folder, self._modules(), self.optimizer)
        self._teacher = None
        weights = load_teacher(folder, self._weights.tensors()) if self._config.distill.refresh_every else None
        if weights is not None:
            self._the_teacher().copy_from(weights)

    # ---- set-up ---------------------------------------------------------------------------------------------------

    def _new_value_head(self) -> torch.nn.Linear:
        width = self.hf_model.config.get_text_config().hidden_size
        head = torch.nn.Linear(width, 1, dtype=getattr(torch, self._config.model.dtype))
        torch.nn.init.zeros_(head.weight)  # values start at 0: the first advantages are the rewards
        torch.nn.init.zeros_(head.bias)
        return head

    def _modules(self) -> torch.nn.Module:
        """All that is trained, under the names it is saved with."""
        if self.value_head is None:
            return self.hf_model
        return torch.nn.ModuleDict({"model": self.hf_model, "value_head": self.value_head})

    def _checkpoint_gradients(self) -> None:
        if hasattr(self.model, "gradient_checkpointing"):
            self.model.gradient_checkpointing = True  # type: ignore[attr-defined]
        else:
            self.hf_model.gradient_checkpointing_enable()

    async def _on_worker(self, function: Callable[[], T]) -> T:
        return await asyncio.wrap_future(self._worker.submit(function))
