"""AdamW, and the end of an optimizer step: the accumulated gradient is scaled, clipped, applied and forgotten."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from headrace.config import OptimizerSection
from headrace.errors import BackendError, DivergedError
from headrace.tracking.metrics import MetricsAggregator


def new_adamw(parameters: Sequence[Tensor], section: OptimizerSection) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices only."""
    matrices = [p for p in parameters if p.ndim >= 2]
    others = [p for p in parameters if p.ndim < 2]
    return torch.optim.AdamW(
        [{"params": matrices, "weight_decay": section.weight_decay}, {"params": others, "weight_decay": 0.0}],
        lr=section.lr,
        betas=section.betas,
        eps=section.eps,
        fused=True,
    )


def apply_gradient(
    optimizer: torch.optim.Optimizer, lr: float, grad_scale: float, grad_clip: float
) -> MetricsAggregator:
    """Multiply the accumulated gradient with `grad_scale`, clip it to `grad_clip` (0: not), apply it, and forget it."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not gradients:
        raise BackendError("optim_step was called with no accumulated gradient")
    norm = float(torch.nn.utils.get_total_norm(gradients)) * grad_scale
    if not math.isfinite(norm):
        optimizer.zero_grad(set_to_none=True)
        raise DivergedError(f"the gradient norm is {norm}; lower optimizer.lr (now {lr:g}) or clip harder")
    torch._foreach_mul_(gradients, grad_scale * (grad_clip / norm if grad_clip and norm > grad_clip else 1.0))
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    metrics = MetricsAggregator()
    metrics.record_all({"policy/grad_norm": norm, "optim/lr": lr})
    return metrics
