"""Any causal language model through its own transformers forward: packed rows, decoding in slots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import transformers
from torch import Tensor

from headrace.config import Weights
from headrace.errors import ConfigError, ModelError
from headrace.models.batched_decoding import BatchedDecoder, choose_decoder, remember_decoder
from headrace.models.causal import Draws, require_no_copy
from headrace.models.modules import copy_modules, copy_weights, trained_parameters
from headrace.models.packed import PackedRows
from headrace.models.packed_forward import PackedForward
from headrace.models.parts import Parts
from headrace.models.routing import RoutingReplay

OLDEST = (5, 19)
"""The transformers whose masks know rows at different positions."""


def require_slots() -> None:
    """An older one may be installed where another package wants it."""
    if tuple(int(part) for part in transformers.__version__.split(".")[:2]) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise ModelError(
            f"transformers {transformers.__version__} cannot decode rows at different positions, which takes {oldest}; "
            f'here engine "torch" runs only models of the Llama family on the CPU, with model.fast_path = true: use '
            f'one of these, or engine.name = "vllm"'
        )


class TransformersModel:
    """The model's own forward. Slower than the fast path, and right for every architecture."""

    def __init__(self, hf_model: Any, attention: str = "auto") -> None:
        require_slots()
        self._trained = trained_parameters(hf_model)
        # modules of its own: the learner's may be in training mode, where checkpointing drops the cache, or have their
        # adapters switched off for a moment
        self._twin = copy_modules(hf_model)
        self._learner, self._sampler = Parts(hf_model), Parts(self._twin)
        self._learner.split_head = self._sampler.split_head  # asked in evaluation mode
        self._attention = self._sampler.whole.config._attn_implementation
        self._decoder = choose_decoder(self._sampler)
        remember_decoder(self._sampler, self._learner)
        self.row_block = 0  # above 0: one by one. A sequence alone in its forward depends on no other
        self.vocabulary: int = self._learner.config.vocab_size
        self.max_length = self._learner.max_length
        self._forward = PackedForward(self._learner, attention)
        self.attention = self._forward.kernel
        self.shares_prefixes = self.attention != "padded"
        self.continues_prefixes = self._decoder.continues_prefixes

    @property
    def device(self) -> torch.device:
        return self._learner.device

    def hidden(self, rows: PackedRows) -> Tensor:
        return self._forward.hidden(rows)

    def replay_routing(self) -> RoutingReplay:
        self.shares_prefixes = False  # rows with a shared prefix may be routed differently
        return self._forward.replay_routing()

    def logits(self, hidden_ND: Tensor) -> Tensor:
        return self._learner.logits(hidden_ND)

    def fused_head(self) -> None:
        return None

    def decode_with(self, weights: Weights) -> None:
        require_no_copy(weights, "a model is decoded by transformers, as one outside the Llama family is")

    def compile_decoding(self) -> None:
        if not isinstance(self._decoder, BatchedDecoder):
            raise ConfigError(
                "engine.compile compiles the decoding of many sequences together, and this model is decoded one "
                "sequence at a time; remove it"
            )
        self._decoder.compile()

    def renew(self) -> None:
        pass

    def weights(self) -> list[Tensor]:
        return [parameter.data for parameter in self._trained]

    def copy(self) -> TransformersModel:
        copied_modules = copy_weights(self._twin, self._trained)
        Parts(copied_modules).whole.config._attn_implementation = self._attention
        copied = TransformersModel(copied_modules, self.attention)
        copied.row_block = self.row_block
        if isinstance(self._decoder, BatchedDecoder) and self._decoder.compiled:
            copied.compile_decoding()
        return copied

    def new_cache(self) -> Any:
        return self._decoder.new_cache()

    @torch.no_grad()
    def prefill(self, cache: Any, rows: PackedRows, slots: Sequence[int], begin: Sequence[int] | None = None) -> None:
        self._decoder.one_by_one = self.row_block > 0
        self._decoder.prefill(cache, rows, slots, begin)

    @torch.no_grad()
    def decode(self, cache: Any, ids_B: Tensor, lengths: Sequence[int]) -> Tensor:
        self._decoder.one_by_one = self.row_block > 0
        return self._decoder.decode(cache, ids_B, lengths)

    @torch.no_grad()
    def decode_logits(self, hidden_BD: Tensor) -> Tensor:
        self._decoder.one_by_one = self.row_block > 0
        return self._decoder.logits(hidden_BD)

    def decode_and_sample(self, cache: Any, ids_B: Tensor, lengths: Sequence[int], draws: Draws) -> None:
        return None
