"""Weights and optimizer state on disk (safetensors), and export as an ordinary Hugging Face folder."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from headrace.backends.local.masters import MasterWeights
from headrace.backends.local.sharded_files import is_sharded, read_whole
from headrace.errors import BackendError, boundary
from headrace.models.fit import names_that_differ

State = dict[str, dict[str, torch.Tensor]]
"""The tensors of each file of a checkpoint, by its name without `.safetensors`."""

MOMENTS = ("step", "exp_avg", "exp_avg_sq")


def _save_file(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    with boundary(BackendError, f"cannot write {path.name}"):
        on_host = {name: tensor.to("cpu") for name, tensor in tensors.items()}
        # a tensor that is part of a larger one is copied: the format knows no views
        save_file({name: tensor if _is_whole(tensor) else tensor.clone() for name, tensor in on_host.items()}, path)
        _readable(path)


def _is_whole(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes


def _readable(path: Path) -> None:
    """safetensors writes files that only their owner can read; give them the modes of every other file."""
    umask = os.umask(0)
    os.umask(umask)
    path.chmod(0o666 & ~umask)


def save_state(folder: Path, modules: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """`weights.safetensors` (what is trained), `optimizer.safetensors` and its step counts."""
    write_state(folder, collect_state(modules, optimizer))


def collect_state(
    modules: torch.nn.Module, optimizer: torch.optim.Optimizer, masters: MasterWeights | None = None
) -> State:
    """What `save_state` writes: the live tensors, which training changes. Of masters, not what they are rounded to."""
    names = trainable_names(modules, masters)
    moments = {
        f"{names[p]}/{key}": value.detach()
        for p, state in optimizer.state.items()
        for key, value in state.items()
        if isinstance(value, torch.Tensor)
    }
    return {"weights": {name: p.detach() for p, name in names.items()}, "optimizer": moments}


def copy_state(state: State, into: State | None = None) -> State:
    """A copy, in the memory of an earlier one where there is one: fresh memory takes longer than copying."""
    return {name: _copy_tensors(tensors, (into or {}).get(name, {})) for name, tensors in state.items()}


def _copy_tensors(tensors: dict[str, torch.Tensor], into: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: into[name].copy_(tensor) if name in into else _copied(tensor) for name, tensor in tensors.items()}


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """On the host, where it does not take the device's memory."""
    if tensor.device.type == "cpu":
        return tensor.clone(memory_format=torch.contiguous_format)
    return tensor.to("cpu", memory_format=torch.contiguous_format)


def write_state(folder: Path, state: State) -> None:
    """Write a state, or a copy of one."""
    write_tensors(folder, state)
    (folder / "backend.json").write_text(json.dumps({"format": 1, "trained_tensors": len(state["weights"])}))


def write_tensors(folder: Path, state: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
    """A file of safetensors for each name."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, tensors in state.items():
        _save_file(tensors, folder / f"{name}.safetensors")


def load_state(
    folder: Path, modules: torch.nn.Module, optimizer: torch.optim.Optimizer, masters: MasterWeights | None = None
) -> None:
    """The inverse of `save_state`, into the same tensors, so that whoever shares them sees the new values.

    Device and type are those of the run: a state written on one device is read on any other.
    """
    load_tensors(str(folder), modules, optimizer, *read_files(folder), masters)


def read_files(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Weights and optimizer state, complete: as `save_state` wrote them, or as ranks did."""
    if is_sharded(folder):
        found = read_whole(folder)
        return found["weights"], found["optimizer"]
    with boundary(BackendError, f"cannot read the checkpoint {folder}"):
        return load_file(folder / "weights.safetensors"), load_file(folder / "optimizer.safetensors")


def load_tensors(
    source: str,
    modules: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    weights: Mapping[str, torch.Tensor],
    moments: Mapping[str, torch.Tensor],
    masters: MasterWeights | None = None,
) -> None:
    """Put saved weights and moments into a model and its optimizer. `source` names them in errors."""
    names = trainable_names(modules, masters)
    check_state(source, weights, moments, names)
    load_weights(source, modules, weights, masters)
    optimizer.state.clear()
    for parameter, name in names.items():
        state = {
            # a copy: what was read is still in the file, which may be deleted
            key: moments[f"{name}/{key}"].to(
                parameter.device, torch.float32 if key == "step" else parameter.dtype, copy=True
            )
            for key in MOMENTS
            if f"{name}/{key}" in moments
        }
        if state:
            optimizer.state[parameter] = state


@torch.no_grad()
def load_weights(
    source: str, modules: torch.nn.Module, weights: Mapping[str, torch.Tensor], masters: MasterWeights | None = None
) -> None:
    """Put saved weights into what is trained of a model. Nothing is changed if they do not fit."""
    names = trainable_names(modules, masters)
    _require_weights(source, weights, names)
    for parameter, name in names.items():
        parameter.copy_(weights[name])
    if masters is not None:
        masters.write_back()


def check_state(
    source: str,
    weights: Mapping[str, torch.Tensor],
    moments: Mapping[str, torch.Tensor],
    names: Mapping[torch.Tensor, str],
) -> None:
    """Raise BackendError unless saved tensors fit what is trained. Their shapes are enough for it."""
    _require_weights(source, weights, names)
    _require_moments(source, moments, names)


def _require_weights(source: str, weights: Mapping[str, torch.Tensor], names: Mapping[torch.Tensor, str]) -> None:
    if set(weights) != set(names.values()):
        raise BackendError(
            f"{source} is of another model or other adapters: its tensors differ: "
            f"{names_that_differ(weights, names.values())}; use the model and adapters it was made with"
        )
    for parameter, name in names.items():
        if parameter.shape != weights[name].shape:
            raise BackendError(
                f"{source}: {name} has shape {tuple(weights[name].shape)}, the model wants {tuple(parameter.shape)}"
            )


def _require_moments(source: str, moments: Mapping[str, torch.Tensor], names: Mapping[torch.Tensor, str]) -> None:
    """A parameter has all of its optimizer state, or none because it has not been trained yet."""
    shapes = {name: tuple(parameter.shape) for parameter, name in names.items()}
    for key, tensor in moments.items():
        name, _, kind = key.rpartition("/")
        lacks = [one for one in MOMENTS if f"{name}/{one}" not in moments]
        if name not in shapes or kind not in MOMENTS or lacks:
            why = f"{name} lacks {', '.join(lacks)}" if name in shapes and kind in MOMENTS else f"{key} is of no weight"
            raise BackendError(f"{source}: the optimizer's state does not fit the model: {why}; use another checkpoint")
        if kind != "step" and tuple(tensor.shape) != shapes[name]:
            raise BackendError(
                f"{source}: the optimizer's {key} has shape {tuple(tensor.shape)}, the model wants {shapes[name]}"
            )


def collect_teacher(teacher: torch.nn.Module, names: Iterable[str]) -> State:
    """`teacher.safetensors`: of a teacher that was refreshed, the tensors that are trained in the policy."""
    weights = dict(teacher.named_parameters())
    return {"teacher": {name: weights[name].detach() for name in names}}


def load_teacher(folder: Path, names: Collection[str] | None = None) -> dict[str, torch.Tensor] | None:
    """What `collect_teacher` found, for these names; None if the teacher was as the run began."""
    path = folder / "teacher.safetensors"
    if is_sharded(folder):
        weights = read_whole(folder)["teacher"]
    elif path.is_file():
        with boundary(BackendError, f"cannot read the teacher of the checkpoint {folder}"):
            weights = load_file(path)
    else:
        weights = {}
    differ = names_that_differ(weights, names) if weights and names is not None else ""
    if differ:
        raise BackendError(f"{path} is of another model: {differ}; use the run file it was made with")
    return weights or None


def export_folder(folder: Path, hf_model: Any, tokenizer: Any) -> None:
    """A model folder that anything reads; adapters are merged in."""
    if hasattr(hf_model, "peft_config"):
        import copy

        hf_model = copy.deepcopy(hf_model).merge_and_unload()
    # weights may be views of shared buffers, which the format does not know
    state = {name: tensor.detach().clone().contiguous() for name, tensor in hf_model.state_dict().items()}
    if hf_model.config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    hf_model.save_pretrained(folder, state_dict=state)
    tokenizer.save_pretrained(folder)
    for path in folder.glob("*.safetensors"):
        _readable(path)


def trainable_names(modules: torch.nn.Module, masters: MasterWeights | None = None) -> dict[torch.Tensor, str]:
    """Names of what is optimized."""
    trained = ((name, p) for name, p in modules.named_parameters() if p.requires_grad)
    return {p if masters is None else masters.of(p): name for name, p in trained}
