"""The learning rate as a pure function of the step."""

from __future__ import annotations

import math

from headrace.config import OptimizerSection


def learning_rate(step: int, total_steps: int, optimizer: OptimizerSection) -> float:
    """Learning rate of optimizer step `step` of `total_steps`, counted from 1: no step has the rate 0."""
    return optimizer.lr * schedule_factor(step, total_steps, optimizer)


def schedule_factor(step: int, total_steps: int, optimizer: OptimizerSection) -> float:
    """Share of the peak: rises over warm-up, then stays, or falls to `min_lr_ratio`."""
    warmup = optimizer.warmup_steps or round(optimizer.warmup_ratio * total_steps)
    if step <= warmup:
        return step / warmup
    if optimizer.schedule == "constant":
        return 1.0
    progress = min(1.0, (step - 1 - warmup) / max(1, total_steps - warmup))
    falling = 1.0 - progress if optimizer.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return optimizer.min_lr_ratio + (1.0 - optimizer.min_lr_ratio) * falling
