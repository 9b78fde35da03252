"""Removes a folder that a program has filled, whatever is in it: very deep, without permissions, with odd names."""

from __future__ import annotations

import contextlib
import os
import secrets


def remove_folder(folder: str) -> None:
    """Folders inside are moved to the top before they are emptied, so that no path becomes long and no stack deep."""
    unused, count, waiting = secrets.token_hex(8), 0, [folder]
    while waiting:
        inside = waiting.pop()
        with contextlib.suppress(OSError), os.scandir(inside) as entries:
            for entry in list(entries):
                with contextlib.suppress(OSError):
                    if not entry.is_dir(follow_symlinks=False):
                        os.unlink(entry.path)
                        continue
                    count += 1
                    target = f"{folder}/{unused}-{count}"
                    os.chmod(entry.path, 0o700)  # or it could be neither moved nor read
                    os.rename(entry.path, target)
                    waiting.append(target)
        with contextlib.suppress(OSError):
            os.rmdir(inside)
    with contextlib.suppress(OSError):
        os.rmdir(folder)
