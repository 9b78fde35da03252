"""Durable file writes: a kill or a power cut leaves the old or the new content, never a mixture."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path


def sync(path: Path) -> None:
    """fsync a file, or a folder's entries."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL or not path.is_dir():  # some file systems cannot sync a folder
            raise
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """`sync` for everything below a folder, and the folder itself."""
    for inner, _, files in os.walk(folder):
        for name in files:
            sync(Path(inner, name))
        sync(Path(inner))


def put_in_place(beside: Path, target: Path) -> None:
    """Rename a complete, synced folder to its place. One that is there is `.NAME.replaced` until this one is there."""
    if not target.exists():
        beside.rename(target)
        sync(target.parent)
        return
    replaced = target.with_name(f".{target.name}.replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    target.rename(replaced)
    try:
        beside.rename(target)
    except OSError:
        replaced.rename(target)
        raise
    sync(target.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def write_durably(path: Path, text: str) -> None:
    """Replace a file's content atomically: write a temporary file, sync it, rename it."""
    temporary = path.with_name(f".{path.name}.partial")
    try:
        temporary.write_text(text, encoding="utf-8")
        sync(temporary)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)
