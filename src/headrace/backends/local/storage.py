"""Weights and optimizer state on disk (safetensors), and export as an ordinary Hugging Face folder."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from headrace.errors import BackendError, boundary


def _save_file(tensors: dict[str, torch.Tensor], path: Path) -> None:
    save_file(tensors, path)
    _readable(path)


def _readable(path: Path) -> None:
    """safetensors writes files that only their owner can read; give them the modes of every other file."""
    umask = os.umask(0)
    os.umask(umask)
    path.chmod(0o666 & ~umask)


def save_state(folder: Path, modules: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """`weights.safetensors` (what is trained), `optimizer.safetensors` and its step counts."""
    folder.mkdir(parents=True, exist_ok=True)
    names = _trainable_names(modules)
    _save_file({n: p.detach().clone() for p, n in names.items()}, folder / "weights.safetensors")
    moments = {
        f"{names[p]}/{key}": value.detach().clone()
        for p, state in optimizer.state.items()
        for key, value in state.items()
        if isinstance(value, torch.Tensor)
    }
    _save_file(moments, folder / "optimizer.safetensors")
    (folder / "backend.json").write_text(json.dumps({"format": 1, "trained_tensors": len(names)}))


def load_state(folder: Path, modules: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """The inverse of `save_state`, into the same tensors, so that whoever shares them sees the new values."""
    with boundary(BackendError, f"cannot read the checkpoint {folder}"):
        weights = load_file(folder / "weights.safetensors")
        moments = load_file(folder / "optimizer.safetensors")
    names = _trainable_names(modules)
    if set(weights) != set(names.values()):
        odd = sorted(set(weights) ^ set(names.values()))
        raise BackendError(
            f"{folder} is of another model or other adapters: {len(odd)} tensors differ, such as {odd[0]}; "
            f"use the run file it was made with"
        )
    with torch.no_grad():
        for parameter, name in names.items():
            if parameter.shape != weights[name].shape:
                raise BackendError(
                    f"{folder}: {name} has shape {tuple(weights[name].shape)}, the model wants {tuple(parameter.shape)}"
                )
            parameter.copy_(weights[name])
    optimizer.state.clear()
    for parameter, name in names.items():
        state = {
            key: moments[f"{name}/{key}"] for key in ("step", "exp_avg", "exp_avg_sq") if f"{name}/{key}" in moments
        }
        if state:
            optimizer.state[parameter] = state


def save_teacher(folder: Path, teacher: torch.nn.Module, names: Iterable[str]) -> None:
    """`teacher.safetensors`: of a teacher that was refreshed, the tensors that are trained in the policy."""
    weights = dict(teacher.named_parameters())
    _save_file({name: weights[name].detach().clone() for name in names}, folder / "teacher.safetensors")


def load_teacher(folder: Path) -> dict[str, torch.Tensor] | None:
    """What `save_teacher` wrote; None if the teacher was as the run began."""
    path = folder / "teacher.safetensors"
    if not path.is_file():
        return None
    with boundary(BackendError, f"cannot read the teacher of the checkpoint {folder}"):
        return load_file(path)


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


def _trainable_names(modules: torch.nn.Module) -> dict[torch.Tensor, str]:
    return {p: name for name, p in modules.named_parameters() if p.requires_grad}
