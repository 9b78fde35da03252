"""Log-probabilities of targets, with the logits of only one chunk of positions in memory at a time."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from headrace.models import decoder_layer as whole
from headrace.models.causal import CausalModel


def target_logprobs(
    model: CausalModel,
    hidden_MD: Tensor,
    targets_M: Tensor,
    temperatures_M: Tensor,
    chunk: int,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """(log-probability of each target, entropy of each distribution), both [M], at the given temperatures.

    With gradients, a chunk's logits are computed again in the backward pass instead of being kept, so that memory
    does not grow with vocabulary x length.
    """
    head = None if entropy_gradient else model.whole_head()
    recompute = torch.is_grad_enabled() and hidden_MD.shape[0] > chunk

    def one_chunk(hidden: Tensor, targets: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor]:
        if head is not None:
            return whole.chosen_logprobs(hidden, head, targets, temperatures)
        logits_CV = model.logits(hidden)
        logprobs_CV = torch.log_softmax(logits_CV.to(wide_dtype(logits_CV.dtype)) / temperatures[:, None], dim=-1)
        chosen = logprobs_CV.gather(1, targets[:, None]).squeeze(1)
        with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
            entropy = -(logprobs_CV.exp() * logprobs_CV).sum(-1)
        return chosen, entropy

    parts = []
    for start in range(0, hidden_MD.shape[0], chunk):
        window = slice(start, start + chunk)
        inputs = (hidden_MD[window], targets_M[window], temperatures_M[window])
        parts.append(checkpoint(one_chunk, *inputs, use_reentrant=False) if recompute else one_chunk(*inputs))
    return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """What log-probabilities and losses are computed in: float32, or float64 for a model of that type."""
    return torch.promote_types(dtype, torch.float32)
