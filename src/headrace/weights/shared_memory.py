"""Transport "shared_memory": trained weights in memory that learner and engine process share.

There are three buffers: the one that the engine decodes with, the one that the next version is written to, and one
more while weights are pinned; of several engines, one more for each. Each is an anonymous file: it has no name that
could be left behind, is not bound by the size of /dev/shm, takes memory only once it is written to, and is gone with
the last process that has it open.
On the CPU the engine decodes with the buffers themselves. To and from a device, weights are copied through them.
"""

from __future__ import annotations

import math
import mmap
import os
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from headrace.errors import EngineError
from headrace.models.causal import CausalModel
from headrace.models.modules import ALIGNMENT, copy_modules
from headrace.utils.bulk_copy import THREADS, bulk_map
from headrace.weights.source import ModelWeights

BUFFERS = 3
"""For one engine process."""


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a buffer holds one tensor; `start` is in bytes."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    start: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Where a buffer holds what."""

    slots: tuple[Slot, ...]
    size: int


@dataclass(frozen=True, slots=True)
class _Span:
    """A stretch of one of the learner's storages that holds trained parameters, and where a buffer has it."""

    storage: torch.UntypedStorage
    first: int
    last: int
    start: int

    @property
    def in_buffer(self) -> slice:
        return slice(self.start, self.start + self.last - self.first)

    def content(self) -> np.ndarray:
        """Its bytes, as an array of numpy, which copies twice as fast as a tensor of bytes."""
        whole = torch.empty(0, dtype=torch.uint8, device=self.storage.device).set_(self.storage)  # type: ignore
        return whole[self.first : self.last].cpu().numpy()  # of a device, a copy on the host


class SharedBuffers(ABC):
    """The learner's side: it writes, the engine process reads. Who writes, and how, is the subclass's."""

    in_place = False

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.files = [anonymous_file(self.layout.size) for _ in range(BUFFERS)]
        self._maps = [mmap.mmap(file, self.layout.size) for file in self.files]
        self._written: set[int] = set()
        self.writes = [0] * BUFFERS
        """How often each was written."""
        self._reserved: int | None = None
        self._to_take = 0
        self._readers: list[Callable[[], Collection[int | None]]] = []

    def join(self, uses: Callable[[], Collection[int | None]]) -> None:
        """One more engine process reads; `uses` says which buffers. They all read the same memory: one copy serves
        any number of them."""
        self._readers.append(uses)

    def grow(self, readers: int) -> None:
        """Before processes are started: one that comes back late may need a version that no other has any more."""
        for _ in range(len(self.files), readers + BUFFERS - 1):
            self.files.append(anonymous_file(self.layout.size))
            self._maps.append(mmap.mmap(self.files[-1], self.layout.size))
            self.writes.append(0)

    def reserve(self, used: Collection[int | None]) -> None:
        """Choose the buffer of the next version: not one in use, and rather one that has memory already."""
        taken = {*used, *(buffer for uses in self._readers for buffer in uses())}
        free = [buffer for buffer in range(len(self.files)) if buffer not in taken]
        self._reserved = min(free, key=lambda buffer: (buffer not in self._written, buffer))
        self._to_take = max(1, len(self._readers))

    async def send(self, version: int) -> None:
        """Copy the learner's weights into the reserved buffer, on the learner's thread."""
        if self._reserved is None:
            raise EngineError(f"version {version} is sent before begin_update; begin an update, then send")
        buffer = self._reserved
        await self.on_learner(lambda: self.write(buffer))

    @abstractmethod
    async def on_learner(self, function: Callable[[], Any]) -> Any:
        """Run it on the learner's thread."""

    def take_reserved(self) -> int:
        """The buffer of the version that was sent; the next one needs another."""
        if self._reserved is None:
            raise EngineError("end_update came before begin_update; begin an update, send the weights, then end it")
        buffer, self._to_take = self._reserved, self._to_take - 1
        if not self._to_take:
            self._reserved = None
        return buffer

    def write(self, buffer: int) -> None:
        """Copy the learner's weights as they are now into a buffer."""
        self.copy_into(buffer)
        self._written.add(buffer)
        self.writes[buffer] += 1

    @abstractmethod
    def copy_into(self, buffer: int) -> None:
        """Copy the learner's weights as they are now."""

    def content(self, buffer: int) -> np.ndarray:
        """The bytes of a buffer."""
        return np.frombuffer(self._maps[buffer], dtype=np.uint8)

    def release(self, buffer: int) -> None:
        """Give the memory of a buffer back; it may be written again. Only the last of its readers gives it back."""
        if sum(buffer in uses() for uses in self._readers) > 1:
            return
        with suppress(OSError, AttributeError):  # not every system can: then the memory is kept for the next time
            self._maps[buffer].madvise(mmap.MADV_REMOVE)
        self._written.discard(buffer)

    def close(self) -> None:
        """Give everything back, once the engine processes have, too: the last of them closes."""
        if len(self._readers) > 1:
            self._readers.pop()
            return
        for file in self.files:
            os.close(file)
        self.files, self._maps = [], []


class SharedWeights(SharedBuffers):
    """Of a learner in this process."""

    def __init__(self, source: ModelWeights) -> None:
        self._source = source
        tensors = source.tensors()
        spans = _spans(tensors.values())
        self._slices = [span.in_buffer for span in spans.values()]
        super().__init__(_layout(tensors, spans))

    async def on_learner(self, function: Callable[[], Any]) -> Any:
        return await self._source.on_learner(function)

    def copy_into(self, buffer: int) -> None:
        """At the speed of memory."""
        tensors = self._source.tensors()  # again: someone may have moved a parameter to other memory
        spans = _spans(tensors.values()).values()
        assert [span.in_buffer for span in spans] == self._slices, "parameters are laid out otherwise than at the start"
        whole = self.content(buffer)
        pieces: list[tuple[np.ndarray, np.ndarray]] = []
        for span in spans:
            target, source = (np.array_split(x, THREADS) for x in (whole[span.in_buffer], span.content()))
            pieces += zip(target, source, strict=True)
        bulk_map(lambda piece: np.copyto(*piece), pieces, whole.nbytes)


class BoundModels:
    """The engine's side: a model per buffer.

    On the CPU it reads its trained weights where the learner writes them; on a device it has a copy of them there.
    """

    def __init__(
        self, hf_model: Any, layout: Layout, files: Sequence[int], build: Callable[[Any], CausalModel]
    ) -> None:
        self._hf_model = hf_model
        self._trained = {name: p for name, p in hf_model.named_parameters() if p.requires_grad}
        self._layout, self._files, self._build = layout, files, build
        self._models: dict[int, CausalModel] = {}
        self._held: dict[int, Mapping[str, nn.Parameter]] = {}
        expected = {slot.name: (slot.shape, slot.dtype) for slot in layout.slots}
        found = {name: (tuple(p.shape), p.dtype) for name, p in self._trained.items()}
        if found != expected:
            odd = sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
            raise EngineError(
                f"the engine's model is not the learner's: {len(odd)} trained tensors differ, such as {odd[0]}; "
                f"was the model's folder changed during the run?"
            )

    def model(self, buffer: int) -> CausalModel:
        """The model on a buffer, made when it is first asked for, with the weights that are in the buffer now."""
        views = self._views(buffer)
        if buffer not in self._held:
            self._held[buffer] = self._parameters(views)
        with torch.no_grad():
            for name, parameter in self._held[buffer].items():
                if parameter.device != views[name].device:
                    parameter.copy_(views[name])
        if buffer not in self._models:
            self._models[buffer] = self._build(self._modules(self._held[buffer]))
        return self._models[buffer]

    def _parameters(self, views: Mapping[str, Tensor]) -> dict[str, nn.Parameter]:
        """The trained parameters of one more model, which on the CPU lie in the buffer."""
        if not self._held:
            for name, parameter in self._trained.items():
                if parameter.device == views[name].device:
                    parameter.data = views[name]  # thereby giving back what the model was loaded with
            return self._trained
        return {
            name: nn.Parameter(views[name] if p.device == views[name].device else torch.empty_like(p))
            for name, p in self._trained.items()
        }

    def _modules(self, parameters: Mapping[str, nn.Parameter]) -> Any:
        if parameters is self._trained:
            return self._hf_model
        return copy_modules(self._hf_model, {self._trained[name]: p for name, p in parameters.items()})

    def _views(self, buffer: int) -> dict[str, Tensor]:
        whole = torch.frombuffer(mmap.mmap(self._files[buffer], self._layout.size), dtype=torch.uint8)
        return {
            slot.name: whole.view(slot.dtype).as_strided(slot.shape, slot.stride, slot.start // slot.dtype.itemsize)
            for slot in self._layout.slots
        }


_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Linear layers whose weights decoding reads as one matrix: they must stand end to end."""


def plain_layout(tensors: Sequence[tuple[str, torch.dtype, tuple[int, ...]]]) -> Layout:
    """A layout for tensors that are described by name, dtype and shape alone."""
    slots: list[Slot] = []
    start = 0
    for number, (name, dtype, shape) in enumerate(sorted(tensors, key=lambda one: _family(one[0]))):
        if not (number and _family(name)[:2] == _family(slots[-1].name)[:2]):
            start = _aligned(start)
        stride = tuple(math.prod(shape[place + 1 :]) for place in range(len(shape)))
        slots.append(Slot(name, dtype, shape, stride, start))
        start += math.prod(shape) * dtype.itemsize
    return Layout(tuple(slots), _aligned(max(start, 1)))


def _family(name: str) -> tuple[str, str, int]:
    """What stands end to end: the module above, the layers together, and which of them it is."""
    module, _, kind = name.rpartition(".")
    above, _, layer = module.rpartition(".")
    for group in _FUSED:
        if layer in group:
            return above, f"{group[0]}.{kind}", group.index(layer)
    return above, f"{layer}.{kind}", 0


def _spans(tensors: Iterable[Tensor]) -> dict[int, _Span]:
    """By address of the storage. Storages stay in one piece: what decoding reads as one matrix must stay one."""
    ends: dict[int, tuple[torch.UntypedStorage, int, int]] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        first, last = _extent(tensor)
        _, known_first, known_last = ends.get(storage.data_ptr(), (storage, first, last))
        ends[storage.data_ptr()] = (storage, min(first, known_first), max(last, known_last))
    spans: dict[int, _Span] = {}
    start = 0
    for address, (storage, first, last) in ends.items():
        spans[address] = _Span(storage, first, last, start)
        start = _aligned(start + last - first)
    return spans


def _extent(tensor: Tensor) -> tuple[int, int]:
    """First byte of the tensor within its storage, and the first after it."""
    size = tensor.element_size()
    reach = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    first = int(tensor.storage_offset())
    return first * size, (first + reach + 1) * size


def _layout(tensors: Mapping[str, Tensor], spans: dict[int, _Span]) -> Layout:
    slots = []
    for name, tensor in tensors.items():
        span = spans[tensor.untyped_storage().data_ptr()]
        start = span.start + _extent(tensor)[0] - span.first
        slots.append(Slot(name, tensor.dtype, tuple(tensor.shape), tensor.stride(), start))
    return Layout(tuple(slots), _aligned(max(span.in_buffer.stop for span in spans.values())))


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def mapped(file: int, size: int) -> mmap.mmap:
    """A buffer's memory."""
    return mmap.mmap(file, size)


def anonymous_file(size: int) -> int:
    """A file that has no name, and is gone with the last process that has it open."""
    if hasattr(os, "memfd_create"):
        file = os.memfd_create("headrace-weights")
    else:
        with tempfile.TemporaryFile() as unnamed:
            file = os.dup(unnamed.fileno())
    os.ftruncate(file, size)
    return file
