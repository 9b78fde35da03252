# pyright: reportMissingImports=false
"""Rows of tokens as verl's TensorDicts, and what it found for them as lists again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from verl.utils import tensordict_utils as tu

from headrace.data.sample import Sample


def as_verl(samples: Sequence[Sample], entropy: bool, remove_padding: bool, **more: Any) -> Any:
    """One micro-batch: all rows go through the model together."""
    rows = [sample.tokens for sample in samples]
    settings = {
        "use_dynamic_bsz": False,
        "micro_batch_size_per_gpu": len(rows),
        "use_remove_padding": remove_padding,
        "use_fused_kernels": False,
        "calculate_entropy": entropy,
        "pad_mode": "no_padding",
        **more,
    }
    tensors = {
        "input_ids": _nested(rows),
        "position_ids": _nested([range(len(row)) for row in rows]),
        "loss_mask": _nested([[1] * len(row) for row in rows]),  # verl counts it; ours is in the loss
        "temperature": torch.tensor([sample.temperature for sample in samples], dtype=torch.float32, device="cpu"),
    }
    return tu.get_tensordict(tensor_dict=tensors, non_tensor_dict=settings)


def flat(values: Tensor) -> Tensor:
    """Rows end to end: at each token, what verl has for the one after it. At the last of a row, nothing of use."""
    return (values.values() if values.is_nested else values.flatten()).float()


def by_row(values: Tensor, samples: Sequence[Sample]) -> list[list[float]]:
    """Per row, a number for every token but the first."""
    lengths = [len(sample.tokens) for sample in samples]
    return [row[:-1].tolist() for row in flat(values).split(lengths)]


def _nested(rows: Sequence[Sequence[int]]) -> Tensor:
    tensors = [torch.tensor(list(row), dtype=torch.long, device="cpu") for row in rows]
    return torch.nested.as_nested_tensor(tensors, layout=torch.jagged)
