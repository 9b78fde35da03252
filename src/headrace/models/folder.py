"""Is a model folder complete? Checked from sizes and headers alone, before anything heavy is imported or loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NoReturn

from headrace.errors import ModelError
from headrace.registry import nearest

WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"
_LARGEST_HEADER = 100_000_000  # the safetensors format's own limit, in bytes
_FLOATING = ("F64", "F32", "F16", "BF16")
_VOCABULARIES = ("tokenizer.model", "spiece.model", "vocab.txt", "vocab.json", "tekken.json")


def check_model_folder(path: str | Path, remedy: str = "copy or download the model again") -> None:
    """Raise `ModelError` if configuration, weights or tokenizer are missing or damaged; `remedy` ends the sentence."""
    folder = Path(path)
    if not folder.is_dir():
        _fail(folder, "is a file, not a folder" if folder.exists() else "does not exist", remedy)
    _check_config(folder, remedy)
    quantized = "quantization_config" in _read_json(folder / "config.json", remedy)
    headers = {path.name: _read_header(path, remedy) for path in _weight_files(folder, remedy)}
    for name, header in headers.items() if not quantized else ():
        _check_types(folder / name, header)
    if WEIGHTS not in headers:
        _check_index(folder, headers, remedy)
    _check_tokenizer(folder, remedy)


def _weight_files(folder: Path, remedy: str) -> list[Path]:
    """The safetensors files of a folder: the single one, or every shard that the index names."""
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if (folder / WEIGHTS_INDEX).is_file():
        return _shards(folder, remedy)
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt")):
        _fail(folder, f"has weights in pickle format but no {WEIGHTS}", "save it again as safetensors")
    return _fail(folder, f"has neither {WEIGHTS} nor {WEIGHTS_INDEX}", remedy)


def _read_header(path: Path, remedy: str) -> dict[str, Any]:
    """The JSON header of a safetensors file, once the file is as long as the header says."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        if start == b"version ":
            _fail(path, "is a Git LFS pointer, not the weights", "run `git lfs pull` in its folder")
        length = int.from_bytes(start, "little")
        if size < 8 or length > min(size - 8, _LARGEST_HEADER):
            _fail(path, f"is truncated or no safetensors file ({size} bytes)", remedy)
        text = file.read(length)
    try:
        header = json.loads(text, object_pairs_hook=_once)
        ends = [tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"]
    except _TwiceError as twice:
        _fail(path, f'has "{twice}" twice', remedy)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        _fail(path, "has a damaged safetensors header", remedy)
    expected = 8 + length + max(ends, default=0)
    if size != expected:
        _fail(path, f"has {size} bytes where its header promises {expected}", remedy)
    return header


def _check_types(path: Path, header: dict[str, Any]) -> None:
    """Weights are floating-point numbers. Whole ones stand for others by a scale, which only a quantised model has."""
    for name, tensor in header.items():
        kind, shape = tensor.get("dtype"), tensor.get("shape") or ()
        trained = name.endswith(".weight") or (name.endswith(".bias") and len(shape) == 1)  # not a mask called bias
        if trained and kind not in _FLOATING:
            _fail(path, f'has "{name}" in {kind}, which are not weights', "save the model again in float32 or bfloat16")


class _TwiceError(Exception):
    """A header names a tensor twice; the text is its name."""


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise _TwiceError(next(name for name in names if names.count(name) > 1))
    return found


def _check_index(folder: Path, headers: dict[str, dict[str, Any]], remedy: str) -> None:
    """Whether every tensor is in the shard where the index has it, and in no other."""
    weight_map = _read_json(folder / WEIGHTS_INDEX, remedy)["weight_map"]
    where: dict[str, str] = {}
    for shard, header in headers.items():
        for name in header.keys() - {"__metadata__"}:
            if name in where:
                _fail(folder, f'has "{name}" twice, in {where[name]} and {shard}', remedy)
            where[name] = shard
    for name, shard in weight_map.items():
        if where.get(name) != str(shard):
            at = f"it is in {where[name]}" if name in where else f"no weight file has it{nearest(name, where)}"
            _fail(folder / WEIGHTS_INDEX, f'names {shard} for "{name}", and {at}', remedy)


def _shards(folder: Path, remedy: str) -> list[Path]:
    index = _read_json(folder / WEIGHTS_INDEX, remedy)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        _fail(folder / WEIGHTS_INDEX, 'has no "weight_map"', remedy)
    shards = [folder / str(name) for name in sorted(set(weight_map.values()))]
    missing = [shard.name for shard in shards if not shard.is_file()]
    if missing:
        _fail(folder, f"lacks {len(missing)} of {len(shards)} weight files: {', '.join(missing[:3])}", remedy)
    return shards


def _check_config(folder: Path, remedy: str) -> None:
    if (folder / "adapter_config.json").is_file():  # also beside a model: the base that it names would be loaded
        alone = not (folder / "config.json").is_file()
        _fail(
            folder,
            "holds an adapter, not a whole model" if alone else "holds an adapter beside a model",
            "merge it into its base model first" + ("" if alone else ", or remove adapter_config.json"),
        )
    config = _read_json(folder / "config.json", remedy)
    if not (config.get("model_type") or config.get("architectures")):
        _fail(folder / "config.json", 'names neither "model_type" nor "architectures"', remedy)


def _check_tokenizer(folder: Path, remedy: str) -> None:
    if (folder / "tokenizer.json").is_file():
        _read_json(folder / "tokenizer.json", remedy)
        return
    has_vocabulary = any((folder / name).is_file() for name in _VOCABULARIES)
    if not (has_vocabulary and (folder / "tokenizer_config.json").is_file()):
        _fail(folder, "has no tokenizer (tokenizer.json, or tokenizer_config.json with a vocabulary)", remedy)


def _read_json(path: Path, remedy: str) -> dict[str, Any]:
    if not path.is_file():
        _fail(path.parent, f"has no {path.name}", remedy)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        _fail(path, f"is not valid JSON ({error})", remedy)
    if not isinstance(content, dict):
        _fail(path, f"holds a JSON {type(content).__name__} where an object is expected", remedy)
    return content


def _fail(where: Path, problem: str, remedy: str) -> NoReturn:
    raise ModelError(f"model {where} {problem}; {remedy}")
