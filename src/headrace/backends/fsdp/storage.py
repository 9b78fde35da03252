"""Checkpoints of ranks: torch.distributed.checkpoint, a file per rank. Any number of ranks reads them, and the local
backend; ranks read the local backend's, too."""

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from headrace.backends.local.sharded_files import explained, flattened, is_sharded, read_into, read_outlines
from headrace.backends.local.storage import (
    MOMENTS,
    State,
    check_state,
    copy_state,
    export_folder,
    load_teacher,
    read_files,
    trainable_names,
)
from headrace.config import ModelSection
from headrace.models.load import load_model


def save_shards(folder: Path, state: State, size: int, group: Any = None) -> None:
    """Every rank writes its shards. They agree on who writes what within `group`; by default, within that of all."""
    with explained(f"cannot write the checkpoint {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        dcp.save(flattened(state), checkpoint_id=str(folder), process_group=group, no_dist=size == 1)
        if size == 1 or dist.get_rank() == 0:
            facts = {"format": 2, "trained_tensors": len(state["weights"]), "ranks": size}
            (folder / "backend.json").write_text(json.dumps(facts))


class Snapshots:
    """A rank's state as it was, in host memory, and the thread that writes it while the rank trains on."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._copied: State | None = None  # whose memory the next one uses
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="headrace-shards")
        self._writing: Future[None] | None = None
        # a group of its own: in that of training, messages of the two would mix
        self._group = dist.new_group(backend="gloo") if size > 1 else None

    def take(self, state: State) -> None:
        """Copy it. What was written of the one before is complete."""
        self._copied = copy_state(state, self._copied if _same_tensors(state, self._copied) else None)

    def write(self, folder: Path) -> None:
        """Begin to write."""
        assert self._copied is not None, "take comes first"
        self._writing = self._thread.submit(save_shards, folder, self._copied, self._size, self._group)

    def written(self) -> bool | None:
        """Whether it is complete; None of a rank that was started since, and knows of none. Raises what went wrong."""
        if self._writing is None:
            return None
        if self._writing.done():
            self._writing.result()
        return self._writing.done()


def _same_tensors(state: State, other: State | None) -> bool:
    return other is not None and all(state[kind].keys() == other.get(kind, {}).keys() for kind in state)


def load_shards(
    folder: Path, modules: torch.nn.Module, optimizer: torch.optim.Optimizer, size: int
) -> dict[str, Tensor] | None:
    """Read what ranks or the local backend saved, into the same tensors; the weights of a teacher, if there are any."""
    names = trainable_names(modules)
    if not is_sharded(folder):
        return _load_whole(folder, names, optimizer)
    outlines = read_outlines(folder)
    check_state(str(folder), outlines["weights"], outlines["optimizer"], names)
    moments = {
        parameter: {
            key: torch.zeros((), device=parameter.device) if key == "step" else torch.zeros_like(parameter.detach())
            for key in MOMENTS
        }
        for parameter, name in names.items()
        if f"{name}/step" in outlines["optimizer"]
    }
    teacher = {name: torch.empty_like(tensor, device="cpu") for name, tensor in outlines["teacher"].items()}
    state: State = {
        "weights": {name: parameter.detach() for parameter, name in names.items()},
        "optimizer": {f"{names[p]}/{key}": tensor for p, held in moments.items() for key, tensor in held.items()},
        "teacher": teacher,
    }
    read_into(folder, flattened(state), alone=size == 1)
    optimizer.state.clear()
    optimizer.state.update(moments)
    return teacher or None


@torch.no_grad()
def export_gathered(
    folder: Path, weights: Mapping[str, Tensor], section: ModelSection, tokenizer: Any, rank: int
) -> None:
    """On rank 0: the model as it is on disk, with the trained weights, as an ordinary model folder."""
    if rank:
        return
    whole = load_model(section)
    for name, parameter in whole.named_parameters():
        if name in weights:
            parameter.copy_(weights[name].cpu())
    export_folder(folder, whole, tokenizer)


@torch.no_grad()
def _load_whole(folder: Path, names: dict[Tensor, str], optimizer: torch.optim.Optimizer) -> dict[str, Tensor] | None:
    """The local backend's files: every rank reads all of them, and keeps its shards."""
    weights, moments = read_files(folder)
    check_state(str(folder), weights, moments, names)
    optimizer.state.clear()
    for parameter, name in names.items():
        parameter.copy_(_like(weights[name], parameter))
        held = {key: moments[f"{name}/{key}"] for key in MOMENTS if f"{name}/{key}" in moments}
        if held:
            optimizer.state[parameter] = {
                key: tensor.to(parameter.device, copy=True) if key == "step" else _like(tensor, parameter).clone()
                for key, tensor in held.items()
            }
    return load_teacher(folder)


def _like(tensor: Tensor, parameter: Tensor) -> Tensor:
    tensor = tensor.to(device=parameter.device, dtype=parameter.dtype)
    if not isinstance(parameter, DTensor):
        return tensor
    return distribute_tensor(tensor, parameter.device_mesh, parameter.placements, src_data_rank=None)
