"""AdamW, and the end of an optimizer step: the accumulated gradient is scaled, clipped, applied and cleared."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

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
    decays = [(matrices, section.weight_decay), (others, 0.0)]
    return torch.optim.AdamW(
        [{"params": together, "weight_decay": decay} for some, decay in decays for together in by_mesh(some) or [[]]],
        lr=section.lr,
        betas=section.betas,
        eps=section.eps,
        fused=True,
    )


def by_mesh(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """In lists of tensors that are spread over the same ranks: no operation on a list takes others."""
    found: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        found.setdefault(tensor.device_mesh if isinstance(tensor, DTensor) else None, []).append(tensor)
    return list(found.values())


Gradients = Mapping[Tensor, Tensor]
"""By what is optimized."""


def total_norm(gradients: Sequence[Tensor]) -> float:
    """Of all of them; of those in shards, a collective."""
    norms = [torch.nn.utils.get_total_norm(together) for together in by_mesh(gradients)]
    return math.hypot(*(float(norm.full_tensor() if isinstance(norm, DTensor) else norm) for norm in norms))


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
    norm = total_norm(gradients) * grad_scale
    if not math.isfinite(norm):
        optimizer.zero_grad(set_to_none=True)
        lr = optimizer.param_groups[0]["lr"]
        raise DivergedError(
            f"the gradient norm is {norm}, and no step was made; lower the learning rate (now {lr:g}) or clip harder"
        )
    for together in by_mesh(gradients):
        torch._foreach_mul_(together, grad_scale * (grad_clip / norm if 0 < grad_clip < norm else 1.0))
    if update is None:
        for parameter, gradient in given.items():
            parameter.grad = gradient
        optimizer.step()
    else:
        update(given)
    optimizer.zero_grad(set_to_none=True)
    return norm
