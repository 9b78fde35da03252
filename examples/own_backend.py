"""A complete training backend: a transformers model and padded rows. docs/backend_protocol.md explains it."""

from __future__ import annotations

from asyncio import to_thread
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import torch
from torch.nn.utils.rnn import pad_sequence

from headrace.backends.base import Scorer, Trained, refuse_changed
from headrace.backends.local import token_losses as losses
from headrace.backends.local.host import eos_token_ids, new_host
from headrace.backends.local.optim import apply_gradient, new_adamw
from headrace.backends.local.storage import export_folder, load_state, save_state
from headrace.backends.local.teacher import Teacher
from headrace.backends.local.tokens import TokenTensors, TokenValues
from headrace.config import AlgorithmSection, RunConfig
from headrace.data.episode import Step
from headrace.data.sample import Sample, TrainBatch
from headrace.engines.base import ModelHost
from headrace.errors import BackendError
from headrace.models.causal import build_causal_model
from headrace.models.load import load_model, load_tokenizer
from headrace.models.modules import trained_parameters
from headrace.tracking.metrics import MetricsAggregator
from headrace.weights.in_place import InPlace
from headrace.weights.source import ModelWeights

IGNORED = ["run.deterministic", "algorithm.value_head", "distill.refresh_every"]
IGNORED += [f"backend.{key}" for key in ("logits_chunk", "share_prefixes", "gradient_checkpointing", "threads")]


class OwnBackend:
    """Calls come one at a time, from the event loop: tensor work goes to a thread, and there is nothing to lock."""

    transports: ClassVar[tuple[str, ...]] = ("in_place", "shared_memory")

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        torch.manual_seed(config.run.seed)
        self.tokenizer = load_tokenizer(config.model.name)
        self._model = load_model(config.model).train()
        self._optimizer = new_adamw(trained_parameters(self._model), config.optimizer)
        self._ends = eos_token_ids(self._model, self.tokenizer)
        self._reference: torch.nn.Module | None = None
        self._teacher: Teacher | None = None

    @staticmethod
    def check(config: RunConfig) -> None:
        refuse_changed(config, *IGNORED)
        losses.require_known_losses(config)

    def host(self, transport: str) -> ModelHost:
        model = build_causal_model(self._model, self._config.model.fast_path)  # on the same weights
        return new_host(transport, self.tokenizer, self._model, InPlace(model), ModelWeights(self._model))

    async def forward_backward(self, batch: TrainBatch, algorithm: AlgorithmSection) -> Trained:
        return await to_thread(self._forward_backward, batch, algorithm)

    def _forward_backward(self, batch: TrainBatch, algorithm: AlgorithmSection) -> Trained:
        losses.require_trainable(algorithm, batch)
        metrics, found, rejected = MetricsAggregator(), TokenValues(len(batch.samples)), set()
        for indices in batch.micro_batches:
            samples = [batch.samples[i] for i in indices]
            logprobs_N, entropy_N = score(self._model, samples)
            tokens = TokenTensors(samples, [batch.weights[i] for i in indices], logprobs_N.dtype)
            logprobs_M, entropy_M = logprobs_N[tokens.where_M], entropy_N[tokens.where_M]  # of the trained targets
            context = losses.loss_context(tokens, logprobs_M, algorithm, self._config.dpo.beta)
            loss_M, recorded, rejected_R, clip_M = losses.token_losses(context, samples, entropy_M, tokens.sampled_M)
            (loss_M * tokens.weights_M).sum().backward()  # the normaliser comes with optim_step
            rejects = losses.rejects_rows(algorithm)
            came_to = losses.MicroBatch(logprobs_M, loss_M, entropy_M, recorded, rejected_R, clip_M, rejects)
            # metrics, the values of each sample's tokens, and an error for a loss that is not finite
            rejected |= {indices[row] for row in losses.settle(came_to, tokens, batch, indices, metrics, found)}
        return Trained(metrics, found.logprobs, frozenset(rejected), found.entropies, found.clip_states)

    async def optim_step(self, lr: float, grad_scale: float) -> MetricsAggregator:
        return await to_thread(apply_gradient, self._optimizer, lr, grad_scale, self._config.optimizer.grad_clip)

    async def compute_logprobs(self, batch: TrainBatch, of: Scorer = "policy") -> list[list[float]]:
        return await to_thread(self._logprobs, batch, of)

    @torch.no_grad()
    def _logprobs(self, batch: TrainBatch, of: Scorer) -> list[list[float]]:
        model = self._model
        if of == "reference":
            model = self._reference = self._reference or load_model(self._config.model)
        found: list[list[float]] = [[]] * len(batch.samples)
        for indices in batch.micro_batches:
            samples = [batch.samples[i] for i in indices]
            logprobs_N, _ = score(model, samples)
            for index, part in zip(indices, logprobs_N.split([len(s.loss_mask) for s in samples]), strict=True):
                found[index] = part.tolist()
        return found

    async def compute_values(self, batch: TrainBatch) -> list[list[float]]:
        raise BackendError("this backend has no value head")  # check refuses runs that need one

    async def teacher_logprobs(self, steps: Sequence[Step]) -> list[list[float]]:
        self._teacher = self._teacher or await to_thread(Teacher, self._config, self.tokenizer, self._ends)
        return await to_thread(self._teacher.logprobs, steps)

    async def refresh_teacher(self) -> None:
        raise BackendError("this backend has no teacher that is refreshed")  # check refuses runs that need one

    async def save(self, folder: Path) -> None:
        await to_thread(save_state, folder, self._model, self._optimizer)

    async def load(self, folder: Path) -> None:
        await to_thread(load_state, folder, self._model, self._optimizer)

    async def export(self, folder: Path) -> None:
        await to_thread(export_folder, folder, self._model, self.tokenizer)

    async def close(self) -> None: ...


def score(model: torch.nn.Module, samples: Sequence[Sample]) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-probability, entropy) of all N targets, sample after sample, each at its sample's temperature."""
    rows = [torch.tensor(sample.tokens) for sample in samples]
    ids_RL = pad_sequence(rows, batch_first=True)  # on the right, where no token of the row sees it
    heat_R11 = torch.tensor([[[sample.temperature]] for sample in samples])
    logits_RTV = model(input_ids=ids_RL, use_cache=False).logits[:, :-1]
    logprobs_RTV = torch.log_softmax(logits_RTV.to(torch.promote_types(logits_RTV.dtype, torch.float32)) / heat_R11, -1)
    logprobs_RT = logprobs_RTV.gather(2, ids_RL[:, 1:, None]).squeeze(2)
    entropy_RT = -(logprobs_RTV.exp() * logprobs_RTV).sum(2)
    is_target_RT = pad_sequence([torch.ones(len(row) - 1, dtype=torch.bool) for row in rows], batch_first=True)
    return logprobs_RT[is_target_RT], entropy_RT[is_target_RT]
