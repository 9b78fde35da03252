"""The frozen base model, loaded once, and adapters on it: any number of models that share its weights."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from headrace.backends.local.host import eos_token_ids
from headrace.backends.local.storage import load_weights
from headrace.config import LoraSection, ModelSection
from headrace.engines.torch.engine import usable_length
from headrace.models.catalog import resolve_model
from headrace.models.causal import CausalModel, build_causal_model
from headrace.models.load import add_adapters, load_model, load_tokenizer
from headrace.models.modules import copy_modules
from headrace.tinker_server.options import Refusal, ServeOptions

_ALPHA = 32.0  # of the API, whatever the rank


@dataclass(frozen=True, slots=True)
class LoraShape:
    """What adapters a model has."""

    rank: int
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True


@dataclass(frozen=True, slots=True)
class Adapted:
    """A model with adapters of its own on the shared weights."""

    hf_model: Any
    model: CausalModel
    shape: LoraShape

    def parameters(self) -> dict[str, nn.Parameter]:
        """What is trained, by name."""
        return {name: p for name, p in self.hf_model.named_parameters() if p.requires_grad}

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Take over adapters of the same shape."""
        load_weights("the saved state", self.hf_model, weights)


class Base:
    """The model that is served."""

    def __init__(self, options: ServeOptions) -> None:
        section = ModelSection(name=options.model, device="cpu", dtype=cast(Any, options.dtype))
        self.folder = resolve_model(options.model)
        self.name = options.name or options.model
        self.names = {self.name, options.model, self.folder, self.tokenizer_id}
        self.tokenizer = load_tokenizer(options.model)
        self.hf_model = load_model(section).eval().requires_grad_(False)
        self.model = build_causal_model(self.hf_model)
        self.max_length = usable_length(self.model.max_length, options.max_model_length)
        self.eos_ids = eos_token_ids(self.hf_model, self.tokenizer)
        self._layers = _linear_layers(self.hf_model)

    @property
    def tokenizer_id(self) -> str:
        """What a client on this machine loads the tokenizer from."""
        # the SDK reads a name with two slashes as organisation, model and variant
        return f"{self.folder}/" if self.folder.count("/") == 2 else self.folder

    @property
    def architecture(self) -> str:
        return str(self.hf_model.config.model_type)

    def adapted(self, shape: LoraShape, seed: int | None = None) -> Adapted:
        """A model with fresh adapters, which change nothing yet."""
        wanted = {"attn": shape.train_attn, "mlp": shape.train_mlp, "unembed": shape.train_unembed}
        kinds = [kind for kind, asked in wanted.items() if asked]
        if not kinds:
            raise Refusal("nothing would be trained; set train_attn, train_mlp or train_unembed")
        if bare := [f"train_{kind}" for kind in kinds if not self._layers[kind]]:
            raise Refusal(f"this model has no layers that adapters fit for {', '.join(bare)}; set that to false")
        targets = sorted({layer for kind in kinds for layer in self._layers[kind]})
        lora = LoraSection(rank=shape.rank, alpha=_ALPHA, targets=tuple(targets))
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of tied heads, whose adapters are never merged here
            if seed is None:
                torch.seed()
            else:
                torch.manual_seed(seed % 2**63)
            hf_model = add_adapters(copy_modules(self.hf_model), lora)
        return Adapted(hf_model, build_causal_model(hf_model), shape)

    def detokenize(self, ids: Any) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=True)


def _linear_layers(hf_model: Any) -> dict[str, set[str]]:
    """Last names of the linear layers, by what part of the model they are in."""
    head = hf_model.get_output_embeddings()
    found: dict[str, set[str]] = {"attn": set(), "mlp": set(), "unembed": set()}
    for name, module in hf_model.named_modules():
        if isinstance(module, nn.Linear):
            kind = "unembed" if module is head else "attn" if "attn" in name or "attention" in name else "mlp"
            found[kind].add(name.rsplit(".", 1)[-1])
    return found
