"""Learner: what one rank runs. Synchronous code on one device: gradients, optimizer steps, scores, state."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from headrace.backends.base import Scorer, Trained
from headrace.backends.local.frozen import FrozenModel, Routed, score_rows, with_routing
from headrace.backends.local.host import eos_token_ids
from headrace.backends.local.masters import MasterWeights
from headrace.backends.local.offload import HostState
from headrace.backends.local.optim import apply_gradient, new_adamw
from headrace.backends.local.storage import (
    State,
    collect_state,
    collect_teacher,
    export_folder,
    load_state,
    load_teacher,
    write_state,
)
from headrace.backends.local.teacher import Teacher
from headrace.backends.local.token_losses import (
    MicroBatch,
    loss_context,
    rejects_rows,
    require_trainable,
    settle,
    token_losses,
    without_rejected,
)
from headrace.backends.local.tokens import TokenTensors, TokenValues
from headrace.config import AlgorithmSection, RunConfig
from headrace.data.episode import Step
from headrace.data.sample import Sample, TrainBatch
from headrace.engines.placement import DETERMINISTIC_ROWS, learner_threads
from headrace.errors import BackendError
from headrace.models.causal import CausalModel, build_causal_model
from headrace.models.device import CPU, forward_dtype, master_dtype, prepare, resolve_device
from headrace.models.device_memory import DeviceMemory, explained
from headrace.models.load import load_model, load_tokenizer
from headrace.models.logprobs import target_logprobs, wide_dtype
from headrace.models.modules import lay_end_to_end
from headrace.models.packed import PackedRows
from headrace.models.packed_forward import describe_attention, refuse_attention
from headrace.models.transfer import download
from headrace.tracking.metrics import MetricsAggregator
from headrace.utils.memory import keep_freed_memory


class Found:
    """What the micro-batches of a batch add to."""

    def __init__(self, samples: int) -> None:
        self.metrics = MetricsAggregator()
        self.values = TokenValues(samples)
        self.rejected: set[int] = set()

    def trained(self) -> Trained:
        """All of it, once every micro-batch has added its part."""
        values = self.values
        return Trained(self.metrics, values.logprobs, frozenset(self.rejected), values.entropies, values.clip_states)


class Learner:
    """Owns model and optimizer. Every call is made on the thread that it was built on, or on one of its own after it.

    `scoring` is held while adapters are switched off: an engine on the same model scores as the learner does.
    """

    def __init__(self, config: RunConfig) -> None:
        if threads := learner_threads(config):
            torch.set_num_threads(threads)
        keep_freed_memory()
        self.config = config
        self.device = resolve_device(config.model.device)
        if self.device == CPU:
            _warn_of_accelerator_settings(config)
        prepare(self.device, config.model.tf32, config.run.deterministic)
        self._dtype = forward_dtype(config.model)
        self._loss_dtype = wide_dtype(self._dtype)
        self.scoring = threading.Lock()
        torch.manual_seed(config.run.seed)
        self.tokenizer = load_tokenizer(config.model.name)
        self.hf_model = self._load_model()
        self.hf_model.train()
        self.model = self._new_model()
        self.routing = self.model.replay_routing() if config.backend.routing_replay else None
        if config.backend.gradient_checkpointing:
            self._checkpoint_gradients()
        self.value_head = self._new_value_head() if config.algorithm.value_head else None
        self._shard()
        trained = [p for p in self.modules().parameters() if p.requires_grad]
        self.masters = MasterWeights(trained, self._master_dtype())
        self.optimizer = new_adamw(self.masters.optimized, config.optimizer)
        offloads = config.optimizer.offload and self.device != CPU
        self._host = HostState(self.optimizer, self.masters.tensors(), self.device) if offloads else None
        self._memory = DeviceMemory(self.device)
        self.reference: FrozenModel | None = None
        self.teacher: Teacher | None = None

    @property
    def where(self) -> str:
        """Device, types and attention; empty for the fast path on the CPU, where there is nothing to choose."""
        attention = describe_attention(self.model)
        if not attention:
            return ""
        master = {str(p.dtype).removeprefix("torch.") for p in self.masters.optimized}
        dtype = str(self._dtype).removeprefix("torch.")
        return f"{self.device} in {dtype} (optimizer: {', '.join(sorted(master))}), attention: {attention}"

    def modules(self) -> torch.nn.Module:
        """All that is trained, under the names it is saved with."""
        if self.value_head is None:
            return self.hf_model
        return torch.nn.ModuleDict({"model": self.hf_model, "value_head": self.value_head})

    def weights(self) -> dict[str, Tensor]:
        """What a weight sync sends: full tensors under their Hugging Face names; with adapters, only the adapters."""
        return {name: p.detach() for name, p in self.hf_model.named_parameters() if p.requires_grad}

    def forward_backward(self, batch: TrainBatch, algorithm: AlgorithmSection) -> Trained:
        """Add the gradient of the batch's summed, weighted token losses to what has accumulated."""
        self._memory.begin_training()
        require_trainable(algorithm, batch)
        found = Found(len(batch.samples))
        for indices in batch.micro_batches:
            self._learn(batch, indices, algorithm, found)
        return found.trained()

    def _learn(self, batch: TrainBatch, indices: Sequence[int], algorithm: AlgorithmSection, found: Found) -> None:
        """One micro-batch: forward, loss, backward."""
        samples = [batch.samples[i] for i in indices]
        weights = [batch.weights[i] for i in indices]
        shares = self.model.shares_prefixes
        tokens = TokenTensors(samples, weights, self._loss_dtype, shares, self.device, self.routing)
        with explained(self.device, self.config.backend, "a micro-batch", len(tokens.rows.ids_N)):
            losses = self._losses(tokens, samples, algorithm)
            (losses.loss_M * tokens.weights_M).sum().backward()
        self._settle(losses, tokens, batch, indices, found)

    def _losses(self, tokens: TokenTensors, samples: Sequence[Sample], algorithm: AlgorithmSection) -> MicroBatch:
        """The loss of every trained token of a micro-batch. Nothing here makes the host wait for the device."""
        logprobs_M, entropy_M, values_M = self._forward(tokens, algorithm)
        context = loss_context(tokens, logprobs_M, algorithm, self.config.dpo.beta)
        loss_M, loss_metrics, rejected_R, clip_M = token_losses(context, samples, entropy_M, tokens.sampled_M)
        if values_M is not None:
            valued_M = torch.zeros_like(loss_M)
            if tokens.valued_K is not None:
                valued_M = valued_M.index_fill(0, tokens.valued_K, 1.0)
            error_M = 0.5 * (values_M - tokens.returns_M) ** 2 * valued_M
            loss_M = without_rejected(loss_M + algorithm.value_coef * error_M, rejected_R, tokens.row_M)
            if tokens.valued_K is not None:
                loss_metrics["value/loss"] = error_M.detach().index_select(0, tokens.valued_K)
        return MicroBatch(logprobs_M, loss_M, entropy_M, loss_metrics, rejected_R, clip_M, rejects_rows(algorithm))

    def _forward(self, tokens: TokenTensors, algorithm: AlgorithmSection) -> tuple[Tensor, Tensor, Tensor | None]:
        """Log-probability and entropy of every trained target, and the values of a micro-batch that has returns."""
        hidden_MD = self.model.hidden(tokens.rows).index_select(0, tokens.where_M)
        logprobs_M, entropy_M = self._head(hidden_MD, tokens, bool(algorithm.entropy_coef))
        return logprobs_M, entropy_M, self._values(hidden_MD) if self._wants_values(tokens) else None

    def _wants_values(self, tokens: TokenTensors) -> bool:
        return tokens.valued_K is not None  # other roles of the micro-batch may have no returns

    def _settle(
        self, losses: MicroBatch, tokens: TokenTensors, batch: TrainBatch, indices: Sequence[int], found: Found
    ) -> None:
        rejected = settle(losses, tokens, batch, indices, found.metrics, found.values)
        found.rejected |= {indices[row] for row in rejected}

    def optim_step(self, lr: float, grad_scale: float) -> MetricsAggregator:
        """Scale the accumulated gradient, clip it, apply it, and forget it."""
        clip = self.config.optimizer.grad_clip
        update = None if self._host is None else self._host.step
        with explained(self.device, self.config.backend, "the optimizer's step"):
            given = self.masters.take_gradients()
            metrics = apply_gradient(self.optimizer, lr, grad_scale, clip, given, update)
            self.masters.write_back()
        metrics.record_all(self._memory.end_training())
        return metrics

    def clear_gradients(self) -> None:
        """Forget what has accumulated."""
        self.masters.clear()
        self.optimizer.zero_grad(set_to_none=True)

    def logprobs(self, batch: TrainBatch, of: Scorer = "policy") -> list[list[float]]:
        """Per sample, the log-probability of every target at the sample's temperature."""
        rows = [sample.tokens for sample in batch.samples]
        heat = [sample.temperature for sample in batch.samples]
        limits = (batch.micro_batches, self.config.backend.logits_chunk)
        if of == "policy":
            return score_rows(self.model, rows, heat, *limits, self._routed(batch))
        if self.config.model.lora.rank:  # the policy without its adapters is the reference
            # an engine on this model decodes with adapters on whatever is switched here, but scores as the learner does
            with self.scoring, self.hf_model.disable_adapter():
                return score_rows(self.model, rows, heat, *limits)
        if self.reference is None:
            self.reference = FrozenModel(self.config.model)
        return score_rows(self.reference.model, rows, heat, *limits)

    @torch.no_grad()
    def values(self, batch: TrainBatch) -> list[list[float]]:
        """Per sample, the value head's estimate before every target."""
        found: list[list[float]] = [[] for _ in batch.samples]
        for indices in batch.micro_batches:
            rows = [batch.samples[i].tokens[:-1] for i in indices]
            packed, _ = PackedRows.from_rows(rows, self.model.shares_prefixes).to(self.device)
            hidden_ND = self.model.hidden(with_routing(packed, self._routed(batch), indices))
            (values_T,) = download([self._values(hidden_ND).index_select(0, packed.where_T)])
            for index, part in zip(indices, values_T.split(packed.lengths), strict=True):
                found[index] = part.tolist()
        return found

    def teacher_logprobs(self, steps: Sequence[Step]) -> list[list[float]]:
        """Per step, the teacher's log-probability of every response token."""
        return self._the_teacher().logprobs(steps)

    def refresh_teacher(self) -> None:
        """Copy the policy's weights, as they are now, into the teacher."""
        self._the_teacher().copy_from(self.weights())

    def state(self) -> State:
        """What `save` writes: the live tensors, which training changes."""
        state = collect_state(self.modules(), self.optimizer, self.masters)
        if self.teacher is not None and self.teacher.refreshed:  # else it is loaded again from the model
            state |= collect_teacher(self.teacher.hf_model, self.weights())
        return state

    def save(self, folder: Path) -> None:
        """Write weights and optimizer state."""
        write_state(folder, self.state())

    def load(self, folder: Path) -> None:
        """Read what `save` wrote."""
        load_state(folder, self.modules(), self.optimizer, self.masters)
        if self._host is not None:
            self._host.to_host()
        self.teacher = None
        weights = load_teacher(folder, self.weights()) if self.config.distill.refresh_every else None
        if weights is not None:
            self._the_teacher().copy_from(weights)

    def export(self, folder: Path) -> None:
        """Write an ordinary model folder in Hugging Face format."""
        export_folder(folder, self.hf_model, self.tokenizer)

    def _routed(self, batch: TrainBatch) -> Routed | None:
        """The experts that the samples' tokens were sampled with, if they are to be used."""
        return None if self.routing is None else (self.routing, [sample.routed_experts for sample in batch.samples])

    def _values(self, hidden_MD: Tensor) -> Tensor:
        if self.value_head is None:
            raise BackendError("values were asked for, but the run has no value head; set algorithm.value_head = true")
        return self.value_head(hidden_MD).squeeze(-1)

    def _head(self, hidden_MD: Tensor, tokens: TokenTensors, entropy_gradient: bool) -> tuple[Tensor, Tensor]:
        chunk = self.config.backend.logits_chunk
        return target_logprobs(self.model, hidden_MD, tokens.targets_M, tokens.temperatures_M, chunk, entropy_gradient)

    def _the_teacher(self) -> Teacher:
        """One for the whole run, loaded when it is first needed."""
        if self.teacher is None:
            self.teacher = Teacher(self.config, self.tokenizer, eos_token_ids(self.hf_model, self.tokenizer))
        return self.teacher

    def _load_model(self) -> Any:
        return load_model(self.config.model)

    def _new_model(self) -> CausalModel:
        section = self.config.model
        if self.config.trainer.placement == "separate" and self.device == CPU:
            lay_end_to_end(self.hf_model)  # a weight sync copies all of it
        model = build_causal_model(self.hf_model, section.fast_path, section.attention)
        if section.attention != "auto" and not describe_attention(model):
            refuse_attention(section.attention)
        model.row_block = DETERMINISTIC_ROWS if self.config.run.deterministic else 0
        model.shares_prefixes &= self.config.backend.share_prefixes
        return model

    def _master_dtype(self) -> torch.dtype:
        return master_dtype(self.config.model, self.config.optimizer)

    def _shard(self) -> None:
        """Called once model and value head are built; the optimizer gets the parameters as they are after it."""

    def _new_value_head(self) -> torch.nn.Linear:
        width = self.hf_model.config.get_text_config().hidden_size
        head = torch.nn.Linear(width, 1, dtype=self.hf_model.dtype, device=self.device)
        torch.nn.init.zeros_(head.weight)  # values start at 0: the first advantages are the rewards
        torch.nn.init.zeros_(head.bias)
        return head

    def _checkpoint_gradients(self) -> None:
        every = self.config.backend.checkpoint_every
        if hasattr(self.model, "gradient_checkpointing"):
            self.model.gradient_checkpointing = True  # type: ignore[attr-defined]
            self.model.checkpoint_every = every  # type: ignore[attr-defined]
            return
        self.hf_model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        layers = [module for module in self.hf_model.modules() if isinstance(module, GradientCheckpointingLayer)]
        for number, layer in enumerate(layers):
            layer.gradient_checkpointing = number % every == 0


def _warn_of_accelerator_settings(config: RunConfig) -> None:
    """A run file may be rehearsed where there is no accelerator: no error."""
    settings = {"model.tf32": config.model.tf32, "optimizer.offload": config.optimizer.offload}
    for name in (name for name, given in settings.items() if given):
        warnings.warn(f"{name} = true has no effect here: the model is on the CPU", stacklevel=2)
