"""Samples as the API's datums, and what comes back for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tinker import types
from torch import Tensor

from headrace.data.sample import Sample
from headrace.errors import BackendError, DataError

Numbers = Sequence[float] | np.ndarray


def model_input(ids: Sequence[Any]) -> types.ModelInput:
    """Token ids as the API takes them: never text, which would be tokenised again."""
    odd = next((token for token in ids if not isinstance(token, int | np.integer)), None)
    if odd is not None:
        raise DataError(f'a row must hold integer token ids, got {odd!r}; backend "tinker" trains text only')
    return types.ModelInput.from_ints([int(token) for token in ids])


def datum(sample: Sample, **inputs: Numbers) -> types.Datum:
    """A row and, for each of its targets, the loss's inputs."""
    arrays: dict[str, Any] = {key: np.asarray(values, dtype=np.float32) for key, values in inputs.items()}
    targets = np.asarray(sample.tokens[1:], dtype=np.int64)
    return types.Datum(model_input(sample.tokens[:-1]), {"target_tokens": targets, **arrays})  # type: ignore[dict-item]


def wide_datum(sample: Sample, vocabulary: int, weights_TV: np.ndarray | None = None) -> types.Datum:
    """As `datum`, with every token of the vocabulary as a target of every position."""
    shape = (len(sample.tokens) - 1, vocabulary)
    inputs: dict[str, Any] = {
        "target_tokens": np.broadcast_to(np.arange(vocabulary, dtype=np.int64), shape).copy(),
        "weights": np.zeros(shape, dtype=np.float32) if weights_TV is None else weights_TV.astype(np.float32),
    }
    return types.Datum(model_input(sample.tokens[:-1]), inputs)


def returned_logprobs(output: types.ForwardBackwardOutput, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """The log-probabilities of each datum's targets, in double precision."""
    found: list[Tensor] = []
    if len(output.loss_fn_outputs) != len(shapes):
        raise BackendError(f"Tinker answered for {len(output.loss_fn_outputs)} rows, and {len(shapes)} were sent")
    for row, shape in zip(output.loss_fn_outputs, shapes, strict=True):
        values = _array(row)
        if values.size != int(np.prod(shape)):
            raise BackendError(f"Tinker answered with {values.size} log-probabilities for targets of shape {shape}")
        found.append(torch.from_numpy(values.reshape(tuple(shape)).astype(np.float64)))
    return found


def _array(row: Mapping[str, types.TensorData]) -> np.ndarray:
    if "logprobs" not in row:
        raise BackendError(f"Tinker answered without log-probabilities; it sent {', '.join(row) or 'nothing'}")
    return np.asarray(row["logprobs"].data, dtype=np.float32)


def without_first(logprobs: Sequence[float | None], tokens: int) -> list[float]:
    """Prompt log-probabilities of every token but the first, which has none."""
    scored = [value for value in logprobs[1:] if value is not None]
    if len(logprobs) != tokens or len(scored) != tokens - 1:
        raise BackendError(f"Tinker scored {len(scored)} of {tokens - 1} tokens")
    return scored
