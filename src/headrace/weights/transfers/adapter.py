"""Transport "adapter": only LoRA adapters travel, in a folder per version, which servers load under a name of its own.

A name is never used again: servers keep prefix caches by name.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from headrace.errors import WeightSyncError
from headrace.weights.base import Endpoint, TensorStream
from headrace.weights.control import call
from headrace.weights.names import adapter_name

_KEPT = 4
_ALL = 1 << 62


class AdapterTransfer:
    """Writes adapters as PEFT does. `config` is what its adapter_config.json says."""

    def __init__(self, config: Mapping[str, Any], folder: Path | None = None) -> None:
        self._config = dict(config)
        self._folder = folder
        self._endpoints: list[Endpoint] = []
        self._written: list[Path] = []

    def open(self, endpoints: Sequence[Endpoint], rank: int = 0) -> None:
        self._endpoints = list(endpoints)

    def send(self, source: TensorStream, version: int) -> str | None:
        self._folder = self._folder or Path(tempfile.mkdtemp(prefix="headrace-adapters-"))
        target = self._folder / adapter_name(version)
        target.mkdir(parents=True, exist_ok=True)
        tensors = {
            name.replace(".default.weight", ".weight"): tensor.detach().contiguous().cpu()
            for chunk in source.chunks(_ALL)
            for name, tensor in chunk
        }
        save_file(tensors, target / "adapter_model.safetensors")
        (target / "adapter_config.json").write_text(json.dumps(self._config))
        for endpoint in self._endpoints:
            _load(endpoint, adapter_name(version), target)
        self._forget_old(target)
        return None

    def close(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _forget_old(self, newest: Path) -> None:
        self._written = [*(path for path in self._written if path != newest), newest]
        for old in self._written[:-_KEPT]:
            shutil.rmtree(old, ignore_errors=True)
        self._written = self._written[-_KEPT:]


def _load(endpoint: Endpoint, name: str, folder: Path) -> None:
    asked = {"lora_name": name, "lora_path": str(folder)}
    try:
        call(endpoint, "/v1/load_lora_adapter", asked)
    except WeightSyncError as error:
        if "already" not in str(error):
            raise
        # of an attempt that was given up: nobody has used it
        call(endpoint, "/v1/unload_lora_adapter", {"lora_name": name})
        call(endpoint, "/v1/load_lora_adapter", asked)
