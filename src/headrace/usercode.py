"""Telling users' own lines from ours and from those of libraries."""

from __future__ import annotations

import os
import sysconfig
import traceback
from collections.abc import Iterable
from pathlib import Path

_PACKAGE = f"{Path(__file__).parent}{os.sep}"
_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))


def innermost_of_user(frames: Iterable[traceback.FrameSummary]) -> traceback.FrameSummary | None:
    """The innermost line that a user wrote; None if there is none."""
    own = [f for f in frames if not f.filename.startswith((_PACKAGE, *_LIBRARIES)) and not f.filename.startswith("<")]
    return own[-1] if own else None


def where_it_failed(error: BaseException) -> str:
    """The error, and the innermost line of the user's own code, which is what they need to see."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(_PACKAGE)]
    place = innermost_of_user(frames) or (frames[-1] if frames else None)
    where = f" at {place.filename}:{place.lineno}: {place.line}" if place else ""
    return f"{type(error).__name__}: {error}{where}"
