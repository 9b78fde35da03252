"""The manifest of a checkpoint: what is in it, with a checksum of every file. Written last, so it means "whole"."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from headrace.utils.durable import sync, sync_tree

NAME = "checkpoint.json"
_FORMAT = 1


def seal(folder: Path, **facts: Any) -> None:
    """Sync every file of a folder and write its manifest. From now on `find_damage` notices any change."""
    sync_tree(folder)
    files = {name: {"bytes": (folder / name).stat().st_size, "sha256": _digest(folder / name)} for name in _in(folder)}
    content = {"format": _FORMAT, **facts, "files": files}
    sealed = {"content": content, "sha256": _digest_of(content)}
    (folder / NAME).write_text(json.dumps(sealed, separators=(",", ":")) + "\n")
    sync(folder / NAME)
    sync(folder)


def find_damage(folder: Path) -> str | None:
    """What is wrong with a sealed folder, naming the file; None if it is as it was sealed."""
    try:
        sealed = json.loads((folder / NAME).read_bytes())
        content, digest = sealed["content"], sealed["sha256"]
        if _digest_of(content) != digest:
            return f"{NAME} is not as it was written"
        if content["format"] != _FORMAT:
            return f"{NAME} has format {content['format']}, and this Headrace reads {_FORMAT}"
        files: dict[str, dict[str, Any]] = content["files"]
    except FileNotFoundError:
        return f"it has no {NAME}, so it was not written to its end"
    except (OSError, ValueError, TypeError, KeyError) as error:
        return f"{NAME} cannot be read ({type(error).__name__}: {error})"
    return next((found for name, file in files.items() if (found := _damage(folder / name, name, file))), None)


def _damage(path: Path, name: str, expected: dict[str, Any]) -> str | None:
    try:
        size = path.stat().st_size
        if size != expected["bytes"]:
            return f"{name} has {size} bytes, and {expected['bytes']} were written"
        if _digest(path) != expected["sha256"]:
            return f"{name} is not as it was written (its checksum differs)"
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read ({error.strerror})"
    return None


def _in(folder: Path) -> list[str]:
    paths = (Path(inner, name) for inner, _, names in os.walk(folder) for name in names)
    return sorted(path.relative_to(folder).as_posix() for path in paths)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest_of(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
