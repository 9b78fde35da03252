"""Messages between learner and engine process: pickles, each after its length, over a pair of sockets.

Both ends are our own code and no one else can write to the sockets, so pickle is safe here.
"""

from __future__ import annotations

import asyncio
import pickle
import struct
from dataclasses import dataclass
from typing import Any, Literal

from headrace.config import ModelSection, Weights
from headrace.engines.base import DEFAULT_SAMPLING, EngineHealth, SamplingParams
from headrace.weights.shared_memory import Layout

_LENGTH = struct.Struct(">Q")


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How the engine process builds its model and decodes with it."""

    model: ModelSection
    eos_ids: tuple[int, ...] = ()
    row_block: int = 0
    weights: Weights = "float32"
    compile: bool = False
    max_batch: int = 128
    max_model_length: int | None = None
    prefill_tokens: int = 8192
    kept_tokens: int = 0
    defaults: SamplingParams = DEFAULT_SAMPLING
    cache_on_publish: Literal["keep", "recompute"] = "keep"
    threads: int = 1
    health_every_s: float = 0.2


@dataclass(frozen=True, slots=True)
class Served:
    """A version, and the buffer that holds its weights."""

    version: int
    buffer: int


@dataclass(frozen=True, slots=True)
class Open:
    """The first message: what to serve, in which state."""

    options: EngineOptions
    layout: Layout
    live: Served
    pinned: Served | None
    paused: bool


@dataclass(frozen=True, slots=True)
class Opened:
    """The engine is ready, and decodes with weights of this digest."""

    digest: str
    health: EngineHealth


@dataclass(frozen=True, slots=True)
class Failed:
    """The engine cannot be opened."""

    reason: str


@dataclass(frozen=True, slots=True)
class Call:
    """Call a method; the answer has the same number."""

    number: int
    method: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Cancel:
    """No one waits for the answer any more."""

    number: int


@dataclass(frozen=True, slots=True)
class Answer:
    """What a call returned or raised."""

    number: int
    value: Any
    error: Exception | None
    health: EngineHealth


def encode(message: Any) -> bytes:
    """The message as it goes over the wire."""
    content = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(content)) + content


async def receive(reader: asyncio.StreamReader) -> Any:
    """The next message; EOFError when the other side has gone."""
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        return pickle.loads(await reader.readexactly(length))
    except (asyncio.IncompleteReadError, ConnectionError) as gone:
        raise EOFError from gone
