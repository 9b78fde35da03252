"""A sign of life from within a long call: whoever watches over a rank takes its silence for a hang."""

from __future__ import annotations

from collections.abc import Callable


def _nobody() -> None: ...


listener: Callable[[], None] = _nobody
"""Set by the process or actor that runs a rank."""


def made() -> None:
    """A part of a long call is done."""
    listener()
