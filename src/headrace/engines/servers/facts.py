"""What is known of a server of any kind, and what none may answer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.errors import DataError

_FLOOR = -9998.0  # what vLLM returns for minus infinity and for what is no number is below


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What a server is."""

    model: str
    max_model_length: int | None
    world_size: int
    priorities: bool
    """Whether requests may go before others."""


def require_finite(logprobs: Sequence[float], url: str) -> None:
    """Refuse what no loss could be computed with."""
    for logprob in logprobs:
        if logprob is None or not math.isfinite(logprob) or logprob < _FLOOR:
            raise DataError(f"{url} returned the log-probability {logprob}, which cannot be trained on")
