"""What is known of a server of any kind, and what none may answer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.errors import ConfigError, DataError

_FLOOR = -9998.0  # what vLLM returns for minus infinity and for what is no number is below


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What a server is."""

    model: str
    max_model_length: int | None
    world_size: int
    priorities: bool
    """Whether requests may go before others."""


def require_length(longest: int | None, needed: int, url: str, argument: str) -> None:
    """Refuse a server that reads less than an engine asks of it: it would refuse or cut replies, one by one."""
    if longest is not None and longest < needed + 1:  # scoring a row samples one token behind it
        raise ConfigError(
            f"the server at {url} reads at most {longest} tokens, and engine.max_model_length comes to {needed}; set "
            f"it to {longest - 1}, or start the server with {argument} {needed + 1}"
        )


def require_finite(logprobs: Sequence[float], url: str) -> None:
    """Refuse what no loss could be computed with."""
    for logprob in logprobs:
        if logprob is None or not math.isfinite(logprob) or logprob < _FLOOR:
            raise DataError(f"{url} returned the log-probability {logprob}, which cannot be trained on")
