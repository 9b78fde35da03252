# pyright: reportMissingImports=false
"""The receiving ends, behind vLLM's own interface of weight transfer engines."""

import mmap
import os
from dataclasses import dataclass, field
from math import prod

import torch
from torch.distributed import ProcessGroupGloo
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from .checksum import checksum
from .group import broadcast, join_group, new_store


class Receiver(WeightTransferEngine):
    """Loads tensors in checkpoint format, layer by layer, and keeps a checksum of each as it arrived."""

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        self.received: list[int] = []
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():  # vLLM's own asks without looking, which fails on the CPU
            torch.accelerator.synchronize()

    def load(self, arriving) -> None:
        """Give the tensors to the model."""

        def noted():
            for name, tensor in arriving:
                self.received.append(checksum(tensor))
                yield name, tensor

        self.model.load_weights(noted())

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)
        self._repack_heads()

    def _repack_heads(self) -> None:
        """On the CPU the output head decodes with a packed copy. A tied head is no tensor of its own in the stream, so
        nothing packs it again."""
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        if self.device.type != "cpu":
            return
        for module in self.model.modules():
            if isinstance(module, ParallelLMHead):
                module.quant_method.process_weights_after_loading(module)

    @property
    def worker(self) -> int:
        """This worker's number among all of its server."""
        parallel = self.parallel_config
        return parallel.data_parallel_index * parallel.world_size + parallel.rank

    def shutdown(self) -> None:
        pass


@dataclass
class FileInit(WeightTransferInitInfo):
    pass


@dataclass
class FileUpdate(WeightTransferUpdateInfo):
    path: str
    size: int
    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    starts: list[int]
    receipts: int
    """Where this server's workers write what arrived: a row of 64-bit checksums each."""


class FileReceiver(Receiver):
    """Tensors in a file that both ends have mapped: one machine."""

    init_info_cls, update_info_cls = FileInit, FileUpdate

    def init_transfer_engine(self, init_info: FileInit) -> None:
        pass

    def receive_weights(self, update_info: FileUpdate) -> None:
        file = os.open(update_info.path, os.O_RDWR)
        try:
            mapped = mmap.mmap(file, update_info.size)
        finally:
            os.close(file)
        content = torch.frombuffer(mapped, dtype=torch.uint8)
        self.load(self._tensors(content, update_info))
        count = len(update_info.names)
        first = update_info.receipts + self.worker * count * 8
        receipt = content[first : first + count * 8].view(torch.int64)
        receipt.copy_(torch.tensor(self.received[-count:], dtype=torch.int64, device="cpu"))

    @staticmethod
    def _tensors(content, update_info: FileUpdate):
        described = (update_info.names, update_info.dtype_names, update_info.shapes, update_info.starts)
        for name, dtype_name, shape, start in zip(*described, strict=True):
            dtype = getattr(torch, dtype_name)
            end = start + prod(shape) * dtype.itemsize
            yield name, content[start:end].view(dtype).view(shape)


@dataclass(kw_only=True)
class GlooInit(WeightTransferInitInfo):
    master_address: str
    master_port: int
    world_size: int


@dataclass
class GlooUpdate(WeightTransferUpdateInfo):
    names: list[str] = field(default_factory=list)
    dtype_names: list[str] = field(default_factory=list)
    shapes: list[list[int]] = field(default_factory=list)


class GlooReceiver(Receiver):
    """Tensors broadcast by the sender, rank 0, over TCP."""

    init_info_cls, update_info_cls = GlooInit, GlooUpdate

    def init_transfer_engine(self, init_info: GlooInit) -> None:
        self._rank, self._size = 1 + self.worker, init_info.world_size
        self._store = new_store(init_info.master_address, init_info.master_port, master=False)
        self._group = join_group(self._store, init_info.master_address, self._rank, self._size)

    def receive_weights(self, update_info: GlooUpdate) -> None:
        self.load(self._tensors(update_info))
        count = len(update_info.names)
        for rank in range(1, self._size):
            receipt = torch.tensor(self.received[-count:], dtype=torch.int64, device="cpu")
            broadcast(self._joined(), receipt, rank).wait()

    def _joined(self) -> ProcessGroupGloo:
        assert self._group is not None, "weights are sent once the group was joined"
        return self._group

    def _tensors(self, update_info: GlooUpdate):
        described = (update_info.names, update_info.dtype_names, update_info.shapes)
        for name, dtype_name, shape in zip(*described, strict=True):
            tensor = torch.empty(shape, dtype=getattr(torch, dtype_name), device="cpu")
            broadcast(self._joined(), tensor, 0).wait()
            yield name, tensor.to(self.device)

    def shutdown(self) -> None:
        self._group = self._store = None
