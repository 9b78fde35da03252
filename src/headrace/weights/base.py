"""What weight transport is made of: what is sent, how it travels, and what a completed sync has proved."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class WeightSource(Protocol):
    """The learner's trained weights, as they are now."""

    async def fingerprint(self) -> str:
        """A digest that a change of any of the weights changes; the engine takes the same of what it decodes with."""
        ...


class WeightSender(Protocol):
    """How weights travel from a source to one engine. The engine holds the other end of it."""

    @property
    def in_place(self) -> bool:
        """Whether nothing travels: the engine decodes with the learner's own tensors, and pauses while they change."""
        ...

    async def send(self, version: int) -> None:
        """Put the learner's weights where the engine takes them from: after `begin_update`, before `end_update`."""
        ...


@dataclass(frozen=True, slots=True)
class SyncedWeights:
    """Weights that the engine is proved to decode with: their version, and the fingerprint of their content."""

    version: int
    fingerprint: str
