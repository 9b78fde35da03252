"""Tiny models that take their time: else all of a reply would be there before anything can happen to it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

_MOST_STEPS, _CALL_S = 2, 0.0005


def slowed(decode_and_sample: Callable[..., Any]) -> Callable[..., Any]:
    """The same function or method, a few tokens at a time, with a moment for others before each call."""

    def slow(*arguments: Any) -> Any:
        *others, draws = arguments
        time.sleep(_CALL_S)
        return decode_and_sample(*others, replace(draws, steps=min(draws.steps, _MOST_STEPS)))

    return slow
