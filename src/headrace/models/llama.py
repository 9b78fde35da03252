"""A lean forward for the Llama family (Llama, SmolLM2, Qwen2, Qwen3, Mistral) on the weights of a transformers model.

The parameters stay those of the transformers module, so that the optimizer, peft and saving see an ordinary model.
Query/key/value and gate/up weights are laid out as views of one buffer each: sampling and training all weights multiply
by the whole buffer, training adapters by the parts, and nothing is ever copied between learner and engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NoReturn

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from headrace.config import Weights
from headrace.errors import ConfigError
from headrace.models import decoder_layer
from headrace.models.causal import Draws, require_no_copy
from headrace.models.elementwise import normed, swiglu, turn_
from headrace.models.kernels.cpu import kernels_for
from headrace.models.kernels.cpu.decoder import SMALL_INPUTS, Decoder, fits, fits_small
from headrace.models.linear import FusedLinear
from headrace.models.llama_cache import LENGTH_GRAIN, LlamaCache, round_up
from headrace.models.modules import copy_weights, trained_parameters
from headrace.models.packed import PackedRows
from headrace.models.routing import RoutingReplay, no_routers
from headrace.models.tree_attention import Angles, attention_with_past, tree_attention

_FAMILY = {"llama", "qwen2", "qwen3", "mistral"}
_STATIC_ROPE = {"default", "linear", "llama3", "yarn"}
_WIDE = {torch.float32, torch.float64}


def covers(hf_model: Any) -> bool:
    """Whether this forward computes the same function as the model's own."""
    return covers_architecture(_unwrap(hf_model).config) and hf_model.get_input_embeddings().weight.device.type == "cpu"


def covers_architecture(config: Any) -> bool:
    """The same of a configuration, for a model that is on the CPU."""
    sliding = getattr(config, "sliding_window", None) is not None and getattr(config, "use_sliding_window", True)
    rope = getattr(config, "rope_parameters", None) or {}
    return (
        config.model_type in _FAMILY
        and not sliding
        and config.hidden_act == "silu"
        and rope.get("rope_type", "default") in _STATIC_ROPE
        and not getattr(config, "attention_dropout", 0.0)
        and getattr(config, "quantization_config", None) is None
    )


def refuse_compiling() -> NoReturn:
    """For models that this forward covers: it has native kernels instead."""
    raise ConfigError(
        "engine.compile is for the forward pass of transformers, and this model decodes with Headrace's own; "
        "remove it, or set model.fast_path = false"
    )


def _unwrap(hf_model: Any) -> Any:
    return hf_model.get_base_model() if hasattr(hf_model, "peft_config") else hf_model


Apply = Callable[[FusedLinear, Tensor], Tensor]


class _Layer:
    """One decoder layer: references to the modules' parameters."""

    def __init__(self, module: Any) -> None:
        attention, mlp = module.self_attn, module.mlp
        self.qkv = FusedLinear([attention.q_proj, attention.k_proj, attention.v_proj])
        self.out = FusedLinear([attention.o_proj])
        self.gate_up = FusedLinear([mlp.gate_proj, mlp.up_proj])
        self.down = FusedLinear([mlp.down_proj])
        self.q_norm, self.k_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
        self.norm_1, self.norm_2 = module.input_layernorm, module.post_attention_layernorm
        self.linears = (self.qkv, self.out, self.gate_up, self.down)


def _rms_norm(x: Tensor, norm: Any) -> Tensor:
    if x.dtype in _WIDE and not torch.is_grad_enabled():
        return normed(x, norm)[0]
    return _norm_heads(x, norm)


def _norm_heads(x_NHd: Tensor, norm: Any) -> Tensor:
    return F.rms_norm(x_NHd, norm.weight.shape, norm.weight, norm.variance_epsilon)


def _pad_rows(x_BD: Tensor, block: int) -> Tensor:
    missing = -x_BD.shape[0] % block if block else 0
    return F.pad(x_BD, (0, 0, 0, missing)) if missing else x_BD


def _feed_forward(layer: _Layer, x: Tensor, apply: Apply) -> Tensor:
    wide_N2W = apply(layer.gate_up, _rms_norm(x, layer.norm_2))
    if not torch.is_grad_enabled():
        return apply(layer.down, swiglu(wide_N2W)).add_(x)
    gate, up = wide_N2W.chunk(2, dim=-1)
    return apply(layer.down, F.silu(gate) * up) + x


_Span = tuple[Any, int, Tensor | None]
"""Slots that attend together, over how many positions, and their mask."""


class LlamaModel:
    """The fast forward. Any number of these may share one transformers model."""

    def __init__(self, hf_model: Any) -> None:
        base = _unwrap(hf_model)
        config = base.config
        self._hf_model, self._trained = hf_model, trained_parameters(hf_model)
        self.vocabulary: int = config.vocab_size
        self.max_length: int = config.max_position_embeddings
        self.gradient_checkpointing = False
        self.checkpoint_every = 1
        self.shares_prefixes = self.continues_prefixes = True
        self.row_block = 0  # above 0: a sequence's decoding does not depend, to the bit, on what else is decoded
        self._heads: int = config.num_attention_heads
        self._kv_heads: int = config.num_key_value_heads
        self._dim: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self._stacked = (self._heads, self._kv_heads, self._kv_heads)
        self._embedding = base.model.embed_tokens
        self._norm = base.model.norm
        self._head = FusedLinear([base.lm_head])
        self._rotary = base.model.rotary_emb
        self._layers = [_Layer(module) for module in base.model.layers]
        self._angles_Pd = (torch.empty(0), torch.empty(0))
        self._own_parameters = list(base.parameters())
        self._plain = base is hf_model and self._embedding.weight.dtype in _WIDE
        self._decoded_with: Weights = "float32"

    @property
    def device(self) -> torch.device:
        return self._embedding.weight.device

    def hidden(self, rows: PackedRows) -> Tensor:
        norm = decoder_layer.last_norm if self._uses_fused_layers() else _rms_norm
        return norm(self._run(rows), self._norm)

    def fused_head(self) -> FusedLinear | None:
        return self._head if self._uses_fused_layers() else None

    def replay_routing(self) -> RoutingReplay:
        raise no_routers()

    def logits(self, hidden_ND: Tensor) -> Tensor:
        return self._head.apart(hidden_ND)

    @torch.no_grad()
    def decode_logits(self, hidden_BD: Tensor) -> Tensor:
        if self._decoded_with != "float32" and (decoder := self._decoder):
            return decoder.logits(hidden_BD)
        return self._fused(self._head, _pad_rows(hidden_BD, self.row_block))[: hidden_BD.shape[0]]

    def decode_with(self, weights: Weights) -> None:
        if self._decoder is None:
            require_no_copy(weights, "there are no native kernels (headrace doctor) or none for this model")
        elif not fits_small(self._layers, self._head):
            require_no_copy(weights, f"a layer has a number of inputs that is no multiple of {SMALL_INPUTS}")
        if weights != self._decoded_with:
            self._decoded_with = weights
            del self._decoder  # it is built again when it is needed

    def compile_decoding(self) -> None:
        refuse_compiling()

    def renew(self) -> None:
        if self._decoded_with != "float32" and (decoder := self._decoder):
            decoder.shrink()

    def weights(self) -> list[Tensor]:
        read: dict[nn.Parameter, Tensor] = {}
        for linear in (self._head, *(linear for layer in self._layers for linear in layer.linears)):
            read |= linear.read_for()
        return [read.get(parameter, parameter.data) for parameter in self._trained]

    def copy(self) -> LlamaModel:
        copied = LlamaModel(copy_weights(self._hf_model, self._trained))
        copied.row_block, copied.shares_prefixes = self.row_block, self.shares_prefixes
        copied.continues_prefixes = self.continues_prefixes
        copied.decode_with(self._decoded_with)
        return copied

    def new_cache(self) -> LlamaCache:
        # shared beginnings round otherwise than copied ones, which fixed shapes are meant to rule out
        shares = self._decoder is not None and not self.row_block
        return LlamaCache(len(self._layers), self._kv_heads, self._dim, self._embedding.weight.data, shares)

    @torch.no_grad()
    def prefill(
        self, cache: LlamaCache, rows: PackedRows, slots: Sequence[int], begin: Sequence[int] | None = None
    ) -> None:
        if self.row_block and len(slots) > 1:
            for where, slot in zip(rows.where_T.split(rows.lengths), slots, strict=True):
                self.prefill(cache, PackedRows.from_rows([rows.ids_N[where].tolist()]), [slot])
            return
        slots_T = torch.tensor(slots).repeat_interleave(torch.tensor(rows.lengths))
        where_T, positions_T = rows.where_T, rows.positions_N[rows.where_T]

        def keep(layer: int, k_NHd: Tensor, v_NHd: Tensor) -> None:
            cache.keys[layer][slots_T, :, positions_T] = k_NHd[where_T]
            cache.values[layer][slots_T, :, positions_T] = v_NHd[where_T]

        past = None
        if begin is not None:
            ends = np.cumsum(rows.lengths).tolist()
            past = [
                (slice(end - length, end), slot, first)
                for end, length, slot, first in zip(ends, rows.lengths, slots, begin, strict=True)
            ]
        self._run(rows, keep, None if past is None else lambda layer: cache.before(layer, past))

    @torch.no_grad()
    def decode(self, cache: LlamaCache, ids_B: Tensor, lengths: Sequence[int]) -> Tensor:
        count = len(lengths)
        lengths_B = torch.tensor(lengths)
        if decoder := self._decoder:
            return decoder.decode(ids_B, lengths_B, self._angle_table(max(lengths) + 1), cache)
        angles = self._angles(lengths_B, max(lengths) + 1)
        block = self.row_block
        x = _pad_rows(self._embedding(ids_B), block)
        kernels = kernels_for(x)
        spans = [] if kernels else self._spans(lengths, lengths_B)
        for index, layer in enumerate(self._layers):
            qkv_BHd = self._project(layer, x, self._fused)[:count]
            keys, values = cache.keys[index], cache.values[index]
            if kernels:
                cos_Bd, sin_Bd = (angle.squeeze(1) for angle in angles)
                mixed_BD = kernels.decode_attention(
                    qkv_BHd.flatten(1), cos_Bd, sin_Bd, keys, values, lengths_B, self._heads, self._kv_heads
                )
            else:
                q, k, v = turn_(qkv_BHd, angles, self._heads + self._kv_heads).split(self._stacked, dim=1)
                slots_B = torch.arange(count)
                keys[slots_B, :, lengths_B] = k
                values[slots_B, :, lengths_B] = v
                mixed_BD = self._attend_cache(q, keys, values, spans)
            x = self._fused(layer.out, _pad_rows(mixed_BD, block)).add_(x)
            x = _feed_forward(layer, x, self._fused)
        return _rms_norm(x[:count], self._norm)

    def decode_and_sample(
        self, cache: LlamaCache, ids_B: Tensor, lengths: Sequence[int], draws: Draws
    ) -> tuple[Tensor, Tensor] | None:
        if (decoder := self._decoder) is None:
            return None
        angles_Pd = self._angle_table(max(lengths) + draws.steps)
        return decoder.decode_and_sample(ids_B, torch.tensor(lengths), angles_Pd, cache, draws)

    def _run(self, rows: PackedRows, keep: Any = None, past: Any = None) -> Tensor:
        """All layers over packed rows.

        With `keep`, a sampler's prefill: hands over keys and values and stops once the last are known. `past` gives
        what a layer's tokens see from before.
        """
        angles = self._angles(rows.positions_N, int(rows.positions_N.max()) + 1)
        fused_layers = self._uses_fused_layers()
        block = self._fused_block if fused_layers else self._block
        x = decoder_layer.embed(self._embedding, rows.ids_N) if fused_layers else self._embedding(rows.ids_N)
        for index, layer in enumerate(self._layers):
            if keep is not None and index == len(self._layers) - 1:
                qkv_NHd = turn_(self._project(layer, x, FusedLinear.fused), angles, self._heads + self._kv_heads)
                _, k, v = qkv_NHd.split(self._stacked, dim=1)
                keep(index, k, v)
                break
            if self.gradient_checkpointing and torch.is_grad_enabled() and index % self.checkpoint_every == 0:
                x = checkpoint(block, index, x, angles, rows, use_reentrant=False)
                assert isinstance(x, Tensor)
            else:
                x = block(index, x, angles, rows, keep, past)
        return x

    def _uses_fused_layers(self) -> bool:
        """Whether the layers with backward passes of their own serve: there are no adapters, and nothing is frozen."""
        trained = all(p.requires_grad for p in self._own_parameters)
        return self._plain and (trained or not torch.is_grad_enabled())

    def _block(
        self, index: int, x: Tensor, angles: Angles, rows: PackedRows, keep: Any = None, past: Any = None
    ) -> Tensor:
        layer = self._layers[index]
        apply = FusedLinear.apart if keep is None else FusedLinear.fused
        qkv_NHd = self._project(layer, x, apply)
        if keep is None:
            mixed_NHd = tree_attention(qkv_NHd, angles, rows, self._kv_heads)
        else:
            turn_(qkv_NHd, angles, self._heads + self._kv_heads)
            mixed_NHd, _ = self._attend_and_keep(index, qkv_NHd, rows, keep, past)
        x = x + apply(layer.out, mixed_NHd.flatten(1))
        return _feed_forward(layer, x, apply)

    def _fused_block(
        self, index: int, x: Tensor, angles: Angles, rows: PackedRows, keep: Any = None, past: Any = None
    ) -> Tensor:
        given = (x, self._layers[index], angles, rows, self._kv_heads)
        if keep is None:
            return decoder_layer.layer(*given)
        return decoder_layer.layer(
            *given, lambda qkv_NHd, rows, _: self._attend_and_keep(index, qkv_NHd, rows, keep, past)
        )

    def _attend_and_keep(
        self, index: int, qkv_NHd: Tensor, rows: PackedRows, keep: Any, past: Any
    ) -> tuple[Tensor, Tensor]:
        """Of a sampler's prefill, on what is turned already."""
        _, k, v = qkv_NHd.split(self._stacked, dim=1)
        keep(index, k, v)
        return attention_with_past(qkv_NHd, rows, self._kv_heads, past(index) if past else ())

    def _fused(self, linear: FusedLinear, x_ND: Tensor) -> Tensor:
        return linear.fused(x_ND, self.row_block)

    def _project(self, layer: _Layer, x_ND: Tensor, apply: Apply) -> Tensor:
        """Queries, keys and values, stacked along the heads."""
        return self._by_head(layer, apply(layer.qkv, _rms_norm(x_ND, layer.norm_1)))

    def _by_head(self, layer: _Layer, qkv_ND: Tensor) -> Tensor:
        qkv_NHd = qkv_ND.unflatten(-1, (-1, self._dim))
        if layer.q_norm is None:
            return qkv_NHd
        q, k, v = qkv_NHd.split(self._stacked, dim=1)
        q, k = _norm_heads(q, layer.q_norm), _norm_heads(k, layer.k_norm)
        return torch.cat((q, k, v), dim=1)

    @cached_property
    def _decoder(self) -> Decoder | None:
        """All of a decoding step in one native call, if that is available."""
        weight = self._embedding.weight
        kernels = kernels_for(weight)
        if kernels is None or not self._plain or not fits(self._layers, self._head, self._dim):
            return None
        return Decoder(
            kernels, self._layers, self._heads, self._kv_heads, self._dim, weight, self._norm, self._head,
            self._decoded_with,
        )  # fmt: skip

    def _angles(self, positions_N: Tensor, longest: int) -> tuple[Tensor, Tensor]:
        cos_Pd, sin_Pd = self._angle_table(longest)
        return cos_Pd.index_select(0, positions_N).unsqueeze(1), sin_Pd.index_select(0, positions_N).unsqueeze(1)

    def _angle_table(self, longest: int) -> tuple[Tensor, Tensor]:
        cos_Pd, sin_Pd = self._angles_Pd
        if longest > cos_Pd.shape[0]:
            weight = self._embedding.weight
            cos_1Pd, sin_1Pd = self._rotary(weight, torch.arange(round_up(longest, 512), device=weight.device)[None])
            cos_Pd, sin_Pd = self._angles_Pd = cos_1Pd[0], sin_1Pd[0]  # a pair: two threads may be here at once
        return cos_Pd, sin_Pd

    def _attend_cache(self, q_BHd: Tensor, keys: Tensor, values: Tensor, spans: Sequence[_Span]) -> Tensor:
        """One query position per slot against what the slot's cache holds."""
        # the query heads of a kv head stand where query positions do: no key is repeated
        q = q_BHd.unflatten(1, (self._kv_heads, -1))
        if len(spans) == 1:
            slots, length, mask = spans[0]
            k, v = keys[slots, :, :length], values[slots, :, :length]
            if self.row_block:
                return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).flatten(1)
            scores = (q * self._dim**-0.5) @ k.transpose(-1, -2)  # faster than the above for so few queries
            return ((scores if mask is None else scores.add_(mask)).softmax(-1) @ v).flatten(1)
        mixed = torch.empty_like(q)
        for slots, length, mask in spans:
            k, v = keys[:, :, :length].index_select(0, slots), values[:, :, :length].index_select(0, slots)
            mixed[slots] = F.scaled_dot_product_attention(q[slots], k, v, attn_mask=mask)
        return mixed.flatten(1)

    def _spans(self, lengths: Sequence[int], lengths_B: Tensor) -> list[_Span]:
        everyone = slice(len(lengths))
        if not self.row_block:
            longest = max(lengths) + 1
            return [(everyone, longest, None if min(lengths) + 1 == longest else self._mask(lengths_B, longest))]
        # a product over more positions may round differently, even where the masked ones count for nothing
        ends = [round_up(length + 1, LENGTH_GRAIN) for length in lengths]
        if min(ends) == max(ends):
            return [(everyone, ends[0], self._mask(lengths_B, ends[0]))]
        groups = {end: torch.tensor([i for i, other in enumerate(ends) if other == end]) for end in sorted(set(ends))}
        return [(slots, end, self._mask(lengths_B[slots], end)) for end, slots in groups.items()]

    def _mask(self, lengths_B: Tensor, longest: int) -> Tensor:
        visible_BL = torch.arange(longest)[None] <= lengths_B[:, None]
        mask = self._embedding.weight.new_zeros(visible_BL.shape).masked_fill(~visible_BL, float("-inf"))
        return mask[:, None, None]
