"""A complete training backend: a transformers model, padded rows, AdamW. docs/backend_protocol.md explains it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.nn.utils.rnn import pad_sequence

from headrace.backends.base import Asked, Publication, Trained, refuse_changed
from headrace.backends.local import token_losses as losses
from headrace.backends.local.backend import eos_token_ids
from headrace.backends.local.engines import new_engine
from headrace.backends.local.storage import export_folder, load_state, save_state
from headrace.backends.local.teacher import Teacher
from headrace.backends.local.tokens import TokenTensors
from headrace.combinations import chosen
from headrace.config import AlgorithmSection, RunConfig
from headrace.data.episode import Step
from headrace.data.sample import Sample, TrainBatch
from headrace.engine.base import RolloutEngine
from headrace.errors import BackendError, DivergedError, PublicationError
from headrace.metrics import MetricsAggregator, Reducer
from headrace.models.causal import build_causal_model
from headrace.models.fingerprint import fingerprint
from headrace.models.load import load_model, load_tokenizer
from headrace.models.logprobs import wide_dtype
from headrace.models.modules import trained_parameters
from headrace.registry import resolve

P, T = ParamSpec("P"), TypeVar("T")
IGNORED = (
    "run.deterministic", "algorithm.value_head", "distill.refresh_every", "optimizer.weight_decay", "backend.threads",
    "backend.logits_chunk", "backend.gradient_checkpointing", "engine.name", "engine.threads",
)  # fmt: skip


def in_thread(method: Callable[P, T]) -> Callable[P, Coroutine[Any, Any, T]]:
    """Make it async, off the event loop, which generation needs."""

    @wraps(method)
    async def call(*args: P.args, **kwargs: P.kwargs) -> T:
        return await asyncio.to_thread(method, *args, **kwargs)

    return call


class OwnBackend:
    """Calls never overlap, so there is nothing to lock."""

    def __init__(self, config: RunConfig) -> None:
        self._config, adam = config, config.optimizer
        torch.manual_seed(config.run.seed)
        self.tokenizer = load_tokenizer(config.model.name)
        self._model = load_model(config.model).train()
        self._weights = trained_parameters(self._model)
        self._optimizer = torch.optim.AdamW(self._weights, adam.lr, adam.betas, adam.eps, weight_decay=0.0)
        self._ends = eos_token_ids(self._model, self.tokenizer)
        self._engine: RolloutEngine | None = None
        self._reference: Any = None
        self._teacher: Teacher | None = None

    @staticmethod
    def check(config: RunConfig) -> None:
        refuse_changed(config, *IGNORED)
        for name in chosen(config.algorithm, "loss"):
            resolve("loss", name)

    def create_engine(self) -> RolloutEngine:
        model = build_causal_model(self._model, self._config.model.fast_path)  # on the same weights
        self._engine = new_engine(self._config, self._model, model, self.tokenizer, self._ends)
        return self._engine

    @in_thread
    def forward_backward(self, batch: TrainBatch, algorithm: AlgorithmSection) -> Trained:
        losses.require_trainable(algorithm, batch)
        metrics, found = MetricsAggregator(), [()] * len(batch.samples)
        for indices in batch.micro_batches:
            samples = [batch.samples[i] for i in indices]
            logprobs_N, entropy_N = score(self._model, samples)
            tokens = TokenTensors(samples, [batch.weights[i] for i in indices], logprobs_N.dtype)
            logprobs_M, entropy_M = logprobs_N[tokens.where_M], entropy_N[tokens.where_M]  # of the trained targets
            context = losses.loss_context(tokens, logprobs_M, algorithm, self._config.dpo.beta)
            loss_M, figures = losses.token_losses(context, samples, entropy_M, tokens.sampled_M)
            losses.require_finite(loss_M, tokens.row_M, batch, indices)
            (loss_M * tokens.weights_M).sum().backward()  # a sum: its normaliser comes with optim_step
            losses.record_figures(metrics, figures)
            metrics.record("tokens/trained", loss_M.numel(), Reducer.SUM)
            for index, part in zip(indices, logprobs_M.split(tokens.counts), strict=True):
                found[index] = tuple(part.tolist())
        return Trained(metrics, tuple(found))

    @in_thread
    def optim_step(self, lr: float, grad_scale: float) -> MetricsAggregator:
        gradients = [p.grad for p in self._weights if p.grad is not None]
        if not gradients:
            raise BackendError("optim_step was called with no accumulated gradient")
        for gradient in gradients:
            gradient.mul_(grad_scale)
        norm = float(clip_grad_norm_(self._weights, self._config.optimizer.grad_clip or math.inf))
        if not math.isfinite(norm):
            raise DivergedError(f"the gradient norm is {norm}; lower optimizer.lr (now {lr:g}) or clip harder")
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        self._optimizer.zero_grad()
        metrics = MetricsAggregator()
        metrics.record_all({"policy/grad_norm": norm, "optim/lr": lr}, Reducer.LAST)
        return metrics

    @in_thread
    @torch.no_grad()
    def compute_logprobs(self, batch: TrainBatch, of: Asked = "policy") -> list[list[float]]:
        if of == "reference" and self._reference is None:
            self._reference = load_model(self._config.model)
        found: list[list[float]] = [[] for _ in batch.samples]
        for indices in batch.micro_batches:
            samples = [batch.samples[i] for i in indices]
            logprobs_N, _ = score(self._model if of == "policy" else self._reference, samples)
            for index, part in zip(indices, logprobs_N.split([len(s.loss_mask) for s in samples]), strict=True):
                found[index] = part.tolist()
        return found

    async def compute_values(self, batch: TrainBatch) -> list[list[float]]:
        raise BackendError("there is no value head: check refuses runs that need one")

    @in_thread
    def teacher_logprobs(self, steps: Sequence[Step]) -> list[list[float]]:
        self._teacher = self._teacher or Teacher(self._config, self.tokenizer, self._ends)
        return self._teacher.logprobs(steps)

    async def publish(self, version: int) -> Publication:
        assert self._engine is not None, "create_engine comes first"
        ours = await asyncio.to_thread(fingerprint, self._weights)
        theirs = await self._engine.load_weights(version)
        if theirs != ours:
            raise PublicationError(f"version {version} did not arrive: the learner has {ours}, the engine {theirs}")
        return Publication(version, ours)

    @in_thread
    def save(self, folder: Path) -> None:
        save_state(folder, self._model, self._optimizer)

    @in_thread
    def load(self, folder: Path) -> None:
        load_state(folder, self._model, self._optimizer)

    @in_thread
    def export(self, folder: Path) -> None:
        export_folder(folder, self._model, self.tokenizer)

    async def close(self) -> None:
        """Nothing is held that does not go with the object."""


def score(model: Any, samples: Sequence[Sample]) -> tuple[Tensor, Tensor]:
    """(log-probability, entropy) of all N targets at their sample's temperature, sample after sample."""
    rows = [torch.tensor(sample.tokens) for sample in samples]
    ids_RL, real_RL = (pad_sequence(part, batch_first=True) for part in (rows, [torch.ones_like(r) for r in rows]))
    logits_RTV = model(input_ids=ids_RL, attention_mask=real_RL).logits[:, :-1]
    heat_R = torch.tensor([sample.temperature for sample in samples])
    logprobs_RTV = torch.log_softmax(logits_RTV.to(wide_dtype(logits_RTV.dtype)) / heat_R[:, None, None], -1)
    logprobs_RT = logprobs_RTV.gather(2, ids_RL[:, 1:, None]).squeeze(2)
    entropy_RT = -(logprobs_RTV.exp() * logprobs_RTV).sum(2)
    is_target_RT = real_RL[:, 1:].bool()  # padding is no target
    return logprobs_RT[is_target_RT], entropy_RT[is_target_RT]
