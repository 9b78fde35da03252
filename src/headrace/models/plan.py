"""How much memory a run needs on its device: computed from the model's configuration, before anything is loaded."""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.config import RunConfig
from headrace.config.derived import on_servers
from headrace.errors import ConfigError
from headrace.models.catalog import resolve_model

_BYTES = {"float64": 8.0, "float32": 4.0, "bfloat16": 2.0, "nf4": 0.57, "fp4": 0.57, "int8": 1.0}
_GIB = 2**30
_RESERVED = 1.5 * _GIB  # the device's own: context, libraries' workspaces, fragments
_MOST_SHARE = 0.9
_PART = 2**28  # numbers whose state an offloaded optimizer has on the device at once
_ACTIVATIONS = (8.5, 4.0, 1.25)
"""Numbers that the backward pass needs of each token and layer: times width, width of the feed-forward, and q, k, v.
Measured through transformers; tests/models/test_plan.py measures again."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What memory depends on."""

    layers: int
    width: int
    inner: int
    queries: int
    keys: int
    vocabulary: int
    tied: bool
    experts: int = 1
    active: int = 1
    """Experts in all, and experts of each token."""

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> ModelShape:
        """From a config.json."""
        text = config.get("text_config", config)
        width = text.get("hidden_size", text.get("n_embd"))
        heads = text.get("num_attention_heads", text.get("n_head"))
        dim = text.get("head_dim") or width // heads
        experts = text.get("num_local_experts") or text.get("num_experts") or text.get("n_routed_experts") or 1
        inner = text.get("moe_intermediate_size") if experts > 1 else None
        return cls(
            layers=text.get("num_hidden_layers", text.get("n_layer")),
            width=width,
            inner=inner or text.get("intermediate_size") or text.get("n_inner") or 4 * width,
            queries=heads * dim,
            keys=(text.get("num_key_value_heads") or heads) * dim,
            vocabulary=text["vocab_size"],
            tied=text.get("tie_word_embeddings", config.get("tie_word_embeddings", True)),
            experts=experts,
            active=text.get("num_experts_per_tok") or 1,
        )

    @property
    def parameters(self) -> int:
        """All weights, without biases."""
        attention = self.width * (2 * self.queries + 2 * self.keys)
        feed_forward = 3 * self.width * self.inner * self.experts
        router = self.width * self.experts if self.experts > 1 else 0
        embeddings = self.vocabulary * self.width * (1 if self.tied else 2)
        return self.layers * (attention + feed_forward + router + 2 * self.width) + embeddings + self.width

    def adapters(self, rank: int, targets: tuple[str, ...]) -> int:
        """Weights of low-rank adapters on the named layers."""
        ends = {
            "q_proj": (self.width, self.queries), "k_proj": (self.width, self.keys), "v_proj": (self.width, self.keys),
            "o_proj": (self.queries, self.width), "gate_proj": (self.width, self.inner),
            "up_proj": (self.width, self.inner), "down_proj": (self.inner, self.width),
        }  # fmt: skip
        return self.layers * rank * sum(sum(ends[name]) for name in targets if name in ends)

    def activations(self, narrow: bool) -> float:
        """Numbers that the backward pass needs of each token, of one layer; `narrow`: norms are computed in float32."""
        wide, inner, heads = _ACTIVATIONS
        norms = 2.0 if narrow else 0.0
        return (wide + norms) * self.width + inner * self.inner * self.active + heads * (self.queries + 2 * self.keys)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes on the device, by what they are for; and what of it stands there in each phase."""

    parts: dict[str, float]
    host: float
    """In host memory, with optimizer.offload."""
    training: float
    generating: float

    @property
    def peak(self) -> float:
        return max(self.training, self.generating)

    def fits(self, memory: float) -> bool:
        return self.peak <= memory

    def rows(self) -> list[tuple[str, str]]:
        """For a table: what, and GiB."""
        shown = [(name, gib(size)) for name, size in self.parts.items() if size]
        host = [("in host memory (optimizer.offload)", gib(self.host))] if self.host else []
        return [
            *shown,
            ("peak while training", gib(self.training)),
            ("peak while generating", gib(self.generating)),
            *host,
        ]


def gib(size: float) -> str:
    """A size for people; always in GiB, as `--memory` is, so that the lines of a table compare."""
    if 0 < size < 0.005 * _GIB:
        return "< 0.01 GiB"
    return f"{size / _GIB:,.2f} GiB" if size < 10 * _GIB else f"{size / _GIB:,.1f} GiB"


def memory_plan(config: RunConfig, shape: ModelShape) -> MemoryPlan:
    """What a run needs. An estimate, meant to be a little too high: kernels and allocators differ."""
    model, backend = config.model, config.backend
    forward, master = planned_types(config)
    trained = shape.adapters(model.lora.rank, model.lora.targets) if model.lora.rank else shape.parameters
    size, wide = _BYTES[forward], _BYTES[master]
    base = shape.parameters * (_BYTES[model.quantize] if model.quantize != "none" else size)
    adapters = trained * 4.0 if model.lora.rank else 0.0  # peft keeps them in float32
    masters = trained * wide if not model.lora.rank and wide > size else 0.0
    state = masters + 2 * trained * wide
    offload = config.optimizer.offload and model.device != "cpu"
    tokens, chunk = backend.micro_batch_tokens, min(backend.logits_chunk, backend.micro_batch_tokens)
    parts = {
        "parameters": base + adapters,
        "reference": 0.0 if model.lora.rank or not _has_reference(config) else shape.parameters * size,
        "gradients": trained * wide,
        "optimizer": 0.0 if offload else state,
        "activations": _activations(config, shape, size) * tokens,
        "logits": chunk * shape.vocabulary * (size + 2 * max(4.0, size)),
        "cache": _cache(config, shape, size),
    }
    copy = base if config.trainer.placement == "separate" or on_servers(config) else 0.0  # the engine's own weights
    always = parts["parameters"] + parts["reference"] + parts["optimizer"] + _RESERVED * (model.device != "cpu")
    stepping = min(state, _PART * (3 if masters else 2) * wide) if offload else 0.0
    learning = parts["gradients"] + max(parts["activations"] + parts["logits"], stepping)
    engine = parts["cache"] + copy
    beside = 0.0 if _releases_cache(config) else engine  # a server sleeps: its weights go as well
    plan = {**parts, "weights of the engine": copy, "the device's own": _RESERVED if model.device != "cpu" else 0.0}
    return MemoryPlan(plan, state if offload else 0.0, always + learning + beside, always + engine)


def server_share(config: RunConfig, shape: ModelShape, memory: float) -> float:
    """The part of a device's memory that each server on the learner's device may take: what the learner leaves free
    while the server is awake. ConfigError if that is too little for its weights and cache."""
    plan = memory_plan(config, shape)
    engine = plan.parts["cache"] + plan.parts["weights of the engine"]
    free = memory - (plan.generating if _releases_cache(config) else plan.training) + engine
    if free < engine:
        raise ConfigError(
            f'engine "{config.engine.name}" beside the learner needs {gib(engine)}, and the learner leaves '
            f"{gib(max(free, 0.0))} of the device's {gib(memory)}; `headrace doctor --plan` shows what takes how much; "
            f'or set trainer.placement = "separate"'
        )
    share = min(free / memory, _MOST_SHARE) / config.engine.servers
    return math.floor(100 * share) / 100


def read_shape(name: str) -> ModelShape:
    """The shape of a model by catalog name, folder or hub id."""
    return ModelShape.of(json.loads((_model_folder(name) / "config.json").read_text(encoding="utf-8")))


def _model_folder(name: str) -> Path:
    """Where the model's config.json is: its folder, or the hub's cache."""
    folder = Path(resolve_model(name))
    if (folder / "config.json").is_file():
        return folder
    try:
        hub: Any = importlib.import_module("huggingface_hub")
        cached = hub.try_to_load_from_cache(name, "config.json")
    except (ImportError, ValueError):  # ValueError: no name of the hub's
        cached = None
    if isinstance(cached, str):
        return Path(cached).parent
    raise ConfigError(
        f'the plan needs the config.json of model "{name}", and it is not here; fetch it with '
        f"`hf download {name} config.json`"
    )


def planned_types(config: RunConfig) -> tuple[str, str]:
    """(type of the forward pass, type of the optimizer's copies), as they are on an accelerator unless it is "cpu"."""
    cpu = config.model.device == "cpu"
    forward = config.model.dtype if config.model.dtype != "auto" else ("float32" if cpu else "bfloat16")
    if config.optimizer.master_dtype != "auto":
        return forward, config.optimizer.master_dtype
    return forward, forward if cpu or _BYTES[forward] > 4 else "float32"


def _activations(config: RunConfig, shape: ModelShape, size: float) -> float:
    """Bytes per token, over all layers."""
    whole = shape.activations(size == 2.0) * size
    if not config.backend.gradient_checkpointing:
        return shape.layers * whole
    recomputed = -(-shape.layers // config.backend.checkpoint_every)
    return recomputed * shape.width * size + (shape.layers - recomputed + 1) * whole


def _cache(config: RunConfig, shape: ModelShape, size: float) -> float:
    """Keys and values of all sequences in flight, at their full length."""
    prompt = config.engine.max_model_length or 2 * config.rollout.max_tokens
    length = max(prompt, config.rollout.max_tokens)
    flight = min(config.engine.max_batch, config.trainer.batch_size * config.rollout.group_size)
    return 2.0 * shape.layers * shape.keys * size * flight * length


def _releases_cache(config: RunConfig) -> bool:
    asked = config.trainer.release_cache
    return config.trainer.placement == "colocate" and (config.trainer.max_staleness == 0 if asked is None else asked)


def _has_reference(config: RunConfig) -> bool:
    return config.algorithm.kl.coef > 0 or config.algorithm.objective == "dpo"
