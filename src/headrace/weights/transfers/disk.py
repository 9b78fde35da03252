"""Transport "disk": a model folder with safetensors, which servers load again. The fallback that always works."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from safetensors.torch import save_file

from headrace.weights.base import Endpoint, TensorStream
from headrace.weights.control import control

_CHUNK = 1 << 31
_KEPT = 2


class DiskTransfer:
    """Writes a folder per version into one that the servers can read, too: this machine's, or a shared one."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._own: Path | None = None
        self._endpoints: list[Endpoint] = []
        self._written: list[Path] = []

    def open(self, endpoints: Sequence[Endpoint], rank: int = 0) -> None:
        self._endpoints = list(endpoints)

    def send(self, source: TensorStream, version: int) -> str | None:
        folder = self._root() / f"version_{version:08d}"
        folder.mkdir(parents=True, exist_ok=True)
        for number, chunk in enumerate(source.chunks(_CHUNK)):
            tensors = {name: tensor.detach().contiguous().cpu() for name, tensor in chunk}
            save_file(tensors, folder / f"model-{number:05d}.safetensors", {"format": "pt"})
        for endpoint in self._endpoints:
            control(endpoint).reload(str(folder))
        self._written.append(folder)
        for old in self._written[:-_KEPT]:
            shutil.rmtree(old, ignore_errors=True)
        self._written = self._written[-_KEPT:]
        return None

    def close(self) -> None:
        if self._own is not None:
            shutil.rmtree(self._own, ignore_errors=True)
        self._own = None

    def _root(self) -> Path:
        if self._folder is not None:
            return self._folder
        if self._own is None:
            self._own = Path(tempfile.mkdtemp(prefix="headrace-weights-"))
        return self._own
