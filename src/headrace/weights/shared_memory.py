"""Trained weights in memory that learner and engine process share.

There are three buffers: the one that the engine decodes with, the one that the next publication is written to, and
one more while weights are pinned. Each is an anonymous file: it has no name that could be left behind, is not bound by
the size of /dev/shm, takes memory only once it is written to, and is gone with the last process that has it open.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from headrace.errors import EngineError
from headrace.models.causal import CausalModel
from headrace.models.modules import ALIGNMENT, copy_modules, trained_parameters
from headrace.utils.bulk_copy import THREADS, bulk_map

BUFFERS = 3


@dataclass(frozen=True, slots=True)
class Place:
    """Where a buffer holds one parameter; `start` is in bytes."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    start: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Where a buffer holds what."""

    places: tuple[Place, ...]
    size: int


@dataclass(frozen=True, slots=True)
class _Span:
    """A stretch of one of the learner's storages that holds trained parameters, and its place in a buffer."""

    storage: torch.UntypedStorage
    first: int
    last: int
    start: int

    @property
    def in_buffer(self) -> slice:
        return slice(self.start, self.start + self.last - self.first)

    def content(self) -> np.ndarray:
        """Its bytes, as an array of numpy, which copies twice as fast as a tensor of bytes."""
        return torch.empty(0, dtype=torch.uint8).set_(self.storage).numpy()[self.first : self.last]  # type: ignore


class SharedWeights:
    """The learner's side: it writes, the engine process reads."""

    def __init__(self, hf_model: Any) -> None:
        self._trained = trained_parameters(hf_model)
        names = {parameter: name for name, parameter in hf_model.named_parameters()}
        spans = _spans(self._trained)
        self._slices = [span.in_buffer for span in spans.values()]
        self.layout = _layout({names[parameter]: parameter for parameter in self._trained}, spans)
        self.files = [_anonymous_file(self.layout.size) for _ in range(BUFFERS)]
        self._maps = [mmap.mmap(file, self.layout.size) for file in self.files]
        self._written: set[int] = set()

    def free_buffer(self, used: Collection[int | None]) -> int:
        """A buffer that is not in use; one that has memory already rather than one that has not."""
        free = [buffer for buffer in range(BUFFERS) if buffer not in used]
        return min(free, key=lambda buffer: (buffer not in self._written, buffer))

    def write(self, buffer: int) -> None:
        """Copy the learner's weights as they are now, at the speed of memory."""
        spans = _spans(self._trained).values()  # anew: someone may have moved a parameter to other memory
        assert [span.in_buffer for span in spans] == self._slices, "parameters are laid out otherwise than at the start"
        whole = np.frombuffer(self._maps[buffer], dtype=np.uint8)
        pieces: list[tuple[np.ndarray, np.ndarray]] = []
        for span in spans:
            target, source = (np.array_split(x, THREADS) for x in (whole[span.in_buffer], span.content()))
            pieces += zip(target, source, strict=True)
        bulk_map(lambda piece: np.copyto(*piece), pieces, whole.nbytes)
        self._written.add(buffer)

    def release(self, buffer: int) -> None:
        """Give the memory of a buffer back; it may be written again."""
        with suppress(OSError, AttributeError):  # not every system can: then the memory is kept for the next time
            self._maps[buffer].madvise(mmap.MADV_REMOVE)
        self._written.discard(buffer)

    def close(self) -> None:
        """Give everything back, once the engine process has, too."""
        for file in self.files:
            os.close(file)
        self.files, self._maps = [], []


class BoundModels:
    """The engine's side: a model per buffer, which reads its trained weights where the learner writes them."""

    def __init__(
        self, hf_model: Any, layout: Layout, files: Sequence[int], build: Callable[[Any], CausalModel]
    ) -> None:
        self._hf_model = hf_model
        self._trained = {name: p for name, p in hf_model.named_parameters() if p.requires_grad}
        self._layout, self._files, self._build = layout, files, build
        self._models: dict[int, CausalModel] = {}
        expected = {place.name: (place.shape, place.dtype) for place in layout.places}
        found = {name: (tuple(p.shape), p.dtype) for name, p in self._trained.items()}
        if found != expected:
            odd = sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
            raise EngineError(
                f"the engine's model is not the learner's: {len(odd)} trained tensors differ, such as {odd[0]}; "
                f"was the model's folder changed while the run goes on?"
            )

    def model(self, buffer: int) -> CausalModel:
        """The model on a buffer, made when it is first asked for."""
        if buffer not in self._models:
            views = self._views(buffer)
            if self._models:
                copied = {p: nn.Parameter(views[name]) for name, p in self._trained.items()}
                self._models[buffer] = self._build(copy_modules(self._hf_model, copied))
            else:  # the model as it was loaded, which thereby gives back what it was loaded with
                for name, parameter in self._trained.items():
                    parameter.data = views[name]
                self._models[buffer] = self._build(self._hf_model)
        return self._models[buffer]

    def _views(self, buffer: int) -> dict[str, Tensor]:
        whole = torch.frombuffer(mmap.mmap(self._files[buffer], self._layout.size), dtype=torch.uint8)
        return {
            place.name: whole.view(place.dtype).as_strided(
                place.shape, place.stride, place.start // place.dtype.itemsize
            )
            for place in self._layout.places
        }


def _spans(parameters: Sequence[nn.Parameter]) -> dict[int, _Span]:
    """By address of the storage. Storages are kept whole: what decoding reads as one matrix must stay one."""
    ends: dict[int, tuple[torch.UntypedStorage, int, int]] = {}
    for parameter in parameters:
        storage = parameter.data.untyped_storage()
        first, last = _extent(parameter)
        _, known_first, known_last = ends.get(storage.data_ptr(), (storage, first, last))
        ends[storage.data_ptr()] = (storage, min(first, known_first), max(last, known_last))
    spans: dict[int, _Span] = {}
    start = 0
    for address, (storage, first, last) in ends.items():
        spans[address] = _Span(storage, first, last, start)
        start = _aligned(start + last - first)
    return spans


def _extent(parameter: nn.Parameter) -> tuple[int, int]:
    """First byte of the parameter within its storage, and the first after it."""
    tensor, size = parameter.data, parameter.element_size()
    reach = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    first = int(tensor.storage_offset())
    return first * size, (first + reach + 1) * size


def _layout(parameters: dict[str, nn.Parameter], spans: dict[int, _Span]) -> Layout:
    places = []
    for name, parameter in parameters.items():
        span = spans[parameter.data.untyped_storage().data_ptr()]
        start = span.start + _extent(parameter)[0] - span.first
        places.append(Place(name, parameter.dtype, tuple(parameter.shape), parameter.stride(), start))
    return Layout(tuple(places), _aligned(max(span.in_buffer.stop for span in spans.values())))


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _anonymous_file(size: int) -> int:
    if hasattr(os, "memfd_create"):
        file = os.memfd_create("headrace-weights")
    else:
        with tempfile.TemporaryFile() as unnamed:
            file = os.dup(unnamed.fileno())
    os.ftruncate(file, size)
    return file
