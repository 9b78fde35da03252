"""Weights that are not those of the architecture are refused, by name: nothing is trained from random numbers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from headrace.backends.local.storage import load_state, load_teacher, save_state
from headrace.config import ModelSection
from headrace.errors import BackendError, ModelError
from headrace.models.catalog import model_folder
from headrace.models.folder import WEIGHTS, WEIGHTS_INDEX, check_model_folder
from headrace.models.load import load_model

UP, DOWN = "model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.down_proj.weight"
RENAMED = "model.layers.0.mlp.up.weight"
Change = Callable[[dict[str, Tensor]], Any]


def changed(folder: Path, change: Change) -> Path:
    """The bundled model with other tensors."""
    shutil.copytree(model_folder("bundled"), folder)
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    return folder


def sharded(folder: Path, change: Callable[[dict[str, dict[str, Tensor]], dict[str, str]], Any]) -> Path:
    """The bundled model in two files; `change` gets the files' tensors and the index."""
    tensors = load_file(changed(folder, lambda _: None) / WEIGHTS)
    (folder / WEIGHTS).unlink()
    names = sorted(tensors)
    files = {f"model-{n}.safetensors": {name: tensors[name] for name in names[n::2]} for n in (0, 1)}
    index = {name: file for file, held in files.items() for name in held}
    change(files, index)
    for file, held in files.items():
        save_file(held, folder / file, metadata={"format": "pt"})
    (folder / WEIGHTS_INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return folder


MISFITS: dict[str, tuple[Change, list[str]]] = {
    "missing": (lambda t: t.pop(UP), [f"1 missing, and would be random numbers: {UP}"]),
    "renamed": (
        lambda t: t.update({RENAMED: t.pop(UP)}),
        [f'{UP} (near "{RENAMED}")', f'1 not of this architecture: {RENAMED} (near "{UP}")'],
    ),
    "extra": (lambda t: t.update({"score.weight": torch.ones(2, 2)}), ["1 not of this architecture: score.weight"]),
    "another shape": (lambda t: t.update({UP: t[UP][:-1].clone()}), [f"1 of another shape: {UP} has [", "is wanted"]),
    "turned": (lambda t: t.update({UP: t[DOWN].clone()}), [f"1 of another shape: {UP}"]),
    "all but one": (lambda t: [t.pop(key) for key in sorted(t)[1:]], ["missing", "and 3"]),
    "whole numbers": (lambda t: t.update({UP: (t[UP] * 100).to(torch.int8)}), [f'has "{UP}" in I8', "float32 or bfl"]),
    "eight bits": (lambda t: t.update({UP: t[UP].to(torch.float8_e4m3fn)}), [f'has "{UP}" in F8_E4M3']),
    "no number": (lambda t: t[UP][3].fill_(float("nan")), [f"1 not finite (NaN or infinite): {UP}"]),
    "infinite": (lambda t: t[DOWN][0, 1].fill_(-float("inf")), [f"1 not finite (NaN or infinite): {DOWN}"]),
    "no embedding": (lambda t: t.pop("model.embed_tokens.weight"), ["model.embed_tokens.weight"]),
    "tied and not": (
        lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1}), ["tie_word_embeddings"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("fast_path", [True, False])
@pytest.mark.parametrize("kind", MISFITS)
def test_tensors_that_do_not_fit_are_refused_and_named(tmp_path: Path, kind: str, fast_path: bool) -> None:
    change, said = MISFITS[kind]
    folder = changed(tmp_path / "model", change)
    with pytest.raises(ModelError) as refused:
        load_model(ModelSection(name=str(folder), fast_path=fast_path))
    assert [text for text in said if text not in str(refused.value)] == []


FINE: dict[str, Change] = {
    "as it is": lambda t: None,
    "old rotary tables": lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}),
    "an old mask of whole numbers": lambda t: t.update(
        {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4, dtype=torch.int64)}
    ),
    "a tied embedding that is written twice": lambda t: t.update(
        {"lm_head.weight": t["model.embed_tokens.weight"].clone()}
    ),
}


@pytest.mark.parametrize("kind", FINE)
def test_what_is_harmless_is_loaded(tmp_path: Path, kind: str) -> None:
    loaded = load_model(ModelSection(name=str(changed(tmp_path / "model", FINE[kind]))))
    wanted = load_model(ModelSection(name="bundled"))
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), wanted.parameters(), strict=True))


def test_adapters_go_onto_a_model_that_fits(tmp_path: Path) -> None:
    folder = changed(tmp_path / "model", lambda t: t.pop(UP))
    with pytest.raises(ModelError, match="1 missing"):
        load_model(ModelSection.model_validate({"name": str(folder), "lora": {"rank": 2}}))


INDEX: dict[str, tuple[Callable[..., Any], str]] = {
    "a shard that is not there": (lambda files, index: index.update({UP: "model-9.safetensors"}), "model-9.safe"),
    "a tensor that no shard has": (lambda files, index: index.update({f"{UP}s": "model-0.safetensors"}), "no weight"),
    "a tensor that is in another shard": (
        lambda files, index: index.update({UP: next(file for file in files if file != index[UP])}), "it is in model-",
    ),
    "a tensor in two shards": (
        lambda files, index: [held.update({UP: torch.ones(2)}) for held in files.values()], f'has "{UP}" twice',
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", INDEX)
def test_an_index_that_is_wrong_is_refused(tmp_path: Path, kind: str) -> None:
    change, said = INDEX[kind]
    with pytest.raises(ModelError) as refused:
        check_model_folder(sharded(tmp_path / "model", change))
    assert said in str(refused.value)


def test_shards_are_loaded_and_what_they_lack_is_named(tmp_path: Path) -> None:
    whole = load_model(ModelSection(name=str(sharded(tmp_path / "whole", lambda files, index: None))))
    assert torch.equal(whole.model.norm.weight, load_model(ModelSection(name="bundled")).model.norm.weight)

    def lose(files: dict[str, dict[str, Tensor]], index: dict[str, str]) -> None:
        del files[index.pop(UP)][UP]

    with pytest.raises(ModelError, match=f"1 missing, and would be random numbers: {UP}"):
        load_model(ModelSection(name=str(sharded(tmp_path / "less", lose))))


def test_a_header_that_names_a_tensor_twice_is_refused(tmp_path: Path) -> None:
    folder = changed(tmp_path / "model", lambda t: None)
    entry = '"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}'
    header = f"{{{entry}, {entry}}}".encode()
    (folder / WEIGHTS).write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 4)
    with pytest.raises(ModelError, match='has "a" twice'):
        check_model_folder(folder)


def test_an_adapter_beside_a_model_is_refused(tmp_path: Path) -> None:
    folder = changed(tmp_path / "model", lambda t: None)
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match="beside a model; merge it into its base model first, or remove"):
        check_model_folder(folder)


# ---- checkpoints ----------------------------------------------------------------------------------------------------


def saved(folder: Path, file: str, change: Change) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    modules = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
    optimizer = torch.optim.AdamW(modules.parameters())
    modules(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    save_state(folder, modules, optimizer)
    tensors = load_file(folder / f"{file}.safetensors")
    change(tensors)
    save_file(tensors, folder / f"{file}.safetensors")
    return modules, optimizer


CHECKPOINTS: dict[str, tuple[str, Change, str]] = {
    "missing": ("weights", lambda t: t.pop("0.bias"), "1 missing: 0.bias"),
    "renamed": ("weights", lambda t: t.update({"0.bia": t.pop("0.bias")}), '1 too many: 0.bia (near "0.bias")'),
    "another shape": ("weights", lambda t: t.update({"0.bias": torch.ones(4)}), "0.bias has shape (4,)"),
    "no second moment": ("optimizer", lambda t: t.pop("0.bias/exp_avg_sq"), "0.bias lacks exp_avg_sq"),
    "a moment of nothing": ("optimizer", lambda t: t.update({"2.bias/step": torch.ones(())}), "is of no weight"),
    "a moment's shape": ("optimizer", lambda t: t.update({"0.bias/exp_avg": torch.ones(1)}), "has shape (1,)"),
}


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_a_checkpoint_that_does_not_fit_is_refused(tmp_path: Path, kind: str) -> None:
    file, change, said = CHECKPOINTS[kind]
    modules, optimizer = saved(tmp_path, file, change)
    with pytest.raises(BackendError) as refused:
        load_state(tmp_path, modules, optimizer)
    assert said in str(refused.value)


def test_a_checkpoint_that_fits_is_loaded_also_of_weights_that_were_never_trained(tmp_path: Path) -> None:
    def untrained(tensors: dict[str, Tensor]) -> None:
        for key in [key for key in tensors if key.startswith("1.bias/")]:
            del tensors[key]

    modules, optimizer = saved(tmp_path, "optimizer", untrained)
    load_state(tmp_path, modules, optimizer)
    assert len(optimizer.state) == 3


def test_a_teacher_that_lacks_a_tensor_is_refused(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "teacher.safetensors")
    with pytest.raises(BackendError, match="1 missing: b"):
        load_teacher(tmp_path, ["a", "b"])
