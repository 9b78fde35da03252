"""One interface over causal language models, for both the learner and the engine.

`hidden` runs packed rows of different lengths in one pass without letting them see each other; `logits` is applied
only where it is needed. `prefill` and `decode` work on slots of a key/value cache.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from headrace.config import Weights
from headrace.errors import ConfigError
from headrace.models.linear import FusedLinear
from headrace.models.packed import PackedRows
from headrace.models.routing import RoutingReplay


class SlotCache(Protocol):
    """Keys and values of the sequences being decoded, one slot each."""

    def ensure(self, slots: int, length: int) -> None:
        """Make room for `slots` sequences of `length` tokens, keeping what is there."""
        ...

    def share(self, source: int, target: int, length: int) -> None:
        """Let a free slot begin with the first `length` positions of another."""
        ...

    def free(self, slots: Collection[int]) -> None:
        """Forget slots, but not what others have in them."""
        ...

    def move(self, source: int, target: int, length: int) -> None:
        """Move the first `length` positions of a slot to a free one, and free it."""
        ...

    def take(self, slot: int, length: int) -> Any:
        """A copy of the first `length` positions of a slot."""
        ...

    def put(self, slot: int, length: int, taken: Any) -> None:
        """The first `length` positions of what was taken, into a slot."""
        ...

    def release(self) -> None:
        """Give all memory back."""
        ...


@dataclass(frozen=True, slots=True)
class Draws:
    """How slots' next tokens are drawn at temperature 1: slot b's first by number `positions[b]` of its seed's."""

    seeds: Sequence[int]
    positions: Sequence[int]
    stop_ids: Collection[int]
    """Once one of these has been drawn, for any slot, no further step is made."""
    steps: int
    """At most so many."""


class CausalModel(Protocol):
    """What learner and engine need of a model."""

    vocabulary: int
    max_length: int
    shares_prefixes: bool
    """Whether prefixes that rows share are packed once."""
    continues_prefixes: bool
    """Whether `prefill` can continue a cached prefix."""
    row_block: int
    """Above 0: decode in products of so many rows, which makes a sequence independent of its neighbours to the bit."""

    @property
    def device(self) -> torch.device:
        """Where it computes. The rows and ids that it decodes are given on the host."""
        ...

    def hidden(self, rows: PackedRows) -> Tensor:
        """Final hidden states [N, D] of packed rows, with gradients if enabled."""
        ...

    def replay_routing(self) -> RoutingReplay:
        """Route tokens to the experts that their rows name, from now on; ConfigError where that cannot be."""
        ...

    def fused_head(self) -> FusedLinear | None:
        """The output head, if its gradient is to be added by `FusedLinear.accumulate`; None: by autograd."""
        ...

    def logits(self, hidden_ND: Tensor) -> Tensor:
        """Logits [N, V] of hidden states."""
        ...

    def decode_logits(self, hidden_BD: Tensor) -> Tensor:
        """Logits [B, V] of what `decode` returned."""
        ...

    def new_cache(self) -> SlotCache:
        """An empty cache."""
        ...

    def prefill(self, cache: Any, rows: PackedRows, slots: Sequence[int], begin: Sequence[int] | None = None) -> None:
        """Fill the slots' caches with the rows; `begin`: how many tokens each slot has already."""
        ...

    def decode(self, cache: Any, ids_B: Tensor, lengths: Sequence[int]) -> Tensor:
        """Feed one token to each of slots 0..B-1, whose caches hold `lengths` tokens; hidden states [B, D]."""
        ...

    def decode_and_sample(
        self, cache: Any, ids_B: Tensor, lengths: Sequence[int], draws: Draws
    ) -> tuple[Tensor, Tensor] | None:
        """`decode` and draw, several times over: (tokens, log-probabilities), both [S, B]. None: only one by one."""
        ...

    def decode_with(self, weights: Weights) -> None:
        """Decode with a copy of the weights in fewer bits, or with themselves; ConfigError where that cannot be."""
        ...

    def compile_decoding(self) -> None:
        """Compile the decoding step from now on; ConfigError where that cannot be."""
        ...

    def renew(self) -> None:
        """The weights have changed: make such a copy again."""
        ...

    def weights(self) -> list[Tensor]:
        """What decoding reads for each trained parameter, or makes its copy in fewer bits from."""
        ...

    def copy(self) -> CausalModel:
        """The same model with its own copy of the trained weights, for sampling; what never changes is shared."""
        ...


def build_causal_model(hf_model: Any, fast_path: bool = True, attention: str = "auto") -> CausalModel:
    """The fast forward where the architecture is covered, on the CPU, else the transformers forward: same results."""
    from headrace.models.fallback import TransformersModel
    from headrace.models.llama import LlamaModel, covers

    return LlamaModel(hf_model) if fast_path and covers(hf_model) else TransformersModel(hf_model, attention)


def require_no_copy(weights: Weights, why: str) -> None:
    """Raise ConfigError if decoding is to read anything but the weights themselves."""
    if weights != "float32":
        raise ConfigError(f'engine.weights = "{weights}" is not available here: {why}; set it to "float32"')
