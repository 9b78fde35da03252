"""AdamW, and the end of an optimizer step: the accumulated gradient is scaled, clipped, applied and cleared."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

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


Gradients = Mapping[Tensor, Tensor]
"""By what is optimized."""


def apply_gradient(
    optimizer: torch.optim.Optimizer, lr: float, grad_scale: float, grad_clip: float,
    given: Gradients | None = None, update: Callable[[Gradients], None] | None = None,
) -> MetricsAggregator:  # fmt: skip
    """`step` at a learning rate, and its metrics."""
    for group in optimizer.param_groups:
        group["lr"] = lr
    norm = step(optimizer, grad_scale, grad_clip, given, update)
    metrics = MetricsAggregator()
    metrics.record_all({"policy/grad_norm": norm, "optim/lr": lr})
    return metrics


def step(
    optimizer: torch.optim.Optimizer, grad_scale: float, grad_clip: float,
    given: Gradients | None = None, update: Callable[[Gradients], None] | None = None,
) -> float:  # fmt: skip
    """Multiply the accumulated gradient by `grad_scale`, clip it to `grad_clip` (0: not), apply it, and clear it.

    Returns its norm before clipping. If that is not finite, the gradient is cleared and no step is made. Gradients may
    be given that the parameters do not have themselves; `update` then applies them, if the optimizer cannot by itself.
    """
    if given is None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        given = {p: p.grad for p in parameters if p.grad is not None}
    gradients = list(given.values())
    if not gradients:
        raise BackendError("optim_step was called with no accumulated gradient; call forward_backward before it")
    total = torch.nn.utils.get_total_norm(gradients)
    norm = float(total.full_tensor() if isinstance(total, DTensor) else total) * grad_scale
    if not math.isfinite(norm):
        optimizer.zero_grad(set_to_none=True)
        lr = optimizer.param_groups[0]["lr"]
        raise DivergedError(
            f"the gradient norm is {norm}, and no step was made; lower the learning rate (now {lr:g}) or clip harder"
        )
    torch._foreach_mul_(gradients, grad_scale * (grad_clip / norm if 0 < grad_clip < norm else 1.0))
    if update is None:
        for parameter, gradient in given.items():
            parameter.grad = gradient
        optimizer.step()
    else:
        update(given)
    optimizer.zero_grad(set_to_none=True)
    return norm
