"""Log-probabilities of targets, with the logits of only one chunk of positions in memory at a time."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from headrace.models import decoder_layer
from headrace.models.causal import CausalModel


def target_logprobs(
    model: CausalModel,
    hidden_MD: Tensor,
    targets_M: Tensor,
    temperatures_M: Tensor,
    chunk: int,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """(log-probability of each target, entropy of each distribution), both [M], at the given temperatures."""
    head = None if entropy_gradient else model.fused_head()

    def one_chunk(hidden: Tensor, targets: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor]:
        if head is not None:
            return decoder_layer.chosen_logprobs(hidden, head, targets, temperatures)
        logits_CV = model.logits(hidden)
        logprobs_CV = torch.log_softmax(logits_CV.to(wide_dtype(logits_CV.dtype)) / temperatures[:, None], dim=-1)
        chosen = logprobs_CV.gather(1, targets[:, None]).squeeze(1)
        with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
            entropy = -(logprobs_CV.exp() * logprobs_CV).sum(-1)
        return chosen, entropy

    chosen_M, entropy_M = _by_chunks(one_chunk, chunk, hidden_MD, targets_M, temperatures_M)
    return chosen_M, entropy_M


def all_target_logprobs(model: CausalModel, hidden_MD: Tensor, targets_MK: Tensor, chunk: int) -> Tensor:
    """Log-probabilities [M, K] of several targets for each position, at temperature 1."""

    def one_chunk(hidden: Tensor, targets: Tensor) -> tuple[Tensor]:
        return (_logprobs(model, hidden).gather(1, targets),)

    return _by_chunks(one_chunk, chunk, hidden_MD, targets_MK)[0]


def top_logprobs(
    model: CausalModel, hidden_MD: Tensor, targets_M: Tensor, k: int, chunk: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(log-probability of each target [M], ids and log-probabilities [M, k] of the likeliest), at temperature 1."""

    def one_chunk(hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logprobs_CV = _logprobs(model, hidden)
        best = logprobs_CV.topk(k)
        return logprobs_CV.gather(1, targets[:, None]).squeeze(1), best.indices, best.values

    chosen_M, ids_Mk, best_Mk = _by_chunks(one_chunk, chunk, hidden_MD, targets_M)
    return chosen_M, ids_Mk, best_Mk


def _logprobs(model: CausalModel, hidden: Tensor) -> Tensor:
    logits_CV = model.logits(hidden)
    return torch.log_softmax(logits_CV.to(wide_dtype(logits_CV.dtype)), dim=-1)


def _by_chunks(one_chunk: Callable[..., tuple[Tensor, ...]], chunk: int, *inputs: Tensor) -> tuple[Tensor, ...]:
    """What the function gives for each chunk of positions, joined.

    With gradients, a chunk's logits are computed again in the backward pass instead of being kept, so that memory
    does not grow with vocabulary x length.
    """
    recompute = torch.is_grad_enabled() and inputs[0].shape[0] > chunk
    windows = zip(*(one.split(chunk) for one in inputs), strict=True)
    parts: list[tuple[Tensor, ...]] = [
        checkpoint(one_chunk, *window, use_reentrant=False) if recompute else one_chunk(*window) for window in windows
    ]  # type: ignore[assignment]
    return tuple(torch.cat(joined) for joined in zip(*parts, strict=True))


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """What log-probabilities and losses are computed in: float32, or float64 for a model of that type."""
    return torch.promote_types(dtype, torch.float32)
