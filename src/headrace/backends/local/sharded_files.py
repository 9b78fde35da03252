"""Checkpoints in the format of torch.distributed.checkpoint, which ranks write: tensors in shards, in flat names."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from headrace.errors import BackendError, boundary

_INDEX = ".metadata"


@contextmanager
def explained(doing: str) -> Iterator[None]:
    """What goes wrong within as BackendError, on all ranks. What torch.distributed.checkpoint raises is no Exception:
    it would end a rank's process, and pass whoever handles errors."""
    try:
        with boundary(BackendError, doing), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of one rank, it warns that it is alone
            yield
    except CheckpointException as error:
        first = min(error.failures, default=None)
        cause = error if first is None else error.failures[first][0]
        raise BackendError(f"{doing}: {type(cause).__name__}: {cause}") from error


def is_sharded(folder: Path) -> bool:
    """Whether ranks wrote this checkpoint."""
    return (folder / _INDEX).is_file()


def flattened(state: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """`weights/NAME`, `optimizer/NAME/exp_avg`, `teacher/NAME`."""
    return {f"{kind}/{name}": tensor for kind, tensors in state.items() for name, tensor in tensors.items()}


def read_outlines(folder: Path) -> dict[str, dict[str, Tensor]]:
    """By kind and name, tensors of the right shape and dtype without content."""
    with boundary(BackendError, f"cannot read the checkpoint {folder}"):
        entries = FileSystemReader(str(folder)).read_metadata().state_dict_metadata
    found: dict[str, dict[str, Tensor]] = {"weights": {}, "optimizer": {}, "teacher": {}}
    for key, entry in entries.items():
        kind, _, name = key.partition("/")
        if isinstance(entry, TensorStorageMetadata) and kind in found:
            found[kind][name] = torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
    return found


def read_into(folder: Path, state: dict[str, Tensor], alone: bool = True) -> None:
    """Fill tensors, sharded or not, by their flat names. Collective unless `alone`."""
    with explained(f"cannot read the checkpoint {folder}"):
        dcp.load(state, checkpoint_id=str(folder), no_dist=alone)


def read_whole(folder: Path) -> dict[str, dict[str, Tensor]]:
    """By kind and name, complete tensors."""
    found = {
        kind: {name: torch.empty_like(tensor, device="cpu") for name, tensor in tensors.items()}
        for kind, tensors in read_outlines(folder).items()
    }
    read_into(folder, flattened(found))
    return found
