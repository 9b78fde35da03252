"""One engine of a pool, and what the pool knows of it."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.engines.base import RolloutEngine
from headrace.errors import EngineError


@dataclass(slots=True, eq=False)
class Replica:
    """One engine of the pool."""

    number: int
    engine: RolloutEngine
    life: int = 0
    """Counts how often it was lost."""
    in_flight: int = 0
    gone: EngineError | None = None
    """Why it will not come back."""
    missed: bool = False
    """It was away when the others were paused or resumed."""
    stale: bool = False
    """It was pinned or away during a weight sync, and has to be brought the current version."""

    @property
    def reachable(self) -> bool:
        """Whether it can be talked to now."""
        return self.gone is None and self.engine.health().state != "starting"

    @property
    def serves(self) -> bool:
        """Whether it takes requests now."""
        return self.gone is None and not self.stale and self.engine.health().state == "serving"
