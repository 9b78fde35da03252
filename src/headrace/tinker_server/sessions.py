"""Who is there: clients, and their handles on sampler weights."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True, eq=False)
class Session:
    """A client that is alive as long as its heart beats."""

    id: str
    user_metadata: Mapping[str, Any] | None
    display_name: str | None
    seen: float = field(default_factory=time.monotonic)
    models: list[str] = field(default_factory=list)
    samplers: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class SamplingSession:
    """A client's handle on a set of weights."""

    id: str
    session: Session
    key: str
