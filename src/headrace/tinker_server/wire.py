"""Requests taken apart, and results put together, as the Tinker SDK sends and reads them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, TypeVar

import numpy as np
from google.protobuf.message import DecodeError
from pydantic import BaseModel, ValidationError
from tinker.proto import tinker_public_pb2 as pb

from headrace.tinker_server.options import Refusal

M = TypeVar("M", bound=BaseModel)
JSON, PROTO = "application/json", "application/x-protobuf"
_NUMPY: dict[int, Any] = {pb.DTYPE_FLOAT32: np.float32, pb.DTYPE_INT64: np.int64, pb.DTYPE_INT32: np.int32}
_NOTHING = -99999.0  # what the SDK reads as an empty cell of top-k


@dataclass(frozen=True, slots=True)
class Outcome:
    """The body of an answer."""

    body: bytes
    media_type: str = JSON

    @classmethod
    def of(cls, **fields: Any) -> Outcome:
        return cls(json.dumps(fields).encode())

    @classmethod
    def failure(cls, sentence: str, category: str) -> Outcome:
        """A request that failed: `category` is "user" or "server"."""
        return cls.of(error=sentence, category=category)


@dataclass(frozen=True, slots=True)
class Datum:
    """One row: N input tokens, and arrays whose first axis is N."""

    tokens: tuple[int, ...]
    inputs: Mapping[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class TrainRequest:
    """`forward_backward`, or `forward`."""

    model_id: str
    seq_id: int
    loss: str
    config: Mapping[str, float | str]
    data: tuple[Datum, ...]
    forward_only: bool


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """One sampled sequence."""

    tokens: Sequence[int]
    logprobs: Sequence[float]
    stopped: bool
    top: tuple[np.ndarray, np.ndarray] | None = None
    """Ids and log-probabilities, both [length, k]."""


@dataclass(frozen=True, slots=True)
class SampleResult:
    """What a sample request gives."""

    sequences: Sequence[SampledTokens]
    prompt_logprobs: np.ndarray | None = None
    """One per prompt token, NaN where there is none."""
    prompt_top: tuple[np.ndarray, np.ndarray] | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)


def read_json(kind: type[M], raw: bytes) -> M:
    """The request as the SDK's own type."""
    try:
        return kind.model_validate_json(raw)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the body"
        raise Refusal(f"{where}: {first['msg']}, got {str(first.get('input'))[:80]!r}") from None


def peek_train(raw: bytes) -> Any:
    """The message of a `forward_backward`, not yet checked."""
    message = pb.ForwardBackwardRequest()
    try:
        message.ParseFromString(raw)
    except DecodeError as error:
        raise Refusal(f"the body is no ForwardBackwardRequest: {error}; send it as protobuf") from None
    return message


def read_train(message: Any) -> TrainRequest:
    """A checked `forward_backward`."""
    if not message.data:
        raise Refusal("the request has no data; send at least one datum")
    config: dict[str, float | str] = dict(message.loss_fn_config)
    for name, value in message.loss_fn_config_v2.items():
        config[name] = value.text if value.WhichOneof("value") == "text" else value.number
    data = tuple(_read_datum(datum, index) for index, datum in enumerate(message.data))
    return TrainRequest(message.model_id, message.seq_id, message.loss_fn, config, data, message.forward_only)


def _read_datum(message: Any, index: int) -> Datum:
    tokens: list[int] = []
    for chunk in message.model_input:
        kind = chunk.WhichOneof("chunk")
        if kind != "encoded_text":
            raise Refusal(f"datum {index} has a chunk of {kind or 'no kind'}; this server trains on text tokens only")
        tokens += _from_bytes(chunk.encoded_text.tokens, np.int32, f"datum {index}: model_input").tolist()
    if not tokens:
        raise Refusal(f"datum {index} has no input tokens; give at least one")
    where = f"datum {index}: loss_fn_inputs"
    inputs = {name: _read_tensor(tensor, f'{where}["{name}"]') for name, tensor in message.loss_fn_inputs.items()}
    return Datum(tuple(tokens), inputs)


def _from_bytes(raw: bytes, kind: Any, where: str) -> np.ndarray:
    size = np.dtype(kind).itemsize
    if len(raw) % size:
        raise Refusal(f"{where} has {len(raw)} bytes, which is no multiple of {size}; is the dtype right?")
    return np.frombuffer(raw, dtype=kind)


def _read_tensor(message: Any, where: str) -> np.ndarray:
    kind, shape = _NUMPY.get(message.dtype), tuple(message.shape)
    if kind is None:
        raise Refusal(f"{where} has dtype {message.dtype}; send float32 or int64")
    if message.WhichOneof("encoding") == "sparse_csr":
        return _read_sparse(message.sparse_csr, kind, shape, where)
    flat = _from_bytes(message.dense, kind, where)
    if not shape:
        return flat
    if any(size < 0 for size in shape) or int(np.prod(shape)) != flat.size:
        raise Refusal(f"{where} has {flat.size} numbers, and its shape {list(shape)} has another count")
    return flat.reshape(shape)


def _read_sparse(message: Any, kind: Any, shape: tuple[int, ...], where: str) -> np.ndarray:
    values = _from_bytes(message.values, kind, where)
    starts = _from_bytes(message.crow_indices, np.int64, where)
    columns = _from_bytes(message.col_indices, np.int64, where)
    if len(shape) != 2 or min(shape) < 0 or len(starts) != shape[0] + 1 or len(values) != len(columns):
        raise Refusal(f"{where} is no sparse matrix of shape {list(shape)}; send CSR of a two-dimensional tensor")
    counts = np.diff(starts)
    sound = starts[0] == 0 and starts[-1] == len(values) and (counts >= 0).all()
    if not sound or (len(columns) and not 0 <= columns.min() <= columns.max() < shape[1]):
        raise Refusal(f"{where} has CSR indices outside of its shape {list(shape)}")
    if shape[0] * shape[1] > 2**28:
        raise Refusal(f"{where} has shape {list(shape)}, which is too large; send fewer columns")
    dense = np.zeros(shape, dtype=kind)
    dense[np.repeat(np.arange(shape[0]), counts), columns] = values
    return dense


def train_outcome(logprobs: Sequence[np.ndarray], metrics: Mapping[str, float]) -> Outcome:
    """What `forward_backward` gives; `logprobs` has an array per datum, [N] or [N, K]."""
    message = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    message.metrics.update(metrics)
    for trailing, same in groupby(logprobs, key=lambda array: array.shape[1:]):
        arrays = [np.ascontiguousarray(array, dtype=np.float32) for array in same]
        offsets = np.cumsum([0, *(array.nbytes for array in arrays)], dtype=np.int64)
        record = message.loss_fn_outputs.add(num_datums=len(arrays), type_tag="ArrayRecord")
        field_ = record.fields["logprobs"]
        field_.data = b"".join(array.tobytes() for array in arrays)
        field_.offsets, field_.dtype = offsets.tobytes(), pb.DTYPE_FLOAT32
        field_.trailing_shape.extend(trailing)
    return Outcome(message.SerializeToString(), PROTO)


def sample_outcome(result: SampleResult) -> Outcome:
    """What `asample` gives."""
    message = pb.SampleResponse()
    for sequence in result.sequences:
        entry = message.sequences.add()
        entry.stop_reason = pb.STOP_REASON_STOP if sequence.stopped else pb.STOP_REASON_LENGTH
        entry.tokens = np.asarray(sequence.tokens, dtype=np.int32).tobytes()
        entry.logprobs = np.asarray(sequence.logprobs, dtype=np.float32).tobytes()
        if sequence.top is not None:
            _write_top(entry.topk_sampled_logprobs, sequence.top)
    if result.prompt_logprobs is not None:
        message.prompt_logprobs = result.prompt_logprobs.astype(np.float32).tobytes()
    if result.prompt_top is not None:
        _write_top(message.topk_prompt_logprobs, result.prompt_top)
    return Outcome(message.SerializeToString(), PROTO)


def _write_top(message: Any, top: tuple[np.ndarray, np.ndarray]) -> None:
    ids, logprobs = top
    message.length, message.k = ids.shape
    empty = np.isnan(logprobs)
    message.token_ids = np.where(empty, 0, ids).astype(np.int32).tobytes()
    message.logprobs = np.where(empty, _NOTHING, logprobs).astype(np.float32).tobytes()
