"""TinkerBackend: LoRA training through the Tinker API, in every schedule of the trainer.

The service accumulates gradients as sums, and has no normaliser of its own. Headrace's comes last, with `optim_step`.
So `forward_backward` asks for log-probabilities, computes the loss here, and keeps its gradient; `optim_step` sends it,
scaled, with the step right behind it. Where a step is one call (no streaming) its normaliser is known beforehand, and
a loss that the service has is sent at once, in one pass.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import tinker
from tinker import types
from torch import Tensor

from headrace.backends.base import Scorer, Trained
from headrace.backends.local.token_losses import require_trainable
from headrace.backends.local.tokens import TokenValues
from headrace.backends.tinker.builtin import BuiltIn, find_builtin, likely_scale
from headrace.backends.tinker.check import check_config
from headrace.backends.tinker.engine import score_row
from headrace.backends.tinker.gradient import RowGradient, at_temperature, learn
from headrace.backends.tinker.renderer import RenderedTokenizer, with_renderer
from headrace.backends.tinker.rows import datum, returned_logprobs, wide_datum
from headrace.backends.tinker.sender import Served, TinkerPath
from headrace.backends.tinker.service import (
    answer,
    base_model,
    blocking,
    calling,
    connect,
    context_length,
    in_thread,
    model_info,
    new_training,
    training_from,
)
from headrace.backends.tinker.teacher import TinkerTeacher
from headrace.config import AlgorithmSection, RunConfig
from headrace.data.episode import Step
from headrace.data.packing import cut_by_tokens
from headrace.data.sample import Sample, TrainBatch
from headrace.engines.base import ModelHost
from headrace.errors import BackendError, DataError, DivergedError, boundary
from headrace.models.load import load_tokenizer
from headrace.tracking.metrics import MetricsAggregator

log = logging.getLogger("headrace")

_FILE = "tinker.json"
_NORMS = ("grad_norm", "grad_norm:mean", "unclipped_grad_l2:mean", "grad_l2:mean")


class TinkerBackend:
    """One model on the service. Calls come one at a time; what can be is submitted before anything is awaited."""

    transports: ClassVar[tuple[str, ...]] = ("tinker_path",)

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._model = base_model(config)
        self._service = connect(config.tinker)
        self._length = context_length(self._service, self._model)
        self._training = new_training(self._service, config)
        info = model_info(self._training).model_data
        name = config.tinker.tokenizer or info.tokenizer_id or self._model
        self.tokenizer: Any = with_renderer(config, load_tokenizer(name))
        self._lineage = _digest("start", self._model, config.run.seed, config.tinker.model_dump_json())
        self._pending: list[RowGradient] = []
        self._updates = 0
        self._served: Served | None = None
        self._reference: tinker.SamplingClient | None = None
        self._reference_path: str | None = self._keep_start() if config.tinker.state else None
        self._teacher: TinkerTeacher | None = None
        self._teacher_path: str | None = None

    @staticmethod
    def check(config: RunConfig) -> None:
        check_config(config)

    async def digest(self) -> str:
        """Of how the weights came to be: they stay on the service."""
        return self._lineage

    def host(self, transport: str) -> ModelHost:
        return ModelHost(self.tokenizer, tuple(self._ends()), self._length, self, TinkerPath(self._serve))

    # ---- learning -------------------------------------------------------------------------------------------------

    async def forward_backward(self, batch: TrainBatch, algorithm: AlgorithmSection) -> Trained:
        require_trainable(algorithm, batch)
        builtin = find_builtin(algorithm, batch.samples) if self._is_whole_step() else None
        sent = likely_scale(batch, algorithm) if builtin else 0.0
        returned = await self._pass(batch, builtin, sent)
        metrics = MetricsAggregator()
        found = TokenValues(len(batch.samples))
        rejected: list[int] = []
        for indices, logprobs in zip(batch.micro_batches, returned, strict=True):
            learned = learn(batch, indices, logprobs, algorithm, self._config.dpo.beta, metrics, found, sent)
            self._pending += learned.rows
            rejected += learned.rejected
        return Trained(metrics, found.logprobs, frozenset(rejected), found.entropies, found.clip_states)

    async def optim_step(self, lr: float, grad_scale: float) -> MetricsAggregator:
        if not self._pending:
            raise BackendError("optim_step was called with no accumulated gradient")
        rows, self._pending = self._pending, []
        section, where = self._config.optimizer, self._training.model_id
        params = types.AdamParams(
            learning_rate=lr,
            beta1=section.betas[0],
            beta2=section.betas[1],
            eps=section.eps,
            weight_decay=section.weight_decay,
            grad_clip_norm=section.grad_clip,
        )
        with calling("forward_backward and optim_step", where):
            passes = [self._training.forward_backward(part, "cross_entropy") for part in self._unsent(rows, grad_scale)]
            step = self._training.optim_step(params)  # in order: it follows what was submitted before it
            await asyncio.gather(*passes)
            found = (await step).metrics or {}
        self._updates += 1
        self._lineage = _digest(self._lineage, lr, grad_scale, *(row.digest() for row in rows))
        return _optim_metrics(found, lr)

    async def compute_logprobs(self, batch: TrainBatch, of: Scorer = "policy") -> list[list[float]]:
        if of == "reference":
            _require_plain(batch.samples, "a reference")
            client = await self._the_reference()
            return await asyncio.gather(*(score_row(client, sample.tokens) for sample in batch.samples))
        found: list[list[float]] = [[]] * len(batch.samples)
        for indices, logprobs in zip(batch.micro_batches, await self._pass(batch), strict=True):
            for index, values in zip(indices, logprobs, strict=True):
                plain = values.ndim == 1
                found[index] = (values if plain else at_temperature(values, batch.samples[index])[0]).tolist()
        return found

    async def compute_values(self, batch: TrainBatch) -> list[list[float]]:
        raise BackendError("the Tinker API has no value head")  # check refuses runs that need one

    async def teacher_logprobs(self, steps: Sequence[Step]) -> list[list[float]]:
        return await (await self._the_teacher()).score(steps)

    async def _pass(self, batch: TrainBatch, builtin: BuiltIn | None = None, scale: float = 0.0) -> list[list[Tensor]]:
        """Log-probabilities by micro-batch and row; with a loss of the service, its gradient as well."""
        width = self._config.tinker.vocabulary
        if width is None:
            _require_plain(batch.samples, "the policy")
        futures, shapes = [], []
        with calling("forward" if builtin is None else f"forward_backward {builtin.name}", self._training.model_id):
            for indices in batch.micro_batches:
                samples = [batch.samples[i] for i in indices]
                weights = [batch.weights[i] for i in indices]
                shapes.append([(len(s.tokens) - 1, *(() if width is None else (width,))) for s in samples])
                if builtin is not None:
                    data = builtin.datums(samples, weights, scale)
                    futures.append(self._training.forward_backward(data, builtin.name, builtin.settings or None))
                else:
                    futures.append(self._training.forward(self._unweighted(samples), "cross_entropy"))
            outputs = await asyncio.gather(*futures)
        return [returned_logprobs(output, shape) for output, shape in zip(outputs, shapes, strict=True)]

    def _unweighted(self, samples: Sequence[Sample]) -> list[types.Datum]:
        if self._config.tinker.vocabulary is not None:
            return [wide_datum(sample, self._config.tinker.vocabulary) for sample in samples]
        return [datum(sample, weights=[0.0] * len(sample.loss_mask)) for sample in samples]

    def _is_whole_step(self) -> bool:
        """Whether a call is likely to be all of its step, so that the normaliser is known beforehand.

        If it is not after all, `optim_step` sends what is missing: that costs a pass, and changes nothing.
        """
        trainer, wide = self._config.trainer, self._config.tinker.vocabulary is not None
        in_pieces = trainer.stream is not False and trainer.updates_per_batch == 1
        return not (in_pieces or wide or self._config.sft.coef or self._pending)

    def _unsent(self, rows: Sequence[RowGradient], scale: float) -> list[list[types.Datum]]:
        """What the service does not have yet of the step's gradient, in requests of a bounded size."""
        left = [row for row in rows if row.sent != scale]
        cuts = cut_by_tokens([row.sample.tokens for row in left], self._config.backend.micro_batch_tokens)
        return [[left[i].datum(scale) for i in cut] for cut in cuts]

    # ---- weights --------------------------------------------------------------------------------------------------

    async def refresh_teacher(self) -> None:
        await self._teach_from(await self._keep(f"teacher-{self._updates}"))

    async def _serve(self) -> Served:
        """A sampling client of the weights as they are; the same one as long as they are the same."""
        if self._served is None or self._served.digest != self._lineage:
            make = self._training.save_weights_and_get_sampling_client
            lineage, where = self._lineage, self._training.model_id
            self._served = Served(await in_thread("save_weights_for_sampler", make, where), lineage)
        return self._served

    async def save(self, folder: Path) -> None:
        name, ttl = f"update-{self._updates}-{self._lineage[:8]}", self._config.tinker.ttl_s
        future = self._training.save_state(name, ttl_seconds=ttl, overwrite=True)
        saved = await answer("save_weights", future, self._training.model_id)
        state = {
            "format": 1,
            "state": saved.path,
            "model": self._model,
            "rank": self._config.tinker.rank,
            "lineage": self._lineage,
            "updates": self._updates,
            "reference": self._reference_path,
            "teacher": self._teacher_path,
        }
        await asyncio.to_thread(_write_state, folder, state)

    async def load(self, folder: Path) -> None:
        state = read_state(folder)
        mine = {"model": self._model, "rank": self._config.tinker.rank}
        for key, value in mine.items():
            if state[key] != value:
                raise BackendError(
                    f"{folder} is of another model: its {key} is {json.dumps(state[key])}, and the run has "
                    f"{json.dumps(value)}; use the run file it was made with"
                )
        path = state["state"]
        self._training = await asyncio.to_thread(training_from, self._service, path)
        self._lineage, self._updates = state["lineage"], state["updates"]
        self._reference_path, self._reference = state["reference"], None
        self._pending, self._teacher, self._teacher_path = [], None, state["teacher"]

    async def export(self, folder: Path) -> None:
        raise BackendError(
            'the weights of backend "tinker" are on the service, which has no call that merges adapters into a model '
            f"folder; download them with `tinker checkpoint download` of the path in {_FILE} of a checkpoint"
        )

    async def close(self) -> None:
        try:
            await self._service.close("success")
        except Exception as error:  # it times out by itself, and what ended the run must not be hidden
            log.warning("Tinker: the session could not be finished: %s: %s", type(error).__name__, error)

    # ---- who else is asked ----------------------------------------------------------------------------------------

    async def _the_reference(self) -> tinker.SamplingClient:
        """The policy as the run began: the base model, or the state that it started from."""
        if self._reference is None:
            self._reference = await self._sampler(self._reference_path or self._model)
        return self._reference

    async def _the_teacher(self) -> TinkerTeacher:
        if self._teacher is None:
            name = self._config.distill.teacher
            initial = self._teacher_path or self._reference_path or self._model
            await self._teach_from(initial if name == "initial" else name)
        assert self._teacher is not None
        return self._teacher

    async def _teach_from(self, source: str) -> None:
        name = self._config.distill.teacher
        tokenizer = self.tokenizer if name == "initial" else await asyncio.to_thread(load_tokenizer, name)
        self._teacher = TinkerTeacher(await self._sampler(source), tokenizer, self.tokenizer, self._ends())
        self._teacher_path = source if "://" in source else None

    async def _sampler(self, source: str) -> tinker.SamplingClient:
        """A client of a base model, or of saved sampler weights."""
        path, base = (source, None) if "://" in source else (None, source)
        with calling(f"create_sampling_session of {source}"):
            return await self._service.create_sampling_client_async(model_path=path, base_model=base)

    async def _keep(self, name: str) -> str:
        future = self._training.save_weights_for_sampler(f"{name}-{self._lineage[:8]}")
        return (await answer("save_weights_for_sampler", future, self._training.model_id)).path

    def _keep_start(self) -> str:
        """Where the weights of tinker.state can be sampled from, for a reference."""
        with calling("save_weights_for_sampler", self._training.model_id):
            return blocking(lambda: self._training.save_weights_for_sampler("start").result()).path

    def _ends(self) -> list[int]:
        """What ends a reply: the renderer's tokens, else the tokenizer's end of sequence."""
        rendered = self.tokenizer.stop_ids if isinstance(self.tokenizer, RenderedTokenizer) else []
        return rendered or [token for token in [self.tokenizer.eos_token_id] if token is not None]


def _write_state(folder: Path, state: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _FILE).write_text(json.dumps(state, indent=1) + "\n")


def read_state(folder: Path) -> dict[str, Any]:
    """What `save` wrote."""
    with boundary(BackendError, f"cannot read the checkpoint {folder}"):
        return json.loads((folder / _FILE).read_text())


def _require_plain(samples: Sequence[Sample], who: str) -> None:
    hot = next((sample for sample in samples if sample.temperature != 1.0), None)
    if hot is not None:
        raise DataError(
            f'task "{hot.task_id}", role {hot.role}: sampled at temperature {hot.temperature:g}, and the service '
            f"scores with {who} at temperature 1 only; sample at 1, or set tinker.vocabulary"
        )


def _optim_metrics(found: dict[str, float], lr: float) -> MetricsAggregator:
    metrics = MetricsAggregator()
    metrics.record("optim/lr", lr)
    norm = next((found[key] for key in _NORMS if key in found), None)
    if norm is not None:
        if not math.isfinite(norm):
            raise DivergedError(f"the gradient norm is {norm}; lower optimizer.lr (now {lr:g}) or clip harder")
        metrics.record("policy/grad_norm", norm)
    return metrics


def _digest(*parts: object) -> str:
    return hashlib.blake2b("\x1f".join(map(str, parts)).encode(), digest_size=16).hexdigest()
