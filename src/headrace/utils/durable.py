"""Files that a kill or a power cut leaves as they were or as they are to be, and never half-way."""

from __future__ import annotations

import errno
import os
from pathlib import Path


def sync(path: Path) -> None:
    """Have the disk hold a file's content, or a folder's entries, as they are now."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL or not path.is_dir():  # some file systems cannot sync a folder, and need not
            raise
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """`sync` for everything below a folder, and the folder itself."""
    for inner, _, files in os.walk(folder):
        for name in files:
            sync(Path(inner, name))
        sync(Path(inner))


def write_durably(path: Path, text: str) -> None:
    """Replace a file's content in one go: written beside, synced, renamed."""
    beside = path.with_name(f".{path.name}.partial")
    try:
        beside.write_text(text, encoding="utf-8")
        sync(beside)
        beside.replace(path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise
    sync(path.parent)
