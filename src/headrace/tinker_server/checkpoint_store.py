"""Checkpoints on disk: `FOLDER/RUN/{weights,sampler_weights}/NAME`, written beside and renamed, checked when read."""

from __future__ import annotations

import hashlib
import json
import logging
import re
import shutil
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from headrace.backends.local.storage import write_tensors
from headrace.errors import CheckpointError, boundary
from headrace.tinker_server.base import LoraShape
from headrace.tinker_server.options import Refusal
from headrace.utils.durable import put_in_place, sync_tree, write_durably

log = logging.getLogger("headrace")

KINDS = {"weights": "training", "sampler_weights": "sampler"}
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:=+@-]{0,199}")
_FILES = ("weights", "optimizer")
_NOTE = "checkpoint.json"
_LEFTOVER_AGE_S = 3600.0
_LAST_MOMENT = datetime(9999, 12, 31, tzinfo=UTC).timestamp()  # that can be written


@dataclass(frozen=True, slots=True)
class CheckpointPath:
    """`tinker://RUN/KIND/NAME`."""

    run: str
    kind: str
    name: str

    @classmethod
    def parse(cls, text: str) -> CheckpointPath:
        parts = text.removeprefix("tinker://").split("/")
        if not text.startswith("tinker://") or len(parts) != 3 or parts[1] not in KINDS:
            raise Refusal(f'"{text[:200]}" is no path of a checkpoint; it must be tinker://RUN/{"|".join(KINDS)}/NAME')
        check_name(parts[0], "the run")
        check_name(parts[2], "the checkpoint")
        return cls(*parts)

    def __str__(self) -> str:
        return f"tinker://{self.run}/{self.kind}/{self.name}"

    @property
    def id(self) -> str:
        """What the API calls the checkpoint within its run."""
        return f"{self.kind}/{self.name}"


@dataclass(frozen=True, slots=True)
class Note:
    """What is known of a checkpoint without reading its tensors."""

    path: CheckpointPath
    base_model: str
    shape: LoraShape
    created: float
    expires: float | None
    size_bytes: int
    digests: Mapping[str, str]
    user_metadata: Mapping[str, str] | None
    run_metadata: Mapping[str, str] | None

    def as_api(self) -> dict[str, Any]:
        """In the form of the SDK's Checkpoint."""
        expires = None if self.expires is None else moment(self.expires)
        return {
            "checkpoint_id": self.path.id,
            "checkpoint_type": KINDS[self.path.kind],
            "time": moment(self.created),
            "tinker_path": str(self.path),
            "size_bytes": self.size_bytes,
            "public": False,
            "user_metadata": self.user_metadata,
            "expires_at": expires,
        }


def moment(seconds: float) -> str:
    """A time as the SDK reads it."""
    return datetime.fromtimestamp(min(seconds, _LAST_MOMENT), UTC).isoformat()


def check_name(name: str, what: str) -> str:
    """Refuse what could leave the folder or cannot be part of a path."""
    if not _NAME.fullmatch(name):
        raise Refusal(f'{what} cannot be called "{name[:80]}"; use letters, digits and _ . : = + @ - in its name')
    return name


class Store:
    """The folder of a server."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with boundary(CheckpointError, f"cannot use {folder} for checkpoints; give another --dir", OSError):
            folder.mkdir(parents=True, exist_ok=True)
            for leftover in folder.glob(".writing-*"):
                if time.time() - leftover.stat().st_mtime > _LEFTOVER_AGE_S:  # a young one may be another server's
                    shutil.rmtree(leftover, ignore_errors=True)
            for replaced in folder.glob("*/*/.*.replaced"):
                target = replaced.with_name(replaced.name[1:].removesuffix(".replaced"))
                if target.exists():
                    shutil.rmtree(replaced, ignore_errors=True)
                else:  # killed between two renames
                    replaced.rename(target)

    def write(
        self,
        path: CheckpointPath,
        base_model: str,
        shape: LoraShape,
        tensors: Mapping[str, Mapping[str, Tensor]],
        *,
        overwrite: bool = False,
        ttl_s: float | None = None,
        user_metadata: Mapping[str, str] | None = None,
        run_metadata: Mapping[str, str] | None = None,
    ) -> None:
        """Write the tensors of each file. After a kill the checkpoint is complete or not there at all."""
        target = self._folder_of(path)
        if target.exists() and not overwrite:
            raise Refusal(f"{path} exists; save under another name, or with overwrite=True where the call takes it")
        beside = self._folder / f".writing-{uuid.uuid4().hex}"
        with boundary(CheckpointError, f"cannot write {path}; is there room on the disk?"):
            try:
                write_tensors(beside, tensors)
                digests = {name: _digest(beside / f"{name}.safetensors") for name in tensors}
                note = {
                    "format": 1,
                    "base_model": base_model,
                    "shape": asdict(shape),
                    "created": time.time(),
                    "expires": None if ttl_s is None else time.time() + ttl_s,
                    "digests": digests,
                    "user_metadata": user_metadata,
                    "run_metadata": run_metadata,
                }
                (beside / _NOTE).write_text(json.dumps(note), encoding="utf-8")
                sync_tree(beside)
                target.parent.mkdir(parents=True, exist_ok=True)
                put_in_place(beside, target)
            finally:
                shutil.rmtree(beside, ignore_errors=True)

    def note(self, path: CheckpointPath) -> Note:
        """What is known of a checkpoint; refused if there is none."""
        found = self._read_note(path)
        if found is None:
            raise Refusal(f"there is no checkpoint {path}; list_checkpoints lists those that exist", status=404)
        return found

    def read(self, path: CheckpointPath, optimizer: bool = False) -> dict[str, dict[str, Tensor]]:
        """The tensors of a checkpoint, checked against its digests."""
        note = self.note(path)
        if optimizer and "optimizer" not in note.digests:
            raise Refusal(f"{path} holds no optimizer state; load it without, or use one written by save_state")
        found: dict[str, dict[str, Tensor]] = {}
        for name in _FILES if optimizer else _FILES[:1]:
            file = self._folder_of(path) / f"{name}.safetensors"
            with boundary(CheckpointError, f"cannot read {path}"):
                if _digest(file) != note.digests[name]:
                    raise CheckpointError(f"{path} is damaged: {file.name} is not what was written; use another one")
                found[name] = load_file(file)
        return found

    def delete(self, path: CheckpointPath) -> None:
        """Forget a checkpoint, be it damaged."""
        with suppress(CheckpointError):
            self.note(path)
        with boundary(CheckpointError, f"cannot delete {path}"):
            shutil.rmtree(self._folder_of(path))

    def expire(self, path: CheckpointPath, ttl_s: float | None) -> None:
        """Set or remove the time at which a checkpoint goes."""
        self.note(path)
        file = self._folder_of(path) / _NOTE
        held = json.loads(file.read_text(encoding="utf-8"))
        held["expires"] = None if ttl_s is None else time.time() + ttl_s
        write_durably(file, json.dumps(held))

    def notes(self, run: str | None = None) -> list[Note]:
        """All checkpoints that can be read, or those of a run, oldest first; what has expired is removed."""
        found = []
        for path in self._paths(run):
            try:
                note = self._read_note(path)
            except CheckpointError as error:  # one that is damaged does not hide the others
                log.warning("%s", error)
                continue
            if note is not None:
                found.append(note)
        return sorted(found, key=lambda note: note.created)

    def _paths(self, run: str | None) -> Iterator[CheckpointPath]:
        for folder in sorted(self._folder.glob(f"{run or '*'}/*/*/{_NOTE}")):
            held = folder.parent.relative_to(self._folder).parts
            if held[1] in KINDS and not any(part.startswith(".") for part in held):
                yield CheckpointPath(*held)

    def _folder_of(self, path: CheckpointPath) -> Path:
        return self._folder / path.run / path.kind / path.name

    def _read_note(self, path: CheckpointPath) -> Note | None:
        folder = self._folder_of(path)
        try:
            held = json.loads((folder / _NOTE).read_text(encoding="utf-8"))
            note = Note(
                path=path,
                base_model=held["base_model"],
                shape=LoraShape(**held["shape"]),
                created=held["created"],
                expires=held["expires"],
                size_bytes=sum(file.stat().st_size for file in folder.iterdir()),
                digests=held["digests"],
                user_metadata=held["user_metadata"],
                run_metadata=held["run_metadata"],
            )
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path} is damaged: {type(error).__name__}: {error}; delete it") from None
        if note.expires is not None and note.expires < time.time():
            shutil.rmtree(folder, ignore_errors=True)
            return None
        return note


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "blake2b").hexdigest()
