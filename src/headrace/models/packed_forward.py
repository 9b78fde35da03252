"""The learner's half of a transformers model: hidden states of packed rows, by the fastest way that is right for it."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor

from headrace.errors import ConfigError
from headrace.models.packed import PackedRows
from headrace.models.parts import Parts
from headrace.models.routing import OWN, RoutingReplay
from headrace.models.row_attention import NAME, OWN_NAME, VARLEN, Rows, needs_own_attention

_log = logging.getLogger("headrace")
_VARYING_ROPE = {"dynamic", "longrope"}  # their angles depend on the longest row of a batch
_SHARED = 18  # tokens that two of the probe's rows begin with: enough to be packed once
_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-4}  # of a row's states, as a share of their size
_COARSE = 0.05  # of narrower types
_HALF = (torch.bfloat16, torch.float16)
_SHOWN = 160  # characters of what torch says: its sentences list every backend


class PackedForward:
    """Hidden states of packed rows, with gradients, by the model's own modules.

    `kernel` is how rows attend: "sdpa", "varlen" or "flash_attn" keep them apart within the model's attention, and run
    all else once over their distinct tokens. "padded" is a right-padded batch, for models whose layers look at
    neighbours in other ways. Which of them gives this model's own results is found out by trying.
    """

    def __init__(self, parts: Parts, wanted: str = "auto") -> None:
        self._parts = parts
        config = parts.config
        rope = getattr(config, "rope_parameters", None) or {}
        self._alone = rope.get("rope_type") in _VARYING_ROPE
        self._usual: str = parts.whole.config._attn_implementation
        self._own = needs_own_attention(parts.whole)
        self.kernel = self._choose(wanted)
        self.routing: RoutingReplay | None = None

    def replay_routing(self) -> RoutingReplay:
        """Route tokens as their rows say, from now on."""
        if self._alone:
            raise ConfigError(
                "a model that reads rows one by one replays no routing; set backend.routing_replay = false"
            )
        self.routing = RoutingReplay(self._parts)
        return self.routing

    def hidden(self, rows: PackedRows) -> Tensor:
        """States [N, D] of the distinct tokens; logits, of models whose head is not split off."""
        self._route(rows.routed_NS)
        if self.kernel == "padded":
            return self._padded(rows)
        return self._packed(rows, self.kernel)

    def _route(self, routed: Tensor | None) -> None:
        if self.routing is not None:
            self.routing.now = routed

    def _packed(self, rows: PackedRows, kernel: str) -> Tensor:
        ids_1N = rows.ids_N[None]
        states, _ = self._parts.run(
            ids_1N, position_ids=rows.positions_N[None], use_cache=False, headrace_rows=Rows(rows, kernel),
            attention_mask=torch.ones_like(ids_1N),  # or the model would look for rows among the positions, and wait
        )  # fmt: skip
        return states[0]

    def _padded(self, rows: PackedRows) -> Tensor:
        if self._alone:
            parts = rows.ids_N.split(rows.lengths)
            return torch.cat([self._parts.run(ids[None], use_cache=False)[0][0] for ids in parts])
        count, longest, index_N = _padded_index(rows)
        if index_N is None:
            return self._parts.run(rows.ids_N.view(count, longest), use_cache=False)[0].flatten(0, 1)
        ids = rows.ids_N.new_zeros(count * longest).index_copy(0, index_N, rows.ids_N)
        if (routed_NS := rows.routed_NS) is not None:
            free = routed_NS.new_full((count * longest, routed_NS.shape[1]), OWN)
            self._route(free.index_copy(0, index_N, routed_NS))
        mask = torch.zeros_like(ids).index_fill(0, index_N, 1).view(count, longest)
        padded, _ = self._parts.run(ids.view(count, longest), attention_mask=mask, use_cache=False)
        return padded.flatten(0, 1).index_select(0, index_N)

    # ---- which kernel ---------------------------------------------------------------------------------------------

    def _choose(self, wanted: str) -> str:
        problems: list[str] = []
        for kernel in [wanted] if wanted != "auto" else self._candidates():
            problem = self._problem(kernel)
            if not problem:
                return kernel
            problems.append(f"{kernel}: {problem}")
            _log.debug("attention %s", problems[-1])
        raise ConfigError(
            f'model.attention = "{wanted}" does not serve this model here ({problems[0]}); set it to "auto"'
        )

    def _candidates(self) -> Iterator[str]:
        weight = self._parts.whole.get_input_embeddings().weight
        repeats = torch.are_deterministic_algorithms_enabled()  # those kernels sum gradients in any order
        if weight.device.type == "cuda" and weight.dtype in _HALF and not self._own and not repeats:
            if importlib.util.find_spec("flash_attn") is not None:
                yield "flash_attn"
            yield "varlen"
        yield "sdpa"
        yield "padded"

    def _problem(self, kernel: str) -> str:
        """Why a kernel does not serve; empty if it does."""
        if kernel == "padded":
            self._set(self._usual)
            return ""
        if self._alone:
            return "the angles of its positions depend on the longest row"
        if getattr(self._parts.config, "attention_chunk_size", None):
            return "it attends in chunks"
        if self._own and kernel != "sdpa":
            return "its attention has a cap, sinks or other things of its own"
        self._set(OWN_NAME if self._own else NAME)
        try:
            off = self._difference(kernel)
        except (RuntimeError, TypeError, ValueError, KeyError, AttributeError, ImportError) as error:
            off, why = float("inf"), f"{type(error).__name__}: {str(error).partition(chr(10))[0][:_SHOWN]}"
        else:
            why = f"its results differ by {off:.2g} from those of the rows alone"
        weight = self._parts.whole.get_input_embeddings().weight
        if off <= _TOLERANCE.get(weight.dtype, _COARSE):
            return ""
        self._set(self._usual)
        return why

    def _set(self, attention: str) -> None:
        """Which attention the modules look up; without packed rows, ours do what transformers does."""
        self._parts.whole.config._attn_implementation = attention

    @torch.no_grad()
    def _difference(self, kernel: str) -> float:
        """How far the states of packed rows are from those of each row alone, as a share of their size.

        Of each row the median over its tokens: a token that goes to another expert by rounding is far off, and right.
        """
        rows = _probe_rows(self._parts.config.vocab_size)
        packed, _ = PackedRows.from_rows(rows, share=True).to(self._parts.device)
        got_T = self._packed(packed, kernel)[packed.where_T].float().split(packed.lengths)
        found = []
        for states, row in zip(got_T, rows, strict=True):
            alone, _ = PackedRows.from_rows([row]).to(self._parts.device)
            want = self._plain(alone.ids_N)
            found.append(((states - want).norm(dim=-1) / want.norm(dim=-1).clamp(min=1e-12)).median())
        return float(torch.stack(found).max())

    def _plain(self, ids_L: Tensor) -> Tensor:
        now = self._parts.whole.config._attn_implementation
        self._set("eager" if self._own else self._usual)
        try:
            return self._parts.run(ids_L[None], use_cache=False)[0][0].float()
        finally:
            self._set(now)


def check_attention(wanted: str, device: torch.device, dtype: torch.dtype) -> None:
    """Raise ConfigError for a kernel that this device or this type never has; no model is needed to know."""
    if wanted not in VARLEN:
        return
    problem = ""
    if device.type != "cuda":
        problem = f"a kernel for CUDA, and the model is on {device}"
    elif dtype not in _HALF:
        problem = f"a kernel for bfloat16, and the model computes in {str(dtype).removeprefix('torch.')}"
    elif wanted == "flash_attn" and importlib.util.find_spec("flash_attn") is None:
        problem = "the kernel of the package flash-attn, which is not installed"
    if problem:
        raise ConfigError(f'model.attention = "{wanted}" is {problem}; set it to "auto"')


def refuse_attention(wanted: str) -> NoReturn:
    """For a model that attends by itself."""
    raise ConfigError(
        f'model.attention = "{wanted}" has no effect: the model runs through Headrace\'s own forward pass on the CPU; '
        f"remove it, or set model.fast_path = false"
    )


def _probe_rows(vocabulary: int) -> list[list[int]]:
    """Rows of different lengths; two share a prefix."""
    shared = [(7 * i + 3) % vocabulary for i in range(_SHARED)]
    return [
        [(5 * i + 1) % vocabulary for i in range(6)],
        [*shared, 5 % vocabulary, 11 % vocabulary],
        [(3 * i + 2) % vocabulary for i in range(11)],
        [*shared, 8 % vocabulary, 1 % vocabulary, 4 % vocabulary],
    ]


def _padded_index(rows: PackedRows) -> tuple[int, int, Tensor | None]:
    """(rows, longest, index of each token in a right-padded [rows * longest] layout; None if nothing is padded)."""
    count, longest = len(rows.lengths), max(rows.lengths)
    if min(rows.lengths) == longest:
        return count, longest, None
    lengths_R = torch.tensor(rows.lengths, device=rows.ids_N.device)
    starts_R = torch.arange(count, device=rows.ids_N.device) * longest
    return count, longest, starts_R.repeat_interleave(lengths_R, output_size=len(rows.ids_N)) + rows.positions_N


def describe_attention(model: Any) -> str:
    """What is shown at start-up; empty for a model with an attention of its own."""
    kernel = getattr(model, "attention", "")
    said = {
        "sdpa": "torch's attention, rows in bins of similar length",
        "varlen": "torch's kernel for rows of any length",
        "flash_attn": "flash-attn's kernel for rows of any length",
        "padded": "right-padded batches",
    }
    return said.get(kernel, "")
